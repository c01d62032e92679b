"""A headless Chromium: that of the system (Debian's package), driven by Playwright."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager

import finished
import pytest

from fedhb.report.page import write

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def browser():
    path = (
        os.environ.get("CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert path, (
        "no Chromium: install it (Debian: apt-get install chromium), or name it in $CHROMIUM"
    )
    from playwright.sync_api import sync_playwright  # here: `make test` does without it

    with sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The pages of a NIW run, of a Mixture run, of a regression, and of a comparison with two
    seeds.
    """
    folder = tmp_path_factory.mktemp("runs")
    sources = {
        "niw": finished.one(folder / "niw", "niw"),
        "mixture": finished.one(folder / "mixture", "mixture"),
    }
    sources["regression"] = finished.regression(folder / "regression")
    sources["comparison"] = finished.several(folder / "comparison")
    for name, source in sources.items():
        write([source], folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in sources}


@pytest.fixture
def show(browser, pages):
    """Open a page: (the page, what its console said, what it asked for)."""

    @contextmanager
    def opened(name, size=DESKTOP, scheme="light"):
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        page, said, asked = context.new_page(), [], []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_function(
            "window.fedhb && window.fedhb.charts.size === window.fedhb.data.plots.length"
        )
        yield page, said, asked
        context.close()

    return opened
