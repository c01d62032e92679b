"""Carries a run from its beginning, or its last checkpoint, to its result.

The simulator and Flower differ in their `Host`: who trains the clients, who evaluates, and which
files are kept beside the common ones. Everything else is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from fedhb.algorithms.contract import Algorithm, Phase, Problem
from fedhb.answers.defence import Defence, defended
from fedhb.answers.privacy import Mechanism, Private, epsilon_of
from fedhb.clients.clients import Clients
from fedhb.engine.loop import Callback, Engine, State, Training, run, tell
from fedhb.engine.schedule import Draw, by_seed, cohort_size
from fedhb.engine.timetable import Stage, Timetable
from fedhb.errors import InputError
from fedhb.evaluation.evaluate import Watch
from fedhb.files import as_json, sealed, write_atomically
from fedhb.runs import checkpoint
from fedhb.runs.description import Description, problem_record
from fedhb.runs.folder import EVALUATED, EVALUATION, PROBLEM, SETTINGS, RunFolder
from fedhb.runs.progress import RoundProgress
from fedhb.runs.recorder import Recorder
from fedhb.runs.run import Run, one_thread
from fedhb.runs.settings import Settings, flat_fields, read_toml, toml_table, toml_value
from fedhb.seeding import Randomness, absorb

KEY, KEY_BYTES = "noise.key", 32
"""The secret that a private run's noise and cohorts are drawn from."""

OF_TRAINING = ("", "training", "personalisation", "privacy")
"""The sections that a run from Python has: it has its own model and clients."""


@dataclass(frozen=True)
class Task:
    """The task of a run: its description, and the objects that are made from it.

    Attributes:
        settings: the description.
        algorithm: with its settings.
        problem: network, likelihood and federation.
        clients: those that train; on Flower's server one that stands for all.
        head: the name of the network's head, where it was given.
        model: how the network is made again; None for a module of the user's own.
        depends_on: hashes of whatever else training depends on.
    """

    settings: Settings
    algorithm: Algorithm
    problem: Problem
    clients: Clients
    head: str | None = None
    model: Mapping[str, Any] | None = None
    depends_on: tuple[str, ...] = ()

    @property
    def training(self) -> Training:
        """The settings of the round loop."""
        local, full = self.settings.training, self.algorithm.update == "full"
        return Training(
            local.rounds,
            local.fraction,
            self.settings.plan(train_head=full),
            local.schedule,
            self.settings.seed,
        )

    def mechanism(self, key: bytes = b"") -> Mechanism | None:
        """Return the differential privacy of the run, drawn from this key; None without noise."""
        wanted, count = self.settings.privacy, self.problem.federation.num_clients
        if wanted.noise == 0:
            return None
        size = cohort_size(count, self.settings.training.fraction)
        return Mechanism(wanted.noise, wanted.clip, wanted.delta, count, size, key)

    def guarded(self, steps: Any, privacy: Mechanism | None) -> Any:
        """Return steps with their answers filtered, or their sums clipped and noised."""
        if privacy is None:
            return defended(steps, Defence.named(self.settings.defence))
        if len(self.problem.network.buffers):
            raise InputError(
                f"dp_noise={privacy.noise} and a network with running statistics, which noise "
                "would make useless or negative: use batch_norm=batch, or group norm instead of "
                "batch norm"
            )
        return Private(steps, privacy)

    def trained_hash(self, privacy: Mechanism | None = None) -> str:
        """Return a hash of everything that training depends on.

        Only a run with the same hash goes on from a checkpoint.
        """
        network, likelihood, clients = self.problem.network, self.problem.likelihood, self.clients
        slots = (network.body_slots, network.head_slots, network.buffer_slots)
        about = [
            self.algorithm.name,
            dataclasses.asdict(self.algorithm),  # type: ignore[call-overload]
            [(p.name, p.when, p.times, p.fraction, repr(p.steps)) for p in self.algorithm.phases],
            dataclasses.asdict(self.training),
            [[(slot.name, list(slot.shape)) for slot in part] for part in slots],
            sorted(clients.files.items()),
            network.batch_norm,
            str(network.module),
            repr(likelihood)
            if dataclasses.is_dataclass(likelihood)
            else type(likelihood).__qualname__,
            clients.augment,
            clients.num_classes,
            dataclasses.asdict(self.settings.privacy) if privacy is not None else None,
            privacy.mark if privacy is not None else None,
            self.settings.defence,
            self.depends_on,
        ]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
        share, scaling = clients.train, network.scaling
        tensors = [*network.constants().values(), scaling.mean, scaling.std]
        tensors += [share.rows, share.offsets, share.y]
        if self.problem.federation.server_inputs is not None:
            tensors.append(self.problem.federation.server_inputs)
        # the inputs too where files are known: they may have been changed since
        absorb(digest, [*tensors, share.x])
        return digest.hexdigest()

    def to_toml(self) -> str:
        """Return the content of settings.toml."""
        if self.model is not None:
            return self.settings.to_toml(versions())
        named = ", ".join(f"{name} {version}" for name, version in versions().items())
        module = type(self.problem.network.module)
        values = {
            "dataset": self.clients.name,
            "num_clients": len(self.clients),
            "model": f"{module.__module__}.{module.__qualname__}",
        } | _of_training(self.settings)
        options = dataclasses.asdict(self.algorithm)  # type: ignore[call-overload]
        options = {key: value for key, value in options.items() if value is not None}
        lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
        table = toml_table(self.algorithm.name, options)
        return "\n".join([f"# A run from Python. Versions: {named}", *lines, "", *table]) + "\n"


def _of_training(settings: Settings) -> dict[str, Any]:
    """Return the values of the sections that every run has, by their flat names."""
    values = settings.flat()
    return {n: values[n] for n, (section, _) in flat_fields().items() if section in OF_TRAINING}


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation: the split (None for none), and the metrics of both groups.

    Attributes:
        split: which examples were predicted.
        known: metrics of the clients that trained, as `Evaluation.results` returns them.
        novel: those of clients that never trained.
        observed: the content of evaluation.json.
    """

    split: str | None
    known: Mapping[str, Any] | None = None
    novel: Mapping[str, Any] | None = None
    observed: dict[str, Any] | None = None


class Host(Protocol):
    """The part that differs between engines: who trains, who evaluates, which files are kept."""

    checkpoint_every: int

    @property
    def evaluated_hash(self) -> str:
        """A hash of everything that the evaluation's numbers depend on."""
        ...

    def engine(self, state: State) -> Engine:
        """Return the executor of a run that stands at this state."""
        ...

    def evaluate(self, run: Run, watch: Watch) -> Evaluated:
        """Return the metrics of a trained run; `watch` is told how many clients are done."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """Return the files that the folder holds beside those of every run."""
        ...


class Session:
    """A run on its way, in a folder or without one.

    Args:
        task: what is trained.
        folder: where the run is kept, or None.
        resume: go on where the run in the folder stopped.
    """

    def __init__(self, task: Task, folder: RunFolder | None, resume: bool = False):
        self.task, self.folder, self.resume = task, folder, resume
        self.privacy = task.mechanism()
        if self.privacy is not None:
            self.privacy.epsilon(1)  # before round 1: is the accountant installed, can it count?
            key = secret(folder) if folder is not None else secrets.token_bytes(KEY_BYTES)
            self.privacy = dataclasses.replace(self.privacy, key=key)
        self.algorithm: Algorithm = task.guarded(task.algorithm, self.privacy)
        stages = (self.stage(phase) for phase in task.algorithm.phases)
        self.timetable = Timetable(task.training.rounds, tuple(stages))
        self.trained_hash = task.trained_hash(self.privacy)
        self.constants = task.problem.network.constants()

    def draw(self, fraction: float, privacy: Mechanism | None) -> Draw:
        """Return the cohorts: by the seed, or in secret where the run is private."""
        if privacy is not None:
            return privacy.draw
        count = self.task.problem.federation.num_clients
        return by_seed(count, fraction, self.task.training.seed)

    def stage(self, phase: Phase) -> Stage:
        """Return a phase of the algorithm as this run carries it out."""
        privacy = self.privacy
        if privacy is not None:
            size = cohort_size(privacy.num_clients, phase.fraction)
            privacy = dataclasses.replace(privacy, cohort=size)
        steps = self.task.guarded(phase.steps, privacy)
        return Stage(phase, steps, self.draw(phase.fraction, privacy))

    def epsilon(self, done: int) -> float:
        """Return what the first `done` exchanges of a private run cost."""
        assert self.privacy is not None
        spent = [(self.privacy, self.timetable.rounds_done(done))]
        spent += [
            (stage.steps.privacy, self.timetable.times(stage, done))
            for stage in self.timetable.stages
        ]
        return epsilon_of(spent)

    def finished(self, host: Host) -> bool:
        """Return whether the folder holds this run with its result, all of it undamaged.

        Without its last checkpoint, with a damaged result, or with that of another evaluation, it
        has its end done again.
        """
        state = self.stored()  # which refuses another run's folder, also one that is read-only
        if self.folder is None or state is None or state.done < self.timetable.total:
            return False
        return self.folder.answers(host.evaluated_hash)

    def stored(self) -> State | None:
        """Return the state in the folder, or None; refuse the checkpoint of another run."""
        if self.folder is None or not self.resume:
            return None
        try:
            loaded = checkpoint.load(
                self.folder.checkpoints, self.trained_hash, self.folder.records_until
            )
        except checkpoint.Another as error:
            differ = self.differences(self.folder) or ["settings, network or data differ"]
            raise InputError(
                f"{error} ({'; '.join(differ)}): resume with the settings it was started with, or "
                "choose another --out"
            ) from None
        return loaded[0] if loaded is not None else None

    def differences(self, folder: RunFolder) -> list[str]:
        """Return in what the run in the folder differs from this one, as far as its files tell."""
        try:
            before, stored = read_toml(folder.path / SETTINGS), Description.read(folder)
        except InputError:
            return []
        algorithm, name = self.task.algorithm, self.task.algorithm.name
        new = _of_training(self.task.settings) | {"algorithm": name}
        new = {key: new[key] for key in new if not key.startswith("personal_")}
        for problem, values in ((self.task.problem.federation, new), (stored.federation, before)):
            values["clients"] = problem.num_clients
            values["training examples"] = problem.num_examples
        if stored.algorithm["name"] == name:
            options = dataclasses.asdict(algorithm)  # type: ignore[call-overload]
            new |= {f"{name}.{key}": value for key, value in options.items()}
            settings = stored.algorithm["settings"]
            before |= {f"{name}.{key}": value for key, value in settings.items()}
        return [
            f"{key}={value}, started with {before[key]}"
            for key, value in new.items()
            if key in before and before[key] != value
        ]

    def start(self) -> State:
        """Return where the run goes on: at its last checkpoint, or before its first round."""
        state, folder, problem = self.stored(), self.folder, self.task.problem
        if folder is not None and self.resume:
            if state is not None and not folder.records.exists():
                warnings.warn(
                    f"{folder.records} is missing: the records of rounds 1 to {state.done} are "
                    "lost",
                    stacklevel=2,
                )
            if folder.holds_run:
                folder.keep_rounds(state.done if state is not None else 0)
        if state is None:
            rng = Randomness(self.task.settings.seed)
            state = State(server=self.task.algorithm.start(problem, rng))
        device = problem.network.device
        state.server = {key: value.to(device) for key, value in state.server.items()}
        return state

    def carry_out(
        self, host: Host, progress: bool = True, callbacks: Sequence[Callback] = ()
    ) -> Run:
        """Do the remaining rounds, evaluate, write the result, and return the run.

        Args:
            host: who trains, who evaluates, and which files are kept.
            progress: whether it is shown.
            callbacks: listeners to the rounds.
        """
        task, folder, training = self.task, self.folder, self.task.training
        lock = folder.locked(new=not self.resume) if folder is not None else None
        with one_thread(), lock or contextlib.nullcontext():
            state = self.start()
            recorder = Recorder(folder, self.constants, self.trained_hash, host.checkpoint_every)
            shape, clients = tuple(task.clients.train.x.shape[1:]), task.clients
            result = Run(
                task.problem,
                task.algorithm,
                state,
                training.seed,
                task.settings.personal_plan,
                shape,
                records=recorder.records,
                augment=clients.augment,
            )
            if folder is not None:
                record = problem_record(result, task.head, task.model)
                files = {SETTINGS: task.to_toml().encode(), PROBLEM: sealed(record)}
                for name, content in (files | dict(host.files())).items():
                    folder.write(name, content)
            engine = host.engine(state)
            bar = RoundProgress(
                f"{task.algorithm.name} seed {training.seed}", note=lambda: engine.note
            )
            spent = [_Spent(self)] if self.privacy is not None else []
            listeners = [*spent, engine, *callbacks, recorder, *([bar] if progress else [])]
            try:
                run(
                    task.problem,
                    self.algorithm,
                    self.draw(training.fraction, self.privacy),
                    training,
                    state,
                    engine,
                    listeners,
                    self.timetable,
                )
                start = time.perf_counter()
                evaluated = host.evaluate(result, partial(tell, listeners, "evaluating"))
                seconds = {"train": state.seconds, "evaluate": time.perf_counter() - start}
                result.result = summary(result, evaluated, clients, seconds, training.rounds)
                result.result["executor"] = dict(engine.chosen)
                if self.privacy is not None:
                    result.result["privacy"] = self.privacy.record(self.epsilon(state.done))
                if folder is not None:
                    if evaluated.observed is not None:
                        folder.write(EVALUATION, sealed(evaluated.observed, indent=None))
                    folder.write_result(as_json(result.result), host.evaluated_hash)
                    (folder.path / EVALUATED).unlink(missing_ok=True)
                    result.records = folder.rounds()
                tell(listeners, "on_result", result.result)
            finally:
                bar.close()
                engine.close()
        return result


class _Spent(Callback):
    """Records the epsilon of the rounds so far."""

    def __init__(self, session: Session):
        self.session = session

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Add the epsilon after this round to its record."""
        record["epsilon"] = self.session.epsilon(state.done)

    def on_phase(self, record: dict[str, Any], state: State) -> None:
        """Add the epsilon after this exchange to its record."""
        self.on_round(record, state)


def secret(folder: RunFolder) -> bytes:
    """Return the key in a run's folder; draw it where no round was run yet.

    Rounds that are run again must draw the same noise.
    """
    path = folder.path / KEY
    if not path.exists():
        if any(folder.checkpoints.glob("*.json")):
            raise InputError(
                f"{path} is missing, and this run cannot draw the same noise without it: restore "
                "it, or train again in another folder"
            )
        with folder.locked():
            if not path.exists():  # no other process has drawn one since
                write_atomically(path, secrets.token_bytes(KEY_BYTES), private=True)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise InputError(
            f"{path} has {len(key)} bytes, not {KEY_BYTES}: restore it, or train again in another "
            "folder"
        )
    return key


def summary(
    result: Run,
    evaluated: Evaluated,
    clients: Clients,
    seconds: Mapping[str, float],
    rounds: int,
) -> dict[str, Any]:
    """Return the content of result.json."""
    state = result.state
    known = evaluated.known or {"global": None, "personalised": None, "per_client": None}
    per_client_round = {
        "down_bytes": state.traffic.down // max(state.client_rounds, 1),
        "up_bytes": state.traffic.up // max(state.client_rounds, 1),
    }
    return {
        "algorithm": result.algorithm.name,
        "keeps": result.algorithm.keeps,
        "dataset": clients.title or clients.name,
        "seed": result.seed,
        "rounds": rounds,
        "split": evaluated.split,
        "global": known["global"],
        "personalised": known["personalised"],
        "holdout": evaluated.novel,
        "per_client": known["per_client"],
        "communication": {
            "down_bytes": state.traffic.down,
            "up_bytes": state.traffic.up,
            "per_client_round": per_client_round,
        },
        "data": dict(clients.files),
        "seconds": dict(seconds),
    }


def versions() -> dict[str, str]:
    """Return the versions of everything that the numbers depend on."""
    from fedhb import __version__

    return {
        "fedhb": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
