"""Carries a run out: begin or resume, the rounds, what is kept of them, the result. Who trains the clients is an argument.

The simulator (`api.fit`) and Flower (`flower.server`) differ in their executor and in who evaluates; everything else is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.training.plan import Plan
from fedhb.answers.defence import Defence, defended
from fedhb.runs import checkpoint
from fedhb.runs.folder import EVALUATED, EVALUATION, SETTINGS, RunFolder
from fedhb.runs.recorder import Keeper
from fedhb.engine.loop import Callback, Executor, State, Training, run, tell
from fedhb.engine.schedule import Draw, by_seed
from fedhb.errors import InputError
from fedhb.files import as_json, sealed, write_atomically
from fedhb.answers.privacy import Privacy, Private
from fedhb.runs.progress import RoundProgress
from fedhb.runs.run import Run, one_thread
from fedhb.seeding import Randomness
from fedhb.runs.settings import read_toml
from fedhb.runs.description import Stored

KEY, KEY_BYTES = "noise.key", 32
"""What a private run's noise and cohorts are drawn from."""


class Engine(Executor, Protocol):
    """An executor of a whole run: it says what it chose, and is closed at the end."""

    @property
    def chosen(self) -> Mapping[str, Any]:
        """What result.json says of it."""
        ...

    @property
    def note(self) -> str:
        """What the progress says of it."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


@dataclass(frozen=True)
class Job:
    """What is trained, on what plan, and the hashes of all that training (`fingerprint`) and the evaluation (`asked`) depend on;
    `constants` is the network as it was made, `augment` the clients'."""

    problem: Problem
    algorithm: Algorithm
    training: Training
    personal_plan: Plan
    num_clients: int
    input_shape: tuple[int, ...]
    fingerprint: str
    asked: str
    constants: Arrays
    privacy: Privacy | None = None
    defence: Defence | None = None
    augment: str | None = None

    @property
    def trained(self) -> Algorithm:
        """The algorithm as it is trained: with clipped and noised sums where the run is private, or behind filters."""
        if self.privacy is not None:
            if len(self.problem.network.buffers):
                raise InputError(
                    f"dp_noise={self.privacy.noise} and a network with running statistics, which noise would make useless or "
                    "negative: use batch_norm=batch, or group norm instead of batch norm"
                )
            return Private(self.algorithm, self.privacy)  # type: ignore[return-value]
        found: Algorithm = defended(self.algorithm, self.defence)
        return found

    @property
    def draw(self) -> Draw:
        """Who takes part in a round: by the seed, or in secret where the run is private."""
        if self.privacy is not None:
            return self.privacy.draw
        return by_seed(self.num_clients, self.training.fraction, self.training.seed)

    def finished(self, folder: RunFolder) -> bool:
        """Whether the folder holds this run with its result; without its last checkpoint, with a damaged result, or with that of
        another evaluation, it is finished again."""
        if not folder.answers(self.asked):
            return False
        kept = self.kept(folder)
        return kept is not None and kept.done == self.training.rounds

    def kept(self, folder: RunFolder) -> State | None:
        """Where this run stands in the folder; None where nothing is kept. Another run's checkpoint is refused."""
        try:
            loaded = checkpoint.load(folder.checkpoints, self.fingerprint, folder.records_until)
        except checkpoint.Another as error:
            differ = self.differences(folder) or ["settings, network or data differ"]
            raise InputError(
                f"{error} ({'; '.join(differ)}): resume with the settings it was begun with, or choose another --out"
            ) from None
        return loaded[0] if loaded is not None else None

    def differences(self, folder: RunFolder) -> list[str]:
        """In what the run in the folder was begun otherwise, as far as its files tell."""
        try:
            begun, stored = read_toml(folder.path / SETTINGS), Stored.read(folder)
        except InputError:
            return []
        name, here, there = self.algorithm.name, self.problem.federation, stored.federation
        new = top_settings(self.algorithm, self.training) | {"clients": here.num_clients, "training examples": here.num_examples}
        old = begun | {"clients": there.num_clients, "training examples": there.num_examples}
        if stored.algorithm["name"] == name:
            new |= {f"{name}.{key}": value for key, value in dataclasses.asdict(self.algorithm).items()}  # type: ignore[call-overload]
            old |= {f"{name}.{key}": value for key, value in stored.algorithm["settings"].items()}
        return [f"{key}={value}, begun with {old[key]}" for key, value in new.items() if key in old and old[key] != value]


def top_settings(algorithm: Algorithm, training: Training) -> dict[str, Any]:
    """What settings.toml has at its top of all that training depends on."""
    plan = training.plan
    return {
        "algorithm": algorithm.name,
        "fraction": training.fraction,
        "local_epochs": plan.epochs,
        "rounds": training.rounds,
        "batch_size": plan.batch_size,
        "lr": plan.lr,
        "momentum": plan.momentum,
        "schedule": training.schedule,
        "seed": training.seed,
    }


def claim(out: str | os.PathLike[str] | None, resume: bool) -> RunFolder | None:
    """The run's folder; one that holds a run is refused unless that is resumed."""
    folder = RunFolder(out) if out is not None else None
    if folder is not None and not resume:
        folder.refuse_run()
    return folder


def mechanism(folder: RunFolder | None, noise: float, clip: float, delta: float, num_clients: int, cohort: int) -> Privacy | None:
    """The privacy of a run, or None. The secret that it draws from stays with the run, readable to its owner alone."""
    if noise == 0:
        return None
    privacy = Privacy(noise, clip, delta, num_clients, cohort)
    privacy.epsilon(1)  # before the first round: is the accountant there, and can it count?
    return replace(privacy, key=secret(folder) if folder is not None else secrets.token_bytes(KEY_BYTES))


def secret(folder: RunFolder) -> bytes:
    """The key in a run's folder, drawn where no round was run yet: rounds that are run again must draw the same noise."""
    path = folder.path / KEY
    if not path.exists():
        if any(folder.checkpoints.glob("*.json")):
            raise InputError(
                f"{path} is missing, and this run cannot draw the same noise without it: restore it, or train again in "
                "another folder"
            )
        with folder.locked():
            if not path.exists():  # nobody has drawn one since
                write_atomically(path, secrets.token_bytes(KEY_BYTES), private=True)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise InputError(f"{path} has {len(key)} bytes, not {KEY_BYTES}: restore it, or train again in another folder")
    return key


def conduct(
    job: Job,
    engine: Callable[[State], Engine],
    evaluation: Callable[[Run], Mapping[str, Any]],
    files: Callable[[Run], Mapping[str, bytes]],
    *,
    about: Mapping[str, Any],
    folder: RunFolder | None,
    resume: bool,
    checkpoint_every: int,
    progress: bool,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """The rounds of a job from its last checkpoint to its end, and its result.

    Args:
        job: the run.
        engine: the executor of a run that stands where this state does.
        evaluation: the split, and the numbers on it of the clients that trained ("known") and of others ("novel"); None for none.
            Where it has "observed", that is evaluation.json (evaluation/observe.py).
        files: what the folder holds of the run from its beginning.
        about: what the result says of the data.
        folder: where it is kept, or None.
        resume: go on where a run in the folder stopped.
        checkpoint_every: rounds between checkpoints.
        progress: show it.
        callbacks: told of every round.
    """
    state = None
    with one_thread(), folder.locked(new=not resume) if folder is not None else contextlib.nullcontext():
        if folder is not None and resume:
            state = job.kept(folder)
            if state is not None and not folder.records.exists():
                warnings.warn(f"{folder.records} is missing: the records of rounds 1 to {state.done} are lost", stacklevel=2)
            if folder.holds_run:
                folder.keep_rounds(state.done if state is not None else 0)
        if state is None:
            state = State(server=job.algorithm.start(job.problem, Randomness(job.training.seed)))
        state.server = {key: value.to(job.problem.network.device) for key, value in state.server.items()}
        seed, rounds = job.training.seed, job.training.rounds
        result = Run(job.problem, job.algorithm, state, seed, job.personal_plan, job.input_shape, augment=job.augment)
        if folder is not None:
            for name, content in files(result).items():
                folder.write(name, content)
        keeper = Keeper(folder, job.constants, job.fingerprint, checkpoint_every, rounds, result.records)
        executor = engine(state)
        shown = [RoundProgress(f"{job.algorithm.name} seed {seed}", note=lambda: executor.note)] if progress else []
        told = [*([_Spent(job.privacy)] if job.privacy else []), *callbacks, keeper, *shown]
        try:
            run(job.problem, job.trained, job.draw, job.training, state, executor, told)
            result.watch = partial(tell, told, "evaluating")
            begun = time.perf_counter()
            found = evaluation(result)
            seconds = {"train": state.seconds, "evaluate": time.perf_counter() - begun}
            result.result = summary(result, found, about, seconds) | {"executor": dict(executor.chosen)}
            if job.privacy is not None:
                result.result["privacy"] = job.privacy.record(state.done)
            if folder is not None:
                if found.get("observed") is not None:
                    folder.write(EVALUATION, sealed(found["observed"], indent=None))
                folder.write_result(as_json(result.result), job.asked)
                (folder.path / EVALUATED).unlink(missing_ok=True)
                result.records = folder.rounds()
            tell(told, "on_result", result.result)
        finally:
            result.watch = None
            for bar in shown:
                bar.close()
            executor.close()
    return result


class _Spent(Callback):
    """Records what the rounds have cost so far."""

    def __init__(self, privacy: Privacy):
        self.privacy = privacy

    def on_round(self, record: dict[str, Any], state: State) -> None:
        """Epsilon after this round."""
        record["epsilon"] = self.privacy.epsilon(state.done)


def summary(result: Run, found: Mapping[str, Any], about: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """What result.json holds."""
    state = result.state
    known = found["known"] or {"global": None, "personalised": None, "per_client": None}
    per_client_round = {
        "down_bytes": state.traffic.down // max(state.client_rounds, 1),
        "up_bytes": state.traffic.up // max(state.client_rounds, 1),
    }
    return {
        "algorithm": result.algorithm.name,
        "dataset": about["dataset"],
        "seed": result.seed,
        "rounds": state.done,
        "split": found["split"],
        "global": known["global"],
        "personalised": known["personalised"],
        "holdout": found["novel"],
        "per_client": known["per_client"],
        "communication": {
            "down_bytes": state.traffic.down,
            "up_bytes": state.traffic.up,
            "per_client_round": per_client_round,
        },
        "data": about["data"],
        "seconds": dict(seconds),
    }
