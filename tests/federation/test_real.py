"""Real processes: a SuperLink with TLS and node authentication, four SuperNodes with keys, on
loopback. `make test-federation`.

One federation serves all tests of this file, in their order: starting it takes as long as a run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.engine.schedule import learning_rate
from fedhb.flower.deploy import app_files
from fedhb.flower.deploy.flower_processes import marked
from fedhb.flower.deploy.local_federation import Local, read_status, watch
from fedhb.runs import checkpoint
from fedhb.runs.folder import RunFolder
from fedhb.runs.from_settings import make_clients, train
from fedhb.runs.settings import Settings
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

pytestmark = pytest.mark.federation

HERE = Path(__file__).parent
NODES, DEADLINE, LATE = 4, 60.0, 65.0
TOLERANCE = 2e-4
"""As in process: float32, one client at a time here and several at once there."""

BAD, CLEAN, RETRIED = 7, 0, 9
FAULTS = {
    1: f"{BAD}/1/1/inf,{BAD}/3/1/norm,{RETRIED}/1/1/nan",
    2: f"{BAD}/1/1/nan,{BAD}/2/1/late",
    3: f"{BAD}/1/1/shape,{BAD}/2/1/die",
}


MORE = {1: {"FAULT": "twice"}}


def settings(algorithm: str, seed: int, **changes) -> Settings:
    base = {
        "dataset": "digits",
        "num_clients": NODES,
        "shards_per_client": 4,
        "max_examples": 60,
        "batch_size": 10,
    }
    base |= {
        "fraction": 1.0,
        "rounds": 3,
        "personal_epochs": 1,
        "workers": 1,
        "model": {"name": "mlp", "hidden": 16},
    }
    return Settings.resolve({**base, "algorithm": algorithm, "seed": seed, **changes}, {})


class Federation:
    """The processes, and runs on them."""

    def __init__(self, folder: Path):
        self.folder = folder
        app_files.init(folder, NODES, ["127.0.0.1"], 8000, settings("empirical-bayes", CLEAN))
        (folder / "app" / "fedhb_app" / "client_app.py").write_text(
            (HERE / "faulty.py").read_text()
        )
        self.local = Local(folder)
        self.flag, self.stall = folder / "dying", folder / "stall"
        try:
            self.local.start_link()
            for k in range(NODES):
                self.local.register(self.key(k))
                self.start(k)
        except BaseException:
            self.local.close()
            raise

    def key(self, k: int) -> Path:
        return self.folder / "keys" / f"node-{k}"

    def start(self, k: int) -> None:
        config = {
            "partition-id": k,
            "faults": FAULTS.get(k, ""),
            "flag": str(self.flag),
            "late": LATE,
        }
        more = {
            "PYTHONPATH": str(HERE / "twice"),
            **MORE.get(k, {}),
            **({"STALL": str(self.stall)} if k == 2 else {}),
        }
        self.local.start_node(f"node-{k}", self.key(k), config, more)

    def submit(self, chosen: Settings, out: Path, **rules) -> RunFolder:
        values = {"nodes": NODES, "out": str(out), "deadline": DEADLINE, "patience": 30.0, **rules}
        (out / "status.json").unlink(missing_ok=True)
        self.local.submit(chosen, values)
        return RunFolder(out)

    def follow(self, out: RunFolder) -> None:
        watch(self.local, out, lambda text: None, lambda record: None)

    def log(self, name: str) -> str:
        return self.local.processes.log(name, 1_000_000)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("federation"))
    yield made
    mark = made.local.processes.mark
    made.local.close()
    assert marked(mark) == [], "processes were left behind"


def posterior(out: RunFolder):
    loaded = checkpoint.load(out.checkpoints)
    assert loaded is not None
    return loaded[0].server


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(
            ours[key],
            theirs[key],
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda text, key=key: f"{key}: {text}",
        )


def wait_for(condition, seconds: float = 300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_node_with_an_unregistered_key_is_refused(federation):
    assert "305" in federation.local.refusal()
    assert "Failed to activate SuperNode" in federation.log("unregistered")


def test_without_the_authoritys_certificate_nobody_is_believed(federation):
    """The traffic is TLS by the federation's own authority: a client that does not know it refuses
    the server.
    """
    import socket
    import ssl

    def shake(context):
        plain = socket.create_connection(("127.0.0.1", federation.local.port), timeout=10)
        with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            return secure.version()

    authority = str(federation.folder / "certificates" / "ca.crt")
    assert shake(ssl.create_default_context(cafile=authority)) in ("TLSv1.2", "TLSv1.3")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(ssl.create_default_context())


def test_faults_cost_their_own_answers_and_nothing_else(federation, tmp_path):
    """Infinity, NaN, a wrong shape; a late node, a dead one, one that answers twice; an absurd
    norm; an upload that breaks off.

    The posterior is that of the answers that were good.
    """
    chosen = settings("empirical-bayes", BAD, rounds=4)
    out = federation.submit(chosen, tmp_path / "out", min_answers=0.25)
    wait_for(federation.flag.exists)
    federation.local.processes.kill("node-3")
    wait_for(lambda: len(out.rounds()) == 3)
    federation.stall.touch()
    wait_for(lambda: len(out.rounds()) == 4)
    federation.stall.unlink()
    federation.follow(out)
    federation.start(3)  # for the tests below: with its key it is the same node again
    good = [r["answered"] for r in out.rounds()]
    assert good in (
        [[0], [0, 1], [0, 2], [0, 1]],
        [[0], [0, 1], [0], [0, 1]],
    )  # on a busy machine the late one may be late again
    events = [json.loads(line) for line in (out.path / "events.jsonl").read_text().splitlines()]
    said = {
        (e["round"], e["client"]): e["detail"] for e in events if e["event"] == "answer refused"
    }
    assert said[1, 1] == said[1, 2] == "'m' holds NaN or infinity"
    assert "shape" in said[1, 3] and "norm" in said[3, 1]
    assert f"no answer within {DEADLINE:g} s" in said[2, 2]
    assert (2, 3) in said and (3, 3) in said
    assert all(len(e["key"]) == 32 and e["node"] for e in events if e["event"] == "answer refused")
    assert said[4, 2].startswith(
        "its answer was announced but did not come"
    ) and "stalling" in federation.log("node-2")
    assert federation.log("node-1").count("sent again") >= 5
    close(posterior(out), simulate(chosen, good))
    assert out.read_json("result.json")["per_client"]["global_accuracy"][3] is None


def simulate(chosen: Settings, cohorts):
    """The simulator's state after these rounds."""
    from fedhb.flower.census import Census, Facts
    from fedhb.flower.federated_task import FederatedTask
    from fedhb.flower.node import Node

    clients, _ = make_clients(chosen)
    task = FederatedTask.of(
        chosen,
        Census.of([Facts.of(Node(clients.select([k]), True, False)) for k in range(len(clients))]),
    )
    problem, algorithm = task.problem, task.algorithm
    server = algorithm.start(problem, Randomness(chosen.seed))
    for done, positions in enumerate(cohorts):
        rng = Randomness(chosen.seed, done + 1)
        lr = learning_rate(
            chosen.training.schedule, chosen.training.lr, done, chosen.training.rounds
        )
        plan = Plan(
            chosen.training.local_epochs,
            chosen.training.batch_size,
            lr,
            chosen.training.momentum,
            algorithm.update == "full",
        )
        sums, _ = InProcess(problem, algorithm, clients, ClientStore()).run(
            server, positions, plan, rng
        )
        server = algorithm.aggregate(problem, server, sums, rng)
    return server


def test_a_killed_server_resumes_to_the_simulators_posterior(federation, tmp_path):
    """NIW; the ServerApp is killed in the middle of the second round."""
    chosen = settings("empirical-bayes", CLEAN)
    out = federation.submit(chosen, tmp_path / "out")
    wait_for(lambda: len(out.rounds()) == 1)
    time.sleep(2.0)
    status = read_status(out)
    assert status is not None and status["state"] == "training"
    os.kill(status["pid"], signal.SIGKILL)
    assert len(out.rounds()) == 1 and not (out.path / "result.json").exists()
    federation.submit(chosen, out.path, resume=True)
    federation.follow(out)
    simulated = train(chosen, tmp_path / "simulated", progress=False)
    assert [r["round"] for r in out.rounds()] == [1, 2, 3]
    assert all(r["answered"] == [0, 1, 2, 3] for r in out.rounds()), (
        "a restarted node takes part again"
    )
    close(posterior(out), simulated.state.server)
    for task in ("global", "personalised"):
        assert out.read_json("result.json")[task] == pytest.approx(simulated.result[task], abs=1e-2)


def test_a_round_with_too_few_answers_is_tried_again(federation, tmp_path):
    """Mixture; all must answer, and one sends NaN at the first try. The end is the simulator's."""
    chosen = settings("mixture", RETRIED, rounds=2)
    out = federation.submit(chosen, tmp_path / "out", min_answers=1.0)
    federation.follow(out)
    assert [r["attempts"] for r in out.rounds()] == [2, 1]
    simulated = train(chosen, tmp_path / "simulated", progress=False)
    close(posterior(out), simulated.state.server)
    assert out.read_json("result.json")["global"] == pytest.approx(
        simulated.result["global"], abs=1e-2
    )
