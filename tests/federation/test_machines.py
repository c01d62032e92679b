"""docs/deployment.md, "Several machines", command by command; network namespaces stand for the
machines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

import fedhb
from fedhb.flower.deploy.flower_processes import MARK, SETTINGS, marked

DOCS = Path(__file__).parents[2] / "docs" / "deployment.md"
SERVER = "192.0.2.1"


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"fedhb{os.getpid()}"
    made = ip("netns", "add", name, check=False).returncode == 0
    ip("netns", "del", name, check=False)
    return made


pytestmark = [
    pytest.mark.federation,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root"),
]


class Machines:
    """A server and two nodes, each in a network and a folder of its own."""

    def __init__(self, folder: Path):
        self.mark = f"machines-{os.getpid()}"
        self.names = {
            who: f"fh{os.getpid()}{who.replace(' ', '')}" for who in ("server", "node 0", "node 1")
        }
        self.folders = {who: folder / who.replace(" ", "-") for who in self.names}
        self.started: list[subprocess.Popen] = []
        for who, name in self.names.items():
            self.folders[who].mkdir()
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        server = self.names["server"]
        ip("-n", server, "link", "add", "bridge0", "type", "bridge")
        ip("-n", server, "addr", "add", f"{SERVER}/24", "dev", "bridge0")
        ip("-n", server, "link", "set", "bridge0", "up")
        for k in range(2):
            node = self.names[f"node {k}"]
            ip(
                "-n",
                node,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{k}",
                "netns",
                server,
            )
            ip("-n", server, "link", "set", f"port{k}", "master", "bridge0", "up")
            ip("-n", node, "addr", "add", f"192.0.2.{k + 2}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")

    def run(self, who: str, command: str, stays: bool):
        """A line of the document on its machine."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        words = ["ip", "netns", "exec", self.names[who], "bash", "-c", command]
        environment = {**os.environ, **SETTINGS, "PATH": path, MARK: self.mark}
        with (self.folders[who] / "log").open("ab") as log:
            process = subprocess.Popen(
                words,
                cwd=self.folders[who],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        if not stays:
            assert process.wait(180) == 0, f"{command}\n{self.log(who)}"

    def log(self, who: str) -> str:
        return (self.folders[who] / "log").read_text(errors="replace")[-3000:]

    def close(self):
        for kind in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 10
            while (left := marked(self.mark)) and time.monotonic() < end:
                for pid in left:
                    os.kill(pid, kind)
                time.sleep(0.5)
        for process in self.started:
            process.wait(10)
        for name in self.names.values():
            ip("netns", "del", name, check=False)


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path)
    try:
        yield made
    finally:
        made.close()


def steps() -> list[tuple[str, list[str]]]:
    """The fenced commands of the chapter: (where, lines)."""
    chapter = DOCS.read_text().partition("## Several machines")[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n# ([^\n]*)\n(.*?)```", chapter, re.DOTALL)
    return [(where, lines.strip().splitlines()) for where, lines in blocks]


def own_data(k: int, folder: Path):
    rng = np.random.default_rng(k)
    y = rng.integers(0, 3, 90)
    x = rng.normal(size=(90, 5)) + 2.0 * np.eye(5)[y]
    np.savez(folder / "mine.npz", x=x.astype(np.float32), y=y)


def test_the_document_leads_to_a_federation_on_several_machines(machines):
    for k in range(2):
        own_data(k, machines.folders[f"node {k}"])
    done = steps()
    assert len(done) == 8
    for where, lines in done:
        stays = "leave it running" in where
        for line in lines:
            if where.startswith("from the server to"):
                node = where.removeprefix("from the server to ")
                machines.run("server", line.replace("NODE", str(machines.folders[node])), False)
            else:
                machines.run(
                    where.removeprefix("on ").removeprefix("the ").partition(",")[0], line, stays
                )
        if stays and "server" in where:
            wait_until_it_listens(machines)
    out = machines.folders["server"] / "fed" / "run"
    end = time.monotonic() + 300
    while not (out / "result.json").exists():
        assert time.monotonic() < end, machines.log("server") + machines.log("node 0")
        time.sleep(0.5)
    result = json.loads((out / "result.json").read_text())
    assert (
        result["rounds"] == 2 and result["dataset"] == "nodes" and result["executor"]["nodes"] == 2
    )
    assert result["global"]["accuracy"] > 0.5
    run = fedhb.load(out)
    assert run.predict(np.zeros((2, 5), np.float32)).shape == (2, 3)


def wait_until_it_listens(machines):
    probe = f"for k in $(seq 100); do (echo > /dev/tcp/{SERVER}/8000) 2> /dev/null && exit 0; sleep 0.3; done; exit 1"
    machines.run("node 0", probe, False)
