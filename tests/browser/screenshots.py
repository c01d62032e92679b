"""Write the pictures of docs/images: `make screenshots`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from fedhb.report.page import write

SECTIONS = {"report-demo.png": None, "report-demo-clients.png": "clients"}
"""Picture -> the section of the page that it shows (None: the top)."""


def main(folder: Path) -> None:
    """Make the page of the demo, and a picture of each section."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    folder.mkdir(parents=True, exist_ok=True)
    html = folder / ".demo.html"
    write([Path("runs/demo")], html)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="light")
        page.goto(html.resolve().as_uri())
        page.wait_for_timeout(1000)
        for name, section in SECTIONS.items():
            if section:
                page.evaluate(
                    "name => document.getElementById(name).scrollIntoView({behavior: 'instant'})",
                    section,
                )
                page.wait_for_timeout(400)
            page.screenshot(path=folder / name)
        browser.close()
    html.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
