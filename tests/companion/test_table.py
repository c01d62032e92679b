"""Tables of records, beside the printed numbers."""

from __future__ import annotations

from rich.table import Column, Table
from small_experiment import complete, lines, write

from fedhb_paper.markdown import as_markdown


def test_tables_as_markdown():
    table = Table("a", Column("b", justify="right"), title="[bold]t[/bold]", caption="c")
    table.add_row("x|y", "[green]1[/green]")
    table.add_row("two\nlines", "2")
    expected = [
        "**t**",
        "",
        "| a | b |",
        "| --- | ---: |",
        "| x\\|y | 1 |",
        "| two<br>lines | 2 |",
        "",
        "c",
        "",
    ]
    assert as_markdown(table).split("\n") == expected


def test_ours_beside_the_printed(tmp_path, run):
    write(tmp_path)
    complete(tmp_path)
    code, printed = run("paper", "small", "--folder", tmp_path, "--show")
    assert code == 0 and "12 of 12 records are there" in printed
    values = [
        100 * r["result"]["global"]["accuracy"]
        for r in lines(tmp_path)
        if r["key"]["cell"] == "one" and r["key"]["variant"] == "niw"
    ]
    mean, deviation = sum(values) / 2, abs(values[0] - values[1]) / 2**0.5
    assert f"{mean:.2f} ±{deviation:.2f}" in printed
    for text in (
        "printed 97.80 ±0.12",
        "printed 97.16",
        "printed 98.00 ±1.50",
        "mean ranks",
        "Friedman",
    ):
        assert text in printed
    _, printed = run("paper", "small", "--folder", tmp_path, "--show", "--algorithms", "fedavg")
    assert "printed 97.16" in printed and "printed 97.80" not in printed
