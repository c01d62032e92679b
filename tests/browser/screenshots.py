"""Write the pictures of docs/images: `make screenshots`.

The demo's page and, where the runs are, that of Fashion-MNIST.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from fedhb.report.page import write

SHOTS = {
    "demo": ("desktop", "light", [None]),
    "fashion": ("desktop", "light", [None, "learning", "clients", "uncertainty"]),
    "niw": ("desktop", "dark", ["posterior"]),
    "mixture": ("desktop", "light", ["posterior"]),
    "demo-phone": ("phone", "dark", [None]),
}
"""Picture -> size, light or dark, and the sections (None: the top of the page)."""
SIZES = {"desktop": {"width": 1200, "height": 800}, "phone": {"width": 390, "height": 800}}


def main(folder: Path) -> None:
    """Make the pages from runs/, and a picture of each."""
    pages = {"demo": ["runs/demo"], "demo-phone": ["runs/demo"], "fashion": ["runs/fashion"]}
    pages |= {name: [f"runs/demo/{name}-seed0"] for name in ("niw", "mixture")}
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, (size, scheme, sections) in SHOTS.items():
            sources = [Path(source) for source in pages[name]]
            if not all(source.is_dir() for source in sources):
                continue
            html = folder / f".{name}.html"
            write(sources, html)
            page = browser.new_context(viewport=SIZES[size], color_scheme=scheme).new_page()
            page.goto(html.resolve().as_uri())
            page.wait_for_timeout(1000)
            for section in sections:
                if section:
                    page.evaluate(
                        "name => document.getElementById(name).scrollIntoView({behavior: 'instant'})",
                        section,
                    )
                    page.wait_for_timeout(400)
                page.screenshot(
                    path=folder / f"report-{name}{'-' + section if section else ''}.png"
                )
            html.unlink()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
