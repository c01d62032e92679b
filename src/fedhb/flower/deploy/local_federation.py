"""Runs a federation on this machine: a SuperLink with TLS, nodes with keys, and a run on them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedhb.errors import InputError, Stopped
from fedhb.flower.deploy import certificates
from fedhb.flower.deploy.app_files import NAME, write_connection, write_run_config, write_settings
from fedhb.flower.deploy.flower_processes import Processes, free_port, listens
from fedhb.flower.journal import EVENTS, STATUS
from fedhb.runs.folder import RunFolder
from fedhb.runs.settings import Settings

STARTING = 120.0
"""Seconds that a process has to start."""

ACCEPTED = ("training", "evaluating", "done")
"""States of a run that has accepted its settings."""

REFUSED = 305
"""The exit code of Flower's nodes that the SuperLink refuses."""

Tell = Callable[[str], None]


class Local:
    """A SuperLink and nodes of the deployment in `folder`, on loopback."""

    def __init__(self, folder: Path, tell: Tell = lambda text: None):
        self.folder, self.tell = folder.absolute(), tell
        self.processes = Processes(self.folder / "logs")
        self.port = 0
        self.secrets = self.folder / "certificates"

    def home(self, name: str) -> Path:
        """Return the Flower home of a process: each has its own."""
        return self.folder / "flower" / name

    def start_link(self) -> None:
        """Start the SuperLink, which refuses nodes without a registered key."""
        self.port = free_port()
        self.processes.start(
            "superlink",
            [
                *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)),
                *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
                *("--ssl-ca-certfile", str(self.secrets / "ca.crt")),
                *("--ssl-certfile", str(self.secrets / "server.pem")),
                *("--ssl-keyfile", str(self.secrets / "server.key")),
            ],
            self.home("superlink"),
        )
        write_connection(self.folder, f"127.0.0.1:{self.port}", self.home("cli"))
        self.wait("superlink", lambda: listens(self.port))

    def wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Wait until a process is ready; raise an error where it ends instead."""
        end = time.monotonic() + STARTING
        while not ready():
            if name in self.processes.ended():
                raise Stopped(f"{name} ended; the end of its output:\n{self.processes.log(name)}")
            if time.monotonic() > end:
                raise Stopped(
                    f"{name} did not start within {STARTING:g} s:\n{self.processes.log(name)}"
                )
            time.sleep(0.1)

    def register(self, key: Path) -> None:
        """Register a node's public key."""
        self.processes.call(["flwr", "supernode", "register", f"{key}.pub", NAME], self.home("cli"))

    def start_node(
        self, name: str, key: Path, config: Mapping[str, Any], more: Mapping[str, str] | None = None
    ) -> None:
        """Start a node with this key."""
        text = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        self.processes.start(
            name,
            [
                *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}"),
                *("--root-certificates", str(self.secrets / "ca.crt")),
                *("--auth-supernode-private-key", str(key)),
                *("--port", str(free_port()), "--node-config", text),
            ],
            self.home(name),
            more,
        )

    def submit(self, settings: Settings, rules: Mapping[str, Any]) -> None:
        """Start a run."""
        config = write_run_config(self.folder, settings, rules)
        self.processes.call(
            ["flwr", "run", str(self.folder / "app"), NAME, "--run-config", str(config)],
            self.home("cli"),
        )

    def refusal(self, wait: float = 60.0) -> str:
        """Start a node with an unregistered key; return how it was refused.

        Where it is not refused, an error is raised.
        """
        key = self.folder / "keys" / "unregistered"
        if not key.exists():
            certificates.make_node_key(key)
        self.start_node("unregistered", key, {"partition-id": 0})
        end = time.monotonic() + wait
        while "unregistered" not in self.processes.ended():
            if time.monotonic() > end:
                raise Stopped("a node with an unregistered key was not refused")
            time.sleep(0.2)
        if f"Exit Code: {REFUSED}" not in self.processes.log("unregistered", 10_000):
            raise Stopped(
                "a node with an unregistered key ended otherwise:\n"
                f"{self.processes.log('unregistered')}"
            )
        del self.processes.running["unregistered"]
        return f"Flower's exit code {REFUSED}"

    def close(self) -> None:
        """Stop everything."""
        self.processes.stop()


@contextmanager
def local(folder: Path, tell: Tell = lambda text: None) -> Iterator[Local]:
    """Give a local federation that is gone afterwards, whatever happens."""
    federation = Local(folder, tell)
    try:
        yield federation
    finally:
        federation.close()


def up(
    folder: Path,
    settings: Settings,
    rules: Mapping[str, Any],
    configs: Sequence[Mapping[str, Any]],
    tell: Tell,
    on_round: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Start a federation, do the run, stop everything, and return the result.

    The folder's settings.toml is written once the run has accepted its settings.

    Args:
        folder: of `init`, with a key for every node.
        settings: of the run.
        rules: the run config beside them; `out` is where the results go.
        configs: of each node.
        tell: is told what happens.
        on_round: is told of every round's record.
    """
    keys = [folder.absolute() / "keys" / f"node-{k}" for k in range(len(configs))]
    for key in keys:
        if not key.exists():
            raise InputError(
                f"{key} is missing: fedhb deploy init {folder} --nodes {len(configs)} makes one "
                "for every node"
            )
    out = RunFolder(str(rules["out"]))
    known = len(refusals(out))  # of the runs that this one resumes
    (out.path / STATUS).unlink(missing_ok=True)
    with local(folder, tell) as federation:
        federation.start_link()
        tell(f"SuperLink on 127.0.0.1:{federation.port}, with TLS and node authentication")
        for k, (key, config) in enumerate(zip(keys, configs, strict=True)):
            federation.register(key)
            federation.start_node(f"node-{k}", key, config)
        tell(f"{len(keys)} nodes started, their keys registered")
        federation.submit(settings, rules)
        tell(f"a node with an unregistered key was refused ({federation.refusal()})")
        watch(federation, out, tell, on_round, known, lambda: write_settings(folder, settings))
        return out.read_json("result.json")


def watch(
    federation: Local,
    out: RunFolder,
    tell: Tell,
    on_round: Callable[[dict[str, Any]], None],
    refused: int = 0,
    accepted: Callable[[], None] = lambda: None,
) -> None:
    """Follow a run to its end.

    Args:
        federation: that it runs on.
        out: the folder of the run.
        tell: is told what happens.
        on_round: is told of every round's record.
        refused: how many nodes were refused before the run.
        accepted: is called when the server accepts the settings.
    """
    shown, last, start = 0, "", time.monotonic()
    while True:
        status = read_status(out)
        texts = refusals(out)
        for text in texts[refused:]:
            tell(text)
        refused = len(texts)
        records = out.rounds()
        for record in records[shown:]:
            on_round(record)
        shown = len(records)
        text = ""
        if status:
            text = status["state"] + (f": {status['detail']}" if status["detail"] else "")
        if text and text != last:
            last = text
            tell(text)
            if status and status["state"] in ACCEPTED:
                accepted()
        if status and status["state"] == "done":
            return
        if status and status["state"] == "failed":
            raise Stopped(
                f"the federation failed: {status['detail']}; logs in {federation.processes.logs}"
            )
        if "superlink" in federation.processes.ended():
            raise Stopped(f"the SuperLink ended:\n{federation.processes.log('superlink')}")
        if status and not Path(f"/proc/{status['pid']}").exists() and Path("/proc/self").exists():
            raise Stopped(f"the server's process is gone:\n{federation.processes.log('superlink')}")
        if not status and time.monotonic() - start > STARTING:
            raise Stopped(
                f"the run did not start within {STARTING:g} s:\n"
                f"{federation.processes.log('superlink')}"
            )
        time.sleep(0.2)


def refusals(out: RunFolder) -> list[str]:
    """Return the nodes that were refused so far, and why."""
    texts = []
    with contextlib.suppress(FileNotFoundError):
        for line in (out.path / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # a line that is being written
                event = json.loads(line)
                if event["event"] == "node refused":
                    texts.append(f"node {event['node']} was refused: {event['detail']}")
    return texts


def read_status(out: RunFolder) -> dict[str, Any] | None:
    """Return where a run stands, or None before its start."""
    return out.read_json(STATUS) if (out.path / STATUS).exists() else None
