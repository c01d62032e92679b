"""The site's pages from outside docs/, and links that lead to the same places as in the
repository.

README.md is the home page; the changelog, the contributing guide, the benchmarks and the
experiments' READMEs are pages too. A link to a file that is no page becomes its name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def pages() -> dict[str, str]:
    """The page of every document: its path in the repository -> its path on the site."""
    experiments = [
        path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("experiments/*/README.md"))
    ]
    found = {"README.md": "index.md"} | {name: name for name in [*OUTSIDE, *experiments]}
    return found | {
        path.relative_to(ROOT).as_posix(): path.name
        for path in sorted((ROOT / "docs").glob("*.md"))
    }


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    for source, target in pages().items():
        if not source.startswith("docs/"):
            files.append(
                File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8"))
            )
    for path in sorted(ROOT.glob("experiments/*/figures/*.svg")):
        files.append(
            File.generated(
                config, path.relative_to(ROOT).as_posix(), content=path.read_text(encoding="utf-8")
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the site needs them."""
    known = pages()
    here = next(source for source, target in known.items() if target == page.file.src_uri)

    def led(match: re.Match[str]) -> str:
        mark, text, target, part = match.groups()
        if ":" in target:
            return match.group(0)
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if not (ROOT / place).exists():
            raise ValueError(f"{here} links to {target}, which does not exist")
        if place in known:
            there = posixpath.relpath(known[place], posixpath.dirname(page.file.src_uri))
            return f"{mark}[{text}]({there}{part or ''})"
        if mark and place.startswith("experiments/"):
            return (
                f"{mark}[{text}]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri))})"
            )
        if place.startswith("docs/"):
            folder = posixpath.dirname(page.file.src_uri)
            return f"{mark}[{text}]({posixpath.relpath(place.removeprefix('docs/'), folder)})"
        return text if text.strip("`") == place else f"{text} (`{place}`)"

    return LINK.sub(led, markdown)
