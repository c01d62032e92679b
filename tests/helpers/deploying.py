"""`fedhb deploy` as a call."""

from __future__ import annotations

from typer.testing import CliRunner

from fedhb.cli.main import app


def deploy(*words):
    result = CliRunner().invoke(app, ["deploy", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output
