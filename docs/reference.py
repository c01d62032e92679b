"""The API reference from docstrings, into a folder: `python docs/reference.py site/api`."""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc

import fedhb

if __name__ == "__main__":
    for name in fedhb.__all__:  # they are imported on first use, which pdoc does not make
        setattr(fedhb, name, getattr(fedhb, name))
    pdoc.render.configure(docformat="google")
    pdoc.pdoc("fedhb", output_directory=Path(sys.argv[1]))
