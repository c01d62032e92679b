"""What `fedhb deploy init` and `config` write, and what they refuse. tests/federation starts what is written."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedhb.cli.main import app
from fedhb.errors import InputError, Stopped
from fedhb.flower.deploy import certificates
from fedhb.flower.deploy.flower_processes import Processes, free_port, listens, marked
from fedhb.flower.deploy.local_federation import refusals
from fedhb.flower.federated_task import Rules, settings_of
from fedhb.flower.journal import Journal
from fedhb.runs.folder import RunFolder


def deploy(*words):
    result = CliRunner().invoke(app, ["deploy", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def folder(tmp_path):
    deploy(
        "init",
        tmp_path / "fed",
        "--nodes",
        2,
        "--host",
        "server.example.org",
        "--host",
        "192.0.2.7",
        "--rounds",
        4,
    )
    return tmp_path / "fed"


def test_the_certificate_is_signed_and_names_the_server(folder):
    made = folder / "certificates"
    authority = x509.load_pem_x509_certificate((made / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((made / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(a) for a in ("192.0.2.7", "127.0.0.1")
    ]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = serialization.load_pem_private_key((made / "server.key").read_bytes(), None)
    assert key.public_key() == server.public_key()


def test_a_servers_name_may_be_long(tmp_path):
    """A certificate's common name has at most 64 characters, and nodes do not look at it."""
    host = "internal-federation-server-0123456789abcdef.elb.eu-central-1.amazonaws.com"
    deploy("init", tmp_path / "fed", "--nodes", 1, "--host", host)
    server = x509.load_pem_x509_certificate(
        (tmp_path / "fed" / "certificates" / "server.pem").read_bytes()
    )
    assert host in server.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value.get_values_for_type(x509.DNSName)
    connection = tomllib.loads((tmp_path / "fed" / "flower" / "config.toml").read_text())[
        "superlink"
    ]["fedhb"]
    assert connection["address"] == f"{host}:8000"


def test_keys_are_different_and_their_owners_alone(folder):
    secrets = [
        folder / "certificates" / "ca.key",
        folder / "certificates" / "server.key",
        *sorted((folder / "keys").glob("node-?")),
    ]
    assert len(secrets) == 4 and len({path.read_bytes() for path in secrets}) == 4
    assert {oct(path.stat().st_mode)[-3:] for path in secrets} == {"600"}
    for path in secrets[2:]:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
        public = path.with_name(path.name + ".pub").read_bytes()
        assert serialization.load_ssh_public_key(public) == key.public_key()
    with pytest.raises(InputError, match="never overwritten"):
        certificates.make_node_key(secrets[2])


def test_the_run_config_gives_the_settings_back(folder, tmp_path):
    config = tomllib.loads((folder / "run.toml").read_text())
    assert (
        settings_of(config).rounds == 4
        and settings_of(config).num_clients == 2
        and settings_of(config).fraction == 1.0
    )
    deploy(
        "config",
        folder,
        "--nodes",
        2,
        "--rounds",
        9,
        "--deadline",
        30,
        "--min-answers",
        0.9,
        "--resume",
        "--out",
        tmp_path / "o",
    )
    config = tomllib.loads((folder / "run.toml").read_text())
    assert (
        settings_of(config).rounds == 9
        and config["resume"] is True
        and config["out"] == str(tmp_path / "o")
    )
    assert Rules.of(config) == Rules(nodes=2, deadline=30.0, min_answers=0.9)
    project = tomllib.loads((folder / "app" / "pyproject.toml").read_text())
    assert config.keys() <= project["tool"]["flwr"]["app"]["config"].keys(), (
        "flwr refuses keys that the app does not have"
    )
    connection = tomllib.loads((folder / "flower" / "config.toml").read_text())["superlink"][
        "fedhb"
    ]
    assert connection["address"] == "server.example.org:8000" and connection[
        "root-certificates"
    ].endswith("ca.crt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "nodes=0"),
        (["--nodes", "3", "--num-clients", "9"], "num_clients=9 on 3 nodes"),
        (["--port", "99999"], "port=99999"),
        (["--host", "münchen"], "plain ASCII"),
        (["--host", ""], "host '' is empty"),
        (["--host", "server.example.org", "--host", " "], "host ' ' is empty"),
        (["--algorithm", "nwi"], "did you mean 'niw'"),
        (["--algorithm", "centralised"], "pools its clients' data"),
        (["--set", "niw.foo=3"], "niw has no setting 'foo'"),
        (["--set", "fedavg.update=body"], "the algorithm is niw"),
        (["--model", "nosuch"], "unknown model 'nosuch'"),
        (["--dataset", "nosuch"], "unknown data set 'nosuch'"),
        (["--dp-noise", "1", "--algorithm", "fedpa"], "with fedpa"),
        (["--workers", "2"], "workers=2 has no effect on a federation"),
        (["--checkpoint-every", "5"], "checkpoint_every=5 has no effect"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_written(tmp_path, words, message):
    with pytest.raises(InputError, match=message):
        deploy("init", tmp_path / "new", *words)
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_refused(folder):
    with pytest.raises(InputError, match="is not empty"):
        deploy("init", folder)


def test_up_refuses_before_it_starts_anything(folder):
    with pytest.raises(InputError, match="min_answers=2"):
        deploy("up", folder, "--nodes", 2, "--min-answers", 2)
    (folder / "run").mkdir()
    (folder / "run" / "settings.toml").touch()
    with pytest.raises(InputError, match="already holds a run"):
        deploy("up", folder, "--nodes", 2)
    assert not (folder / "logs").exists()


def test_up_refuses_a_file_with_clients_that_would_have_no_node(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 2, 40)
    np.savez(tmp_path / "four.npz", x=x, y=y, client=np.repeat(["a", "b", "c", "d"], 10))
    with pytest.raises(
        InputError, match=r"--nodes 3, but .*four.npz has 4 clients, .*: give --nodes 4"
    ):
        deploy("up", tmp_path / "fed", "--nodes", 3, "--data", tmp_path / "four.npz")
    x[7, 1] = np.nan
    np.savez(tmp_path / "bad.npz", x=x, y=y, client=np.repeat(["a", "b", "c", "d"], 10))
    with pytest.raises(InputError, match="x holds nan in row 7"):
        deploy("up", tmp_path / "fed", "--nodes", 4, "--data", tmp_path / "bad.npz")
    assert not (tmp_path / "fed").exists()


def test_config_says_how_to_start_and_refuses_a_folder_that_holds_a_run(folder):
    said = deploy("config", folder, "--nodes", 2)
    assert f"FLWR_HOME={folder}/flower flwr run {folder}/app" in said
    (folder / "run").mkdir()
    (folder / "run/settings.toml").touch()
    with pytest.raises(InputError, match="already holds a run"):
        deploy("config", folder, "--nodes", 2)
    deploy("config", folder, "--nodes", 2, "--resume")


def test_all_nodes_take_part_unless_a_fraction_is_given(tmp_path):
    (tmp_path / "s.toml").write_text("rounds = 4\n")
    deploy("init", tmp_path / "a", "--nodes", 2, "--settings", tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text("fraction = 0.5\n")
    deploy("init", tmp_path / "b", "--nodes", 2, "--settings", tmp_path / "s.toml")
    deploy(
        "init", tmp_path / "c", "--nodes", 2, "--settings", tmp_path / "s.toml", "--fraction", 0.25
    )
    found = [
        settings_of(tomllib.loads((tmp_path / name / "run.toml").read_text())).fraction
        for name in "abc"
    ]
    assert found == [1.0, 0.5, 0.25]


def test_a_finished_run_says_so_if_it_is_the_one_that_is_asked_for(folder, monkeypatch):
    out = RunFolder(folder / "run")
    held = settings_of(tomllib.loads((folder / "run.toml").read_text()))
    out.write("settings.toml", held.to_toml({}).encode())
    out.write_result(json.dumps({"global": None, "personalised": None, "holdout": None}).encode())
    monkeypatch.setattr(
        "fedhb.flower.deploy.local_federation.up",
        lambda *arguments: (_ for _ in ()).throw(InputError("it starts")),
    )
    assert "finished already" in " ".join(deploy("up", folder, "--nodes", 2, "--resume").split())
    with pytest.raises(InputError, match="it starts"):
        deploy("up", folder, "--nodes", 2, "--resume", "--seed", 7)
    held_again = settings_of(tomllib.loads((folder / "run.toml").read_text()))
    out.write("settings.toml", replace(held_again, seed=7).to_toml({}).encode())
    assert "finished already" in " ".join(
        deploy("up", folder, "--nodes", 2, "--resume", "--seed", 7).split()
    )
    (out.path / "result.json").write_text('{"global": nul')
    with pytest.raises(InputError, match="it starts"):
        deploy("up", folder, "--nodes", 2, "--resume", "--seed", 7)


@pytest.fixture
def signals():
    """What this process does with signals, as it was."""
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


STARTS = """
import os, signal, sys, time
from pathlib import Path
from fedhb.flower.deploy.flower_processes import Processes, end_in_order
processes = Processes(Path(sys.argv[1]))
if sys.argv[2] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
end_in_order()
class Again(Processes):
    def stop(self):
        os.kill(os.getpid(), signal.SIGHUP)
        super().stop()
processes.__class__ = Again
try:
    processes.start("x", [Path(sys.executable).name, "-c", "import time; time.sleep(60)"], Path(sys.argv[1]))
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    time.sleep(0.2)
    print("went on", flush=True)
finally:
    processes.stop()
    print(processes.mark)
"""


@pytest.mark.parametrize(
    ("before", "kind", "code"),
    [
        ("", "SIGHUP", 129),
        ("", "SIGTERM", 143),
        ("ignored", "SIGHUP", 0),
        ("ignored", "SIGTERM", 143),
    ],
)
def test_signals_stop_what_was_started_and_do_not_break_the_stopping_off(
    tmp_path, before, kind, code
):
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(tmp_path), before, kind],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout.split("\n")
    assert done.returncode == code and said[-2] and marked(said[-2]) == [], done.stderr
    assert ("went on" in said) == (code == 0)


def test_why_a_node_was_refused_is_told(tmp_path):
    out = RunFolder(tmp_path)
    assert refusals(out) == []
    journal = Journal(tmp_path)
    journal.note("node refused", "unknown data set 'nosuch'", node=7, key="k")
    journal.note("answer refused", "too long", client=1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "node ref')
    assert refusals(out) == ["node 7 was refused: unknown data set 'nosuch'"]


def test_a_process_that_fails_is_told_without_a_traceback(tmp_path):
    with pytest.raises(Stopped, match="ended with code 3"):
        Processes(tmp_path).call([Path(sys.executable).name, "-c", "raise SystemExit(3)"], tmp_path)


def test_everything_that_was_started_is_stopped_also_what_ran_away(tmp_path):
    """A process that starts another in a session of its own, and ignores polite signals: both go, a stranger stays."""
    processes = Processes(tmp_path)
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    processes.start("stubborn", [Path(sys.executable).name, "-c", script], tmp_path / "home")
    end = time.monotonic() + 20
    while len(marked(processes.mark)) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    processes.stop()
    assert marked(processes.mark) == [] and stranger.poll() is None
    stranger.kill()
    assert stranger.wait() == -signal.SIGKILL


def test_ports():
    assert not listens(free_port())
