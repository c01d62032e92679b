"""Pages in a real browser: nothing is said on the console, every plot is drawn, and what can be
used works.
"""

from __future__ import annotations

import re

import pytest

PHONE = {"width": 390, "height": 844}
pytestmark = pytest.mark.browser
NAMES = ("empirical-bayes", "mixture", "comparison")


def marks(page, plot):
    """How many marks of the data a plot has in the DOM: shapes that are neither axes nor text."""
    return page.evaluate(
        """name => {
            const colours = new Set();
            const add = (plot) => { for (const one of plot.series || []) colours.add(one.colour.toLowerCase());
                                    for (const one of Object.values(plot.options || {})) add(one); };
            add(fedhb.data.plots.find((plot) => plot.id === name));
            const hex = (c) => { const m = /rgba?\\((\\d+),\\s*(\\d+),\\s*(\\d+)/.exec(c || "");
                                 if (!m) return (c || "").toLowerCase();
                                 return "#" + m.slice(1, 4).map((v) => (+v).toString(16).padStart(2, "0")).join(""); };
            const shapes = [...document.querySelectorAll(`#plot-${name} svg path`)];
            if (!colours.size) return shapes.length;
            return shapes.filter((s) => ["fill", "stroke"].some((what) => colours.has(hex(s.getAttribute(what))))).length;
        }""",
        plot,
    )


@pytest.mark.parametrize("name", [*NAMES, "regression"])
@pytest.mark.parametrize(("size", "scheme"), [(None, "light"), (None, "dark"), (PHONE, "light")])
def test_nothing_is_said_and_nothing_is_asked_for(show, name, size, scheme):
    with show(name, **({"size": size} if size else {}), scheme=scheme) as (page, said, asked):
        assert said == []
        assert all(url.startswith(("file:", "data:")) for url in asked)
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate(
            "window.innerWidth"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_plot_is_drawn(show, name):
    with show(name) as (page, _, _):
        plots = page.evaluate("fedhb.data.plots.map((plot) => plot.id)")
        wanted = {
            "curve-loss",
            "curve-score",
            "labels",
            "scatter",
            "bars",
            "reliability",
            "confidence",
            "rejection",
            "entropy",
            "map",
        }
        wanted |= {"layers"} if name != "mixture" else {"prototypes", "use", "skill"}
        assert wanted <= set(plots)
        for plot in plots:
            assert marks(page, plot) >= 1, f"{plot} is empty"
            box = page.locator(f"#plot-{plot}").bounding_box()
            assert box["width"] > 300 and box["height"] > 150
        cells = page.evaluate(
            "fedhb.data.plots.find((plot) => plot.id === 'labels').values.flat().length"
        )
        assert marks(page, "labels") >= cells


def test_a_regression_has_coverage_and_no_labels(show):
    with show("regression") as (page, _, _):
        plots = page.evaluate("fedhb.data.plots.map((plot) => plot.id)")
        assert {"coverage", "rejection-rmse", "entropy", "scatter", "layers", "map"} <= set(plots)
        assert not {"labels", "reliability", "confidence"} & set(plots)
        assert all(marks(page, plot) >= 1 for plot in plots)
        assert "site " in page.inner_text("#clients table")


@pytest.mark.parametrize("name", NAMES)
def test_hover_shows_the_values_of_a_round(show, name):
    with show(name) as (page, _, _):
        plot = page.locator("#plot-curve-loss")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tip = page.locator("#plot-curve-loss .tip")
        tip.wait_for(state="visible")
        found = re.match(r"round (\d+)(.*)", " ".join(tip.inner_text().split()))
        at = int(found.group(1))
        for series in page.evaluate("fedhb.data.plots[0].series.filter((one) => !one.faint)"):
            shown = float(
                re.search(rf"{re.escape(series['name'])}: ([\d.e-]+)", found.group(2)).group(1)
            )
            assert shown == pytest.approx(series["y"][series["x"]["round"].index(at)], rel=1e-3)


def test_hover_names_a_client(show):
    with show("comparison") as (page, _, _):
        page.locator("#plot-bars").scroll_into_view_if_needed()
        box = page.locator("#plot-bars").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.6)
        page.locator("#plot-bars .tip").wait_for(state="visible")
        assert re.match(r"client \d", page.locator("#plot-bars .tip").inner_text())


def test_methods_are_switched_off_and_on_everywhere(show):
    with show("comparison") as (page, said, _):
        before = {
            plot: marks(page, plot)
            for plot in ("curve-loss", "scatter", "reliability", "confidence")
        }
        button = page.locator("#methods button", has_text="fedavg")
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        for plot, count in before.items():
            assert 0 < marks(page, plot) < count
            names = page.evaluate(
                f"fedhb.charts.get('{plot}').getOption().series.map((one) => one.name)"
            )
            assert not any(name.startswith("fedavg") for name in names)
        button.focus()
        page.keyboard.press("Space")  # the keyboard does what the mouse does
        assert button.get_attribute("aria-pressed") == "true"
        assert {plot: marks(page, plot) for plot in before} == before
        for one in page.locator("#methods button").all():  # without any method nothing breaks
            one.click()
        assert said == []


def test_the_horizontal_axis_can_be_what_was_sent(show):
    with show("empirical-bayes") as (page, _, _):
        page.get_by_role("button", name="bytes sent").click()
        option = page.evaluate(
            "(() => { const o = fedhb.charts.get('curve-loss').getOption(); return [o.xAxis[0].name, o.series[0].data]; })()"
        )
        assert option[0] == "sent in all, MB"
        sent = page.evaluate("fedhb.data.plots[0].series[0].x.sent")
        assert [point[0] for point in option[1]] == sent


def test_another_method_is_chosen_with_the_keyboard(show):
    with show("comparison") as (page, _, _):
        select = page.locator("#figure-bars select")
        assert page.locator("#figure-bars .told").inner_text().startswith("empirical-bayes:")
        select.focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function(
            "document.querySelector('#figure-bars .told').textContent.startsWith('mixture:')"
        )
        assert page.locator("#plot-bars").get_attribute("aria-label").startswith("mixture:")


def test_values_are_there_as_a_table(show):
    with show("comparison") as (page, _, _):
        for plot in page.evaluate("fedhb.data.plots.map((plot) => plot.id)"):
            page.locator(f"#figure-{plot} summary").click()
            page.locator(f"#figure-{plot} details tbody tr").nth(1).wait_for()


def test_light_and_dark(show):
    def ground(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with show("empirical-bayes", scheme="light") as (page, _, _):
        light = ground(page)
        page.locator("#theme").click()
        assert (
            ground(page) != light
            and page.evaluate("document.documentElement.dataset.theme") == "dark"
        )
        ink = page.evaluate("fedhb.charts.get('curve-loss').getOption().textStyle.color")
        assert ink == page.evaluate(
            "getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()"
        )
    with show("empirical-bayes", scheme="dark") as (page, _, _):
        assert ground(page) != light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(show, scheme):
    """WCAG 2.2, 1.4.3: 4.5 to 1 for text."""
    with show("empirical-bayes", scheme=scheme) as (page, _, _):
        ratios = page.evaluate(
            """() => { const at = (n) => getComputedStyle(document.documentElement).getPropertyValue(n).trim();
            const light = (h) => { const p = [1, 3, 5].map((k) => parseInt(h.slice(k, k + 2), 16) / 255)
                .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                return .2126 * p[0] + .7152 * p[1] + .0722 * p[2]; };
            const ratio = (a, b) => { const [l, h] = [light(a), light(b)].sort((x, y) => x - y); return (h + .05) / (l + .05); };
            const grounds = ["--ground", "--raised"];
            return ["--ink", "--soft", "--accent"].flatMap((ink) => grounds.map((g) => ratio(at(ink), at(g)))); }"""
        )
        assert min(ratios) >= 4.5


def test_the_page_can_be_walked_through_with_the_keyboard(show):
    with show("comparison") as (page, _, _):
        seen = []
        for _ in range(14):
            page.keyboard.press("Tab")
            seen.append(
                page.evaluate(
                    "(document.activeElement.textContent || '').trim().slice(0, 20) || document.activeElement.tagName"
                )
            )
        assert seen[0] == "Skip to the results" and "empirical-bayes" in seen and "rounds" in seen


def test_no_call_has_as_many_arguments_as_there_are_points(show):
    """A browser refuses a call with some 100,000 of them: the page of many clients would stay
    empty.
    """
    with show("comparison") as (page, said, _):
        most = page.evaluate(
            """() => {
                let most = 0;
                for (const name of ["min", "max"]) {
                    const own = Math[name];
                    Math[name] = (...values) => { if (values.length > most) most = values.length; return own(...values); };
                }
                document.getElementById("theme").click();
                return most;
            }"""
        )
        assert 2 <= most <= 10 and said == []
