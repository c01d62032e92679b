"""The command line: puts the commands together and turns errors into exit codes.

Exit codes: 0 done, 2 bad input (a message that names the value and the remedy), 1 failure,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.metadata import entry_points
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from fedhb.cli import (
    algorithms_command,
    compare_command,
    data_commands,
    deploy_commands,
    predict_commands,
    report_command,
    train_command,
    tune_command,
)
from fedhb.engine import allocator
from fedhb.errors import InputError, Stopped

app = typer.Typer(
    name="fedhb",
    help="Hierarchical Bayesian federated learning.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # in "rich", the default, [digits] would be a style, and vanish
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True, highlight=False)

for _module in (
    train_command,
    compare_command,
    predict_commands,
    algorithms_command,
    data_commands,
    deploy_commands,
    report_command,
    tune_command,
):
    _module.register(app, console, errors)
for _command in entry_points(group="fedhb.commands"):  # of the companion, where it is installed
    _command.load()(app, console, errors)


def main() -> None:
    """Run the command line with its exit codes."""
    allocator.keep()
    terminated: list[int] = []

    def terminate(number: int, frame: Any) -> None:
        terminated.append(number)
        raise KeyboardInterrupt  # as Ctrl-C: the last whole round is kept

    signal.signal(signal.SIGTERM, terminate)
    # Wide tables should not be folded into a log's 80 columns.
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = 160
    try:
        app()
    except InputError as error:
        fail("error", str(error), 2)
    except Stopped as error:
        fail("failed", str(error), 1)
    except OSError as error:
        place = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        fail(
            "failed",
            f"{place}. Make room or mend it; a run that was started goes on with --resume from its "
            "last checkpoint, which is intact",
            1,
        )
    except MemoryError:
        fail("failed", "out of memory: use fewer workers, a smaller model or less data", 1)
    except (KeyboardInterrupt, SystemExit) as ended:
        # typer turns an interruption into code 130
        if isinstance(ended, SystemExit) and ended.code != 130:
            raise
        sys.exit(143 if terminated else 130)


def fail(word: str, message: str, code: int) -> None:
    """Print a message and end with this exit code."""
    errors.print(f"[bold red]{word}:[/bold red] {escape(message)}", soft_wrap=True)
    sys.exit(code)


def entry() -> None:
    """Run the command `fedhb`.

    After Ctrl-C it ends at once: taking torch down in order can take a second.
    """
    try:
        main()
    except SystemExit as ended:
        if ended.code in (130, 143):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code))
        raise
