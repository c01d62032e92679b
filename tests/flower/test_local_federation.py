"""`fedhb deploy up`: what it refuses before it starts anything, and what it says when it stops."""

from __future__ import annotations

import contextlib
import json
import signal
import tomllib

import numpy as np
import pytest

pytest.importorskip("flwr")

from deploying import deploy
from typer.testing import CliRunner

from fedhb.cli.main import app
from fedhb.errors import InputError, Stopped
from fedhb.flower.deploy.flower_processes import Processes
from fedhb.flower.deploy.local_federation import refusals
from fedhb.flower.federated_task import settings_of
from fedhb.flower.journal import Journal
from fedhb.runs.folder import RunFolder


def test_up_refuses_before_it_starts_anything(folder):
    with pytest.raises(InputError, match="min_answers=2"):
        deploy("up", folder, "--nodes", 2, "--min-answers", 2)
    (folder / "run").mkdir()
    (folder / "run" / "settings.toml").touch()
    with pytest.raises(InputError, match=r"run.*resume"):
        deploy("up", folder, "--nodes", 2)
    assert not (folder / "logs").exists()


def test_up_refuses_a_file_with_clients_that_would_have_no_node(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, 40)
    np.savez(tmp_path / "four.npz", x=x, y=y, client=np.repeat(["a", "b", "c", "d"], 10))
    with pytest.raises(InputError, match=r"--nodes 3.*four\.npz.*--nodes 4"):
        deploy("up", tmp_path / "fed", "--nodes", 3, "--data", tmp_path / "four.npz")
    x[7, 1] = np.nan
    np.savez(tmp_path / "bad.npz", x=x, y=y, client=np.repeat(["a", "b", "c", "d"], 10))
    with pytest.raises(InputError, match=r"nan.*row 7"):
        deploy("up", tmp_path / "fed", "--nodes", 4, "--data", tmp_path / "bad.npz")
    assert not (tmp_path / "fed").exists()


def test_a_finished_run_says_so_if_it_is_the_one_that_is_asked_for(folder, monkeypatch):
    out = RunFolder(folder / "run")
    held = settings_of(tomllib.loads((folder / "run.toml").read_text()))
    out.write("settings.toml", held.to_toml({}).encode())
    out.write_result(json.dumps({"global": None, "personalised": None, "holdout": None}).encode())
    monkeypatch.setattr(
        "fedhb.flower.deploy.local_federation.up",
        lambda *arguments: (_ for _ in ()).throw(InputError("it starts")),
    )
    assert "finished" in " ".join(deploy("up", folder, "--nodes", 2, "--resume").split())
    with pytest.raises(InputError, match="it starts"):
        deploy("up", folder, "--nodes", 2, "--resume", "--seed", 7)
    held_again = settings_of(tomllib.loads((folder / "run.toml").read_text()))
    out.write("settings.toml", held_again.change(seed=7).to_toml({}).encode())
    assert "finished" in " ".join(
        deploy("up", folder, "--nodes", 2, "--resume", "--seed", 7).split()
    )
    (out.path / "result.json").write_text('{"global": nul')
    with pytest.raises(InputError, match="it starts"):
        deploy("up", folder, "--nodes", 2, "--resume", "--seed", 7)


@pytest.fixture
def signals():
    """Restore what this process does with signals."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


class Pretended:
    """A federation without processes, whose server says that it is in this state."""

    port, processes = 0, Processes

    def __init__(self, folder, state, detail=""):
        self.out, self.state, self.detail = folder / "run", state, detail

    def start_link(self):
        pass

    def register(self, key):
        pass

    def start_node(self, name, key, config):
        pass

    def refusal(self):
        return "Flower's exit code 305"

    def submit(self, settings, rules):
        if isinstance(self.state, type):
            raise self.state
        Journal(self.out).stand(self.state, self.detail)
        RunFolder(self.out).write_result(
            json.dumps({"global": None, "personalised": None, "holdout": None}).encode()
        )


def pretend(monkeypatch, folder, state, detail=""):
    (folder / "run").mkdir(exist_ok=True)
    Pretended.processes = Processes(folder / "logs")
    monkeypatch.setattr(
        "fedhb.flower.deploy.local_federation.local",
        lambda *_: contextlib.nullcontext(Pretended(folder, state, detail)),
    )


def test_the_settings_are_kept_where_the_run_does_not_take_others(folder, monkeypatch, signals):
    before = (folder / "settings.toml").read_text()
    assert "rounds = 4" in before
    pretend(monkeypatch, folder, "failed", "another configuration")
    with pytest.raises(Stopped, match="another configuration"):
        deploy("up", folder, "--nodes", 2, "--resume", "--rounds", 50)
    assert (folder / "settings.toml").read_text() == before
    (folder / "run" / "result.json").unlink()
    pretend(monkeypatch, folder, "done")
    deploy("up", folder, "--nodes", 2, "--resume", "--personal-epochs", 7)
    assert (
        (folder / "settings.toml").read_text()
        == before.replace("personal_epochs = 15", "personal_epochs = 7")
        != before
    )


def test_the_hint_after_a_stop_leads_to_the_same_run(folder, tmp_path, monkeypatch, signals):
    pretend(monkeypatch, folder, KeyboardInterrupt)
    words = ["deploy", "up", str(folder), "--nodes", "2"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "a b"), "--retries", "1"])
    assert (
        f"fedhb deploy up {folder} --nodes 2 --out '{tmp_path / 'a b'}' --retries 1 --resume"
        in result.output
    )
    result = CliRunner().invoke(app, words)
    assert f"fedhb deploy up {folder} --nodes 2 --resume" in result.output


def test_up_ends_in_order_when_its_terminal_is_closed(folder, monkeypatch, signals):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    pretend(monkeypatch, folder, KeyboardInterrupt)
    CliRunner().invoke(app, ["deploy", "up", str(folder), "--nodes", "2"])
    assert signal.getsignal(signal.SIGHUP) == signal.getsignal(signal.SIGTERM) != signal.SIG_DFL


def test_why_a_node_was_refused_is_told(tmp_path):
    out = RunFolder(tmp_path)
    assert refusals(out) == []
    journal = Journal(tmp_path)
    journal.note("node refused", "unknown data set 'nosuch'", node=7, key="k")
    journal.note("answer refused", "too long", client=1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "node ref')
    assert refusals(out) == ["node 7 was refused: unknown data set 'nosuch'"]
