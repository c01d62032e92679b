"""A process that is killed, wherever: resuming gives the numbers of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import mlp
from fault_share import cases
from stopped_runs import After, assert_same, fit, fork

import fedhb
from fedhb.errors import InputError
from fedhb.runs.folder import RunFolder

SHORT: dict[str, Any] = {"checkpoint_every": 1, "rounds": 3}


LONG: dict[str, Any] = {"checkpoint_every": 2, "rounds": 60}


def kind(path: Any) -> str:
    """Which of a run's files this is."""
    name = Path(path).name.removeprefix(".").removesuffix(".tmp")
    if Path(path).parent.name == "memory":
        return "a memory"
    for prefix, what in (
        ("constants-", "the constants"),
        ("round-", "the manifest" if ".json" in name else "the server"),
    ):
        if name.startswith(prefix):
            return what
    return name


class Killer:
    """Names every step of the writing of files, and kills the process at the chosen one.

    A step is what a crash can fall between: the content begun, half of it written, all of it
    written, synced, renamed, an old file removed, a record begun or half written.
    """

    def __init__(self, at: int | None):
        self.at, self.steps = at, []

    def step(self, name: str) -> None:
        if len(self.steps) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps.append(name)

    def install(self, patch: Any) -> None:
        opened, replace, unlink, sync = Path.open, Path.replace, Path.unlink, os.fsync
        open_files: dict[int, str] = {}

        class Slow:
            """A file whose writes can be cut in half."""

            def __init__(inner, file: Any, path: Path):
                inner.file, inner.path = file, path

            def __enter__(inner) -> Any:
                open_files[inner.file.fileno()] = kind(inner.path)
                return inner

            def __exit__(inner, *error: Any) -> None:
                inner.file.close()

            def __getattr__(inner, name: str) -> Any:
                return getattr(inner.file, name)

            def write(inner, content: bytes) -> None:
                self.step(f"{kind(inner.path)} is opened")
                inner.file.write(content[: len(content) // 2])
                inner.file.flush()
                self.step(f"{kind(inner.path)} is half written")
                inner.file.write(content[len(content) // 2 :])
                inner.file.flush()
                self.step(f"{kind(inner.path)} is written")

        def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = opened(path, mode, *args, **kwargs)
            return Slow(file, path) if mode in ("wb", "ab") and path.name != ".lock" else file

        def replace_(path: Path, target: Any) -> Any:
            self.step(f"{kind(path)} is synced")
            found = replace(path, target)
            self.step(f"{kind(target)} is renamed")
            return found

        def unlink_(path: Path, *args: Any, **kwargs: Any) -> None:
            self.step(f"{kind(path)} is about to be removed")
            unlink(path, *args, **kwargs)

        patch.setattr(Path, "open", open_)
        patch.setattr(Path, "replace", replace_)
        patch.setattr(Path, "unlink", unlink_)
        patch.setattr(os, "fsync", sync)


STEPS = {
    f"{what} is {how}"
    for what in (
        "the constants",
        "the server",
        "a memory",
        "the manifest",
        "problem.json",
        "settings.toml",
        "result.json",
    )
    for how in ("opened", "half written", "written", "synced", "renamed")
}
STEPS |= {f"rounds.jsonl is {how}" for how in ("opened", "half written", "written")}
STEPS |= {f"{what} is about to be removed" for what in ("the server", "a memory", "the manifest")}


def steps_until(out: Path, at: int | None, **options: Any) -> list[str] | None:
    """The steps of a run, in a process of its own; None where it was killed at one."""
    ours, theirs = fork.Pipe(duplex=False)

    def work() -> None:
        killer = Killer(at)
        killer.install(pytest.MonkeyPatch())
        fit(out, **(SHORT | options))
        theirs.send(killer.steps)

    process = fork.Process(target=work)
    process.start()
    theirs.close()
    try:
        steps = ours.recv()
    except EOFError:
        steps = None
    process.join()
    assert process.exitcode == (0 if steps is not None else -signal.SIGKILL)
    return steps


def test_killed_at_every_named_step(tmp_path):
    """In `make soak` at every one; else at some of them, which are others for every step's name."""
    whole = fit(tmp_path / "whole", **SHORT)
    steps = steps_until(tmp_path / "all", None)
    assert set(steps) >= STEPS, STEPS - set(steps)
    chosen = sorted(
        random.Random(len(steps)).sample(range(len(steps)), cases(len(steps), least=12))
    )
    for at in chosen:
        out = tmp_path / str(at)
        assert steps_until(out, at) is None
        assert_same(fit(out, **SHORT), whole, out)


def test_killed_again_while_it_resumes(tmp_path):
    """The resuming process is killed too, at each step in turn, until one gets through."""
    whole = fit(tmp_path / "whole", **SHORT)
    out, at = tmp_path / "run", 0
    while steps_until(out, at) is None:
        at += 3
    assert at > 20
    assert_same(fit(out, **SHORT), whole, out)


@pytest.fixture
def long_run(tmp_path, no_waiting_for_the_disk) -> tuple[Any, float]:
    begun = time.perf_counter()
    return fit(tmp_path / "whole", **LONG), time.perf_counter() - begun


def killed_after(out: Path, seconds: float, how: int) -> bool:
    """Whether the run was still going after so many seconds."""
    process = fork.Process(target=fit, args=(out,), kwargs=LONG)
    process.start()
    process.join(timeout=seconds)
    going = process.is_alive()
    if going:
        os.kill(process.pid, how)
    process.join()
    return going and process.exitcode != 0


def test_killed_at_random_moments(long_run, tmp_path):
    whole, duration = long_run
    rng, reached = random.Random(0), 0
    for case in range(cases(200, least=3)):
        out = tmp_path / str(case)
        reached += killed_after(out, rng.uniform(0.0, duration), signal.SIGKILL)
        assert_same(fit(out, **LONG), whole, out)
    assert reached


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_many_times_in_one_run(how, long_run, tmp_path):
    whole, duration = long_run
    out, rng = tmp_path / "run", random.Random(1)
    while killed_after(out, rng.uniform(0.05, 0.4) * duration, how):
        pass
    assert_same(fit(out, **LONG), whole, out)


def damage(path: Path, rng: random.Random) -> str:
    """Truncate the file somewhere, or flip one to eight bytes anywhere."""
    content = bytearray(path.read_bytes())
    if not content or rng.random() < 0.3:
        length = rng.randrange(len(content)) if content else 0
        path.write_bytes(content[:length])
        return f"{path.name} cut to {length} bytes"
    places = [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 2, 8)))]
    for place in places:
        content[place] ^= rng.randrange(1, 256)
    path.write_bytes(content)
    return f"{path.name} changed at {places}"


def copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


class Evaluating(After):
    """Stops the evaluation once some clients are done."""

    def evaluating(self, done: int, count: int) -> None:
        if done >= 3:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*checkpoint", "ignore:.*evaluated")
@pytest.mark.parametrize("private", [False, True])
def test_damaged_files(tmp_path, monkeypatch, private):
    """Any file of a run, stopped or finished: a clear error, or the right numbers; never other
    numbers, never a traceback.
    """
    monkeypatch.setattr(import_module("fedhb.evaluation.evaluate"), "chunk_size", lambda network: 1)
    stopped, evaluating, finished = (
        tmp_path / name for name in ("stopped", "evaluating", "finished")
    )

    def interrupt(done: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    evaluated: dict[str, Any] = {"evaluate_on": "test"}
    if private:
        pytest.importorskip("dp_accounting")
        evaluated |= {"dp_noise": 1.0}
        for folder in (
            stopped,
            evaluating,
            finished,
        ):  # the noise is the key's, and the runs must be the same
            folder.mkdir()
            (folder / "noise.key").write_bytes(bytes(range(32)))
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, interrupt, **evaluated)
    with pytest.raises(KeyboardInterrupt):
        fit(evaluating, callbacks=[Evaluating(lambda done: None)], **evaluated)
    assert (evaluating / "evaluated.jsonl").exists() and not (evaluating / "result.json").exists()
    whole = fit(finished, **evaluated)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    right, at_five = whole.predict(x), fedhb.load(stopped, model=mlp(torch.float32)).predict(x)
    rng, told, went_on = random.Random(7), 0, 0
    for case in range(cases(1000, least=40)):
        out = tmp_path / str(case)
        copy(rng.choice((stopped, evaluating, finished)), out)
        what = damage(
            rng.choice(sorted(p for p in out.rglob("*") if p.is_file() and p.name != ".lock")), rng
        )
        try:
            found = fedhb.load(out, model=mlp(torch.float32))
            expected = {6: right, 5: at_five}.get(found.state.done)
            assert expected is None or np.array_equal(found.predict(x), expected), what
            assert not found.result or found.result == whole.result, what
        except InputError:
            told += 1
        try:
            again = fit(out, **evaluated)
        except InputError:
            told += 1
            continue
        went_on += 1
        assert_same(again, whole, out)
        for key in ("global", "personalised", "per_client", "communication"):
            assert again.result[key] == whole.result[key], what
    assert told and went_on


@pytest.mark.faults
def test_two_processes_that_begin_together(tmp_path):
    """One of them has the folder; the other is refused, and harms nothing."""
    whole = fit(tmp_path / "whole", **LONG)
    for case in range(cases(50, least=2)):
        out, ends = tmp_path / str(case), []
        barrier = fork.Barrier(2)

        def work(out: Path = out, barrier: Any = barrier) -> None:
            barrier.wait()
            try:
                fit(out, **LONG)
            except InputError as error:
                os._exit(7 if "in use" in str(error) else 8)

        processes = [fork.Process(target=work) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            ends.append(process.exitcode)
        assert sorted(ends) in ([0, 7], [0, 0])  # the second may come when the first has ended
        assert_same(fit(out, **LONG), whole, out)


def test_a_run_that_began_and_ended_meanwhile_is_not_mixed_with(tmp_path, monkeypatch):
    """Between the question whether the folder holds a run and its lock another process may have
    made one.
    """
    out = tmp_path / "run"
    lock = RunFolder.lock

    def late(self: RunFolder) -> None:
        monkeypatch.undo()
        fit(out)
        lock(self)

    monkeypatch.setattr(RunFolder, "lock", late)
    with pytest.raises(InputError, match=r"run.*resume"):
        fit(out, resume=False)
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 6
