"""The page: one file with its style sheet, its script, the plotting library and the data inside. It asks for nothing else."""

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
from fedhb.report.run_data import NONSENSE, Method, read, senseless
from fedhb.report.tables import result_table, worst_clients
from fedhb.report.wording import escape, listed

LIBRARY = "echarts.min.js"


def write(
    paths: Sequence[Path], out: Path, tell: Callable[[str], None] = lambda text: None
) -> list[Method]:
    """The page of these runs; the methods that are on it."""
    methods = read(paths, lambda path: tell(f"reading {path.name}"))
    tell("the paper's numbers")
    cells = paper_numbers(methods)
    tell("drawing up the plots")
    try:
        text = page(methods, cells)
    except NONSENSE:
        blame(methods)
        raise
    tell("writing")
    write_atomically(out, text.encode())
    return methods


def blame(methods: Sequence[Method]) -> None:
    """Refuse the run whose files no page can be made of, by itself either."""
    for method in methods:
        for run in method.runs:
            try:
                page([Method(method.name, [run], method.style)], {})
            except NONSENSE as error:
                raise senseless(run.path, error) from None


def paper_numbers(methods: Sequence[Method]) -> dict[str, tuple[str, Printed]]:
    """For each method that is one of the paper's cells: which, and its numbers."""
    found = {m.name: numbers(m.first.algorithm, m.first.settings) for m in methods}
    return {name: numbers for name, numbers in found.items() if numbers[1]}


def page(methods: Sequence[Method], cells: dict[str, tuple[str, Printed]]) -> str:
    """The HTML of the page."""
    plots: list[Plot] = []

    def figures(found: Sequence[Plot | None]) -> str:
        real = [plot for plot in found if plot is not None]
        plots.extend(real)
        return f'<div class="plots">{"".join(map(frame, real))}</div>' if real else ""

    body = [
        section("results", "Results", results(methods, cells)),
        section("learning", "Learning curves", figures(curves.plots(methods)), toolbar="x"),
        section(
            "clients",
            "Clients",
            figures(
                [clients_section.label_heat(methods), *clients_section.before_and_after(methods)]
            )
            + worst(methods),
        ),
        section("uncertainty", "Uncertainty", figures(uncertainty_section.plots(methods))),
        section("posterior", "Posterior", figures(posterior_section.plots(methods))),
        section("map", "Who resembles whom", figures([clients_section.client_map(methods)])),
        section(
            "settings",
            "Settings and origin",
            summary_section.settings_table(methods) + summary_section.provenance(methods),
            table=True,
        ),
    ]
    present = [part for part in body if part]
    links = "".join(
        f'<a href="#{part.split(chr(34))[1]}">{part.split("</h2>")[0].rpartition(">")[2]}</a>'
        for part in present
    )
    data = {
        "plots": plots,
        "methods": [
            {"name": m.name, "colour": m.style.colour, "dash": m.style.dash} for m in methods
        ],
    }
    title = summary_section.title(methods)
    return Template(asset("page.html")).substitute(
        title=escape(title),
        sentence=escape(summary_section.sentence(methods)),
        facts="".join(
            f'<div class="fact"><dt>{escape(what)} <span>{escape(whose)}</span></dt><dd>{escape(value)}</dd></div>'
            for value, what, whose in summary_section.facts(methods)
        ),
        missing=missing(methods),
        links=links,
        body="\n".join(present),
        style=asset("page.css"),
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        library=asset(LIBRARY).replace("</script", "<\\/script"),
        script=asset("page.js"),
    )


def section(name: str, title: str, content: str, toolbar: str = "", table: bool = False) -> str:
    """A part of the page; nothing where it has no content."""
    if not content:
        return ""
    bar = f'<div class="toolbar" data-toolbar="{toolbar}"></div>' if toolbar else ""
    wrapped = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{content}</div>'
        if table
        else content
    )
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{bar}{wrapped}</section>'


def frame(plot: Plot) -> str:
    """Where the script draws a plot; whoever does not see it is told what it shows."""
    name, alt = plot["id"], escape(plot["alt"] or plot["title"], quote=True)
    note = f'<p class="note">{escape(plot["note"])}</p>' if plot["note"] else ""
    wide = (
        " wide"
        if plot["type"] == "heat" or name in ("map", "entropy", "prototypes", "labels")
        else ""
    )
    return (
        f'<figure class="plot{wide}" id="figure-{name}"><figcaption><h3>{escape(plot["title"])}</h3>{note}</figcaption>'
        f'<div class="controls"></div><div class="canvas" id="plot-{name}" role="img" aria-label="{alt}"></div>'
        '<details><summary>Values as a table</summary><div class="scroll" tabindex="0" role="region" aria-label="values"></div>'
        "</details></figure>"
    )


def results(methods: Sequence[Method], cells: dict[str, tuple[str, Printed]]) -> str:
    """The result tables, and which of the paper's cells this is."""
    known = {name: numbers for name, (_, numbers) in cells.items()}
    tables = [result_table(methods, known), result_table(methods, {}, novel=True)]
    shown = [
        f'<div class="scroll" tabindex="0" role="region" aria-label="results">{table}</div>'
        for table in tables
        if table
    ]
    if not shown:
        return "<p>No run here is finished and evaluated yet.</p>"
    of = list(dict.fromkeys(cell for cell, _ in cells.values()))
    if of:
        where = f"The federation is that of a cell of the paper (Kim and Hospedales, FedHB): {listed(of)}"
        shown.append(
            f"<p class=note>{escape(where)}. The methods' own settings are at the end of this page.</p>"
        )
    return "".join(shown)


def worst(methods: Sequence[Method]) -> str:
    """The worst clients of every method."""
    tables = [table for method in methods if (table := worst_clients(method))]
    parts = [
        f'<div class="scroll" tabindex="0" role="region" aria-label="worst clients">{table}</div>'
        for table in tables
    ]
    if len(parts) > 2:
        return f"{parts[0]}<details><summary>The same for the other methods</summary>{''.join(parts[1:])}</details>"
    return "".join(parts)


def missing(methods: Sequence[Method]) -> str:
    """A line that says what is left out, and why."""
    old = [
        run.path.name
        for m in methods
        for run in m.runs
        if run.result is not None and run.evaluation is None
    ]
    if not old:
        return ""
    what = "label counts, uncertainty, posterior and map"
    return (
        f'<p class="missing">{escape(listed(old))} {"has" if len(old) == 1 else "have"} no evaluation.json (of an older version, '
        f"stopped while it was evaluated, or not evaluated here): {what} of {'it' if len(old) == 1 else 'them'} are left out.</p>"
    )


def asset(name: str) -> str:
    """A file of assets/."""
    return resources.files("fedhb.report").joinpath("assets", name).read_text(encoding="utf-8")
