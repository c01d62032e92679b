"""The page: one HTML file that holds its style sheet, script, plotting library and data.

It loads nothing from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from fedhb.files import write_atomically
from fedhb.report import (
    clients_section,
    curves,
    posterior_section,
    summary_section,
    uncertainty_section,
)
from fedhb.report.paper_numbers import Printed, numbers
from fedhb.report.plots import Plot
from fedhb.report.run_data import UNREADABLE, Method, read, unreadable
from fedhb.report.tables import result_table, worst_clients
from fedhb.report.wording import escape, listed

LIBRARY = "echarts.min.js"
TOOLBAR = '<div class="toolbar" data-toolbar="x"></div>'
"""The script puts the choice of the curves' horizontal axis here."""


def write(
    paths: Sequence[Path], out: Path, tell: Callable[[str], None] = lambda text: None
) -> list[Method]:
    """Write the page of these runs to `out`, and return the methods that are on it.

    Args:
        paths: folders of runs or of comparisons.
        out: the file.
        tell: reports each step in words.
    """
    methods = read(paths, lambda path: tell(f"reading {path.name}"))
    tell("looking up the paper's numbers")
    cells = paper_numbers(methods)
    tell("making the plots")
    try:
        text = page(methods, cells)
    except UNREADABLE:
        refuse_unreadable(methods)
        raise
    tell("writing the page")
    write_atomically(out, text.encode())
    return methods


def refuse_unreadable(methods: Sequence[Method]) -> None:
    """Raise an InputError that names the first run from which no page can be made."""
    for method in methods:
        for run in method.runs:
            try:
                page([Method(method.name, [run], method.style)], {})
            except UNREADABLE as error:
                raise unreadable(run.path, error) from None


def paper_numbers(methods: Sequence[Method]) -> dict[str, tuple[str, Printed]]:
    """Return (the paper's cell in words, its numbers) for each method that is such a cell."""
    cells = {m.name: numbers(m.first.algorithm, m.first.settings) for m in methods}
    return {name: cell for name, cell in cells.items() if cell[1]}


def page(methods: Sequence[Method], cells: dict[str, tuple[str, Printed]]) -> str:
    """Return the HTML of the page."""
    shown: list[Plot] = []

    def figures(plots: Sequence[Plot | None]) -> str:
        present = [plot for plot in plots if plot is not None]
        shown.extend(present)
        return f'<div class="plots">{"".join(map(frame, present))}</div>' if present else ""

    learning = figures(curves.plots(methods))
    client_plots = [
        clients_section.label_heat(methods),
        *clients_section.before_and_after(methods),
    ]
    settings = summary_section.settings_table(methods) + summary_section.provenance(methods)
    sections = [
        ("results", "Results", results(methods, cells)),
        ("learning", "Learning curves", TOOLBAR + learning if learning else ""),
        ("clients", "Clients", figures(client_plots) + worst(methods)),
        ("uncertainty", "Uncertainty", figures(uncertainty_section.plots(methods))),
        ("posterior", "Posterior", figures(posterior_section.plots(methods))),
        ("map", "Who resembles whom", figures([clients_section.client_map(methods)])),
        ("settings", "Settings and origin", scrollable(settings, "Settings and origin")),
    ]
    present = [(name, title, content) for name, title, content in sections if content]
    data = {
        "plots": shown,
        "methods": [
            {"name": m.name, "colour": m.style.colour, "dash": m.style.dash} for m in methods
        ],
    }
    return Template(asset("page.html")).substitute(
        title=escape(summary_section.title(methods)),
        sentence=escape(summary_section.sentence(methods)),
        facts="".join(
            f'<div class="fact"><dt>{escape(label)} <span>{escape(owner)}</span></dt>'
            f"<dd>{escape(value)}</dd></div>"
            for value, label, owner in summary_section.facts(methods)
        ),
        missing=missing(methods),
        links="".join(f'<a href="#{name}">{title}</a>' for name, title, _ in present),
        body="\n".join(section(*part) for part in present),
        style=asset("page.css"),
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        library=asset(LIBRARY).replace("</script", "<\\/script"),
        script=asset("page.js"),
    )


def section(name: str, title: str, content: str) -> str:
    """Return a section of the page."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>'
        f"{content}</section>"
    )


def scrollable(content: str, label: str) -> str:
    """Wrap a table so that it scrolls sideways where it is wider than the page."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{content}</div>'


def frame(plot: Plot) -> str:
    """Return the HTML in which the script draws a plot, with its description in words."""
    name, alt = plot["id"], escape(plot["alt"] or plot["title"], quote=True)
    note = f'<p class="note">{escape(plot["note"])}</p>' if plot["note"] else ""
    is_wide = plot["type"] == "heat" or name in ("map", "entropy", "prototypes", "labels")
    return (
        f'<figure class="plot{" wide" if is_wide else ""}" id="figure-{name}">'
        f"<figcaption><h3>{escape(plot['title'])}</h3>{note}</figcaption>"
        '<div class="controls"></div>'
        f'<div class="canvas" id="plot-{name}" role="img" aria-label="{alt}"></div>'
        f"<details><summary>Values as a table</summary>{scrollable('', 'values')}"
        "</details></figure>"
    )


def results(methods: Sequence[Method], cells: dict[str, tuple[str, Printed]]) -> str:
    """Return the result tables, and a note if the federation is that of a cell of the paper."""
    printed = {name: numbers for name, (_, numbers) in cells.items()}
    tables = [result_table(methods, printed), result_table(methods, {}, novel=True)]
    parts = [scrollable(table, "results") for table in tables if table]
    if not parts:
        return "<p>No run here is finished and evaluated yet.</p>"
    if cells:
        names = listed(list(dict.fromkeys(cell for cell, _ in cells.values())))
        text = (
            f"The federation is that of a cell of the paper (Kim and Hospedales, FedHB): {names}. "
            "The settings of the methods are at the end of this page."
        )
        parts.append(f"<p class=note>{escape(text)}</p>")
    return "".join(parts)


def worst(methods: Sequence[Method]) -> str:
    """Return the tables of the worst clients of every method."""
    tables = [table for method in methods if (table := worst_clients(method))]
    parts = [scrollable(table, "worst clients") for table in tables]
    if len(parts) > 2:
        return (
            f"{parts[0]}<details><summary>The same for the other methods</summary>"
            f"{''.join(parts[1:])}</details>"
        )
    return "".join(parts)


def missing(methods: Sequence[Method]) -> str:
    """Return a line that says what the page leaves out, and why; nothing if it is complete."""
    names = [
        run.path.name
        for method in methods
        for run in method.runs
        if run.result is not None and run.evaluation is None
    ]
    if not names:
        return ""
    has, its = ("has", "its") if len(names) == 1 else ("have", "their")
    return (
        f'<p class="missing">{escape(listed(names))} {has} no evaluation.json (written by an older '
        f"version, stopped during the evaluation, or not evaluated here): {its} label counts, "
        "uncertainty, posterior and map are left out.</p>"
    )


def asset(name: str) -> str:
    """Read a file of assets/."""
    return resources.files("fedhb.report").joinpath("assets", name).read_text(encoding="utf-8")
