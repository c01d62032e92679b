"""Writes the files of a deployment (`fedhb deploy init`).

DIR/app/                 the Flower app: pyproject.toml, fedhb_app/ (two lines of code)
DIR/settings.toml        the settings of the run, as for `fedhb train`
DIR/run.toml             the run config made of it (by `up`, or `fedhb deploy config`)
DIR/certificates/        ca.crt (for every node), ca.key, server.pem, server.key (for the server)
DIR/keys/                node-K, node-K.pub: a node's identity; the first is for that node alone
DIR/flower/config.toml   where the SuperLink is, for the `flwr` command (FLWR_HOME=DIR/flower)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedhb.errors import InputError
from fedhb.files import check_unused, write_atomically
from fedhb.flower.deploy import certificates
from fedhb.flower.federated_task import Rules
from fedhb.runs.settings import Settings, toml_value

NAME = "fedhb"
"""The SuperLink's name in the config of the `flwr` command."""

APP = '"""{title}"""\n\nfrom fedhb.flower.{module} import app\n\n__all__ = ["app"]\n'
"""The code of the server's app, and of the client's."""


def init(folder: Path, nodes: int, hosts: Sequence[str], port: int, settings: Settings) -> None:
    """Write a deployment into a folder that is empty or absent."""
    check_unused(folder, "choose another folder, or remove it")
    if nodes < 1:
        raise InputError(f"nodes={nodes}: give at least 1")
    if not 0 < port < 65536:
        raise InputError(f"port={port}: give a number from 1 to 65535")
    every = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    for host in every:
        certificates.alternative(host)  # before anything is written
    write_app(folder / "app")
    certificates.make_authority(folder / "certificates")
    certificates.make_server(folder / "certificates", every)
    make_missing_keys(folder, nodes)
    write_connection(folder, f"{every[0]}:{port}")
    write_settings(folder, settings)
    write_run_config(folder, settings, {"nodes": nodes, "out": str((folder / "run").absolute())})


def make_missing_keys(folder: Path, nodes: int) -> None:
    """Make a key for every node that has none."""
    for k in range(nodes):
        if not (folder / "keys" / f"node-{k}").exists():
            certificates.make_node_key(folder / "keys" / f"node-{k}")


def write_app(folder: Path) -> None:
    """Write the Flower app."""
    defaults: dict[str, Any] = {"settings": "", "out": "", "resume": False}
    defaults |= {f.name.replace("_", "-"): f.default for f in fields(Rules)}
    config = "\n".join(f"{key} = {toml_value(value)}" for key, value in defaults.items())
    project = f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedhb-app"
version = "1.0.0"
description = "A federation of fedhb"
license = "Apache-2.0"
dependencies = ["flwr>=1.41.0", "fedhb"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedhb"

[tool.flwr.app.components]
serverapp = "fedhb_app.server_app:app"
clientapp = "fedhb_app.client_app:app"

[tool.flwr.app.config]
{config}
"""
    write_atomically(folder / "pyproject.toml", project.encode())
    titles = {"server_app": "The server of the federation.", "client_app": "A client of it."}
    modules = {name: APP.format(title=title, module=name) for name, title in titles.items()}
    for name, content in ({"__init__": '"""A federation of fedhb."""\n'} | modules).items():
        write_atomically(folder / "fedhb_app" / f"{name}.py", content.encode())


def write_connection(folder: Path, address: str, home: Path | None = None) -> None:
    """Write where the `flwr` command finds the SuperLink."""
    authority = (folder / "certificates" / "ca.crt").absolute()
    text = (
        f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
        f"address = {toml_value(address)}\n"
        f"root-certificates = {toml_value(str(authority))}\n"
    )
    write_atomically((home or folder / "flower") / "config.toml", text.encode())


def write_settings(folder: Path, settings: Settings) -> None:
    """Write settings.toml, which later commands take where no flag says otherwise."""
    write_atomically(folder / "settings.toml", settings.to_toml({}).encode())


def write_run_config(folder: Path, settings: Settings, values: Mapping[str, Any]) -> Path:
    """Write run.toml: the settings as text, and the rules that are given."""
    path = folder / "run.toml"
    chosen = {
        "settings": settings.to_toml({}),
        **{key.replace("_", "-"): value for key, value in values.items()},
    }
    write_atomically(
        path, "".join(f"{key} = {toml_value(value)}\n" for key, value in chosen.items()).encode()
    )
    return path
