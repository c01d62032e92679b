"""Every snippet of the README and of docs/ runs: blocks in order, one namespace and one folder per page.

Python blocks are executed, `fedhb` lines go through the command line (training with few rounds), `make` lines must name a target,
TOML is parsed, and the last of it is `toml`. Comments that no reader sees help:

    <!-- setup ... -->            Python before the next block: the data that the text only speaks of
    <!-- check ... -->            Python after it: what must be true then
    <!-- not run: why -->         the next block needs real data or minutes; its `fedhb` lines are parsed all the same
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from fedhb.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
    ROOT / "CONTRIBUTING.md",
]
PART = re.compile(r"<!--\s*(setup|check|not run:)(.*?)-->|^```(\w*)\n(.*?)^```$", re.S | re.M)
QUICK = {
    "train": ["--rounds", "2", "--personal-epochs", "1", "--set", "model.hidden=16"],
    "compare": ["--rounds", "2", "--personal-epochs", "1", "--set", "model.hidden=16"],
}
ELSEWHERE = ("docs/deployment.md",)
"""Pages whose commands run with real processes, in `make test-federation`
(tests/federation/test_machines.py).
"""
IN_THE_CLONE = ("paper", "tune")
NOT_RUN = 6
"""Blocks that are not run, at most: a page that cannot be tried is a page that goes wrong."""


def parts(path):
    """Return the parts of a page that are run: (kind, text, line)."""
    text = path.read_text(encoding="utf-8")
    for match in PART.finditer(text):
        line = text[: match.start()].count("\n") + 1
        yield (match[1], match[2], line) if match[1] else (match[3], match[4], line)


def commands(text):
    """The commands of a shell block: no comments, continued lines as one."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def parsed(words):
    """Whether the command line knows this command and its options, without running it."""
    group = typer.main.get_command(main.app)
    command = group.commands[words[1]]
    command.make_context(
        words[1],
        list(words[2:]),
        parent=group.make_context("fedhb", [words[1]], resilient_parsing=True),
    )


def clone(folder):
    """The experiments as in a clone of the repository: what is written there stays out of this one."""
    place = folder / "clone"
    if not place.exists():
        shutil.copytree(ROOT / "experiments", place / "experiments")
        shutil.copy(ROOT / "pyproject.toml", place)
    return place


def run_command(words, monkeypatch, folder):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), (
            f"the Makefile has no target {words[1]}"
        )
        return
    assert words[0] == "fedhb", f"{words[0]}: say how to test it, or mark the block"
    monkeypatch.chdir(
        clone(folder) if words[1] in IN_THE_CLONE and not Path(words[-1]).exists() else folder
    )
    monkeypatch.setattr(sys, "argv", [*words, *QUICK.get(words[1], [])])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code, shlex.join(words)
    monkeypatch.chdir(folder)


@pytest.mark.filterwarnings("default")  # other people's packages warn as they like
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_snippets_run(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    space, skip = {"ROOT": str(ROOT), "__name__": "page"}, False
    for kind, text, line in parts(path):
        where = f"{path.name}:{line}"
        skip = skip or path.relative_to(ROOT).as_posix() in ELSEWHERE
        if kind == "not run:":
            skip = True
        elif kind in ("setup", "check", "python"):
            code = compile("\n" * line + text, str(path), "exec")
            if not skip or kind != "python":
                exec(code, space)
            skip = skip and kind != "python"
        elif kind == "sh":
            for words in commands(text):
                if skip:
                    parsed(words) if words[0] == "fedhb" else None
                else:
                    run_command(words, monkeypatch, tmp_path)
            skip = False
        elif kind == "toml":
            tomllib.loads(text)
            space["toml"] = text
        else:
            raise AssertionError(f"{where}: say in which language a block is: python, sh or toml")


def test_few_blocks_are_not_run():
    marked = [
        f"{path.name}:{line} {text.strip()}"
        for path in PAGES
        for kind, text, line in parts(path)
        if kind == "not run:"
    ]
    assert len(marked) <= NOT_RUN, marked
    assert all(text.split(" ", 1)[1] for text in marked)


def test_no_command_hides_from_the_test():
    """A command in an indented block would not be run."""
    for path in PAGES:
        hidden = re.findall(
            r"^    (?:\$ )?(?:fedhb|python|pip|import|from) .*$",
            path.read_text(encoding="utf-8"),
            re.M,
        )
        outside = [line for line in hidden if not any(line in text for _, text, _ in parts(path))]
        assert not outside, f"{path.name}: {outside}"


def test_an_unknown_option_in_a_block_is_found():
    with pytest.raises(Exception, match="No such option"):
        parsed(["fedhb", "train", "--nonsense", "1"])
