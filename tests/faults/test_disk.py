"""A disk that is full, a folder that cannot be written to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import builders
import pytest
from fault_share import cases
from stopped_runs import assert_same, fit

CHILD = """
import sys
sys.path.insert(0, {helpers!r})
import os, pathlib, warnings
os.fsync = lambda handle: None
import typer
from stopped_runs import fit
from fedhb.cli import main as cli
cli.app = typer.Typer(pretty_exceptions_enable=False)
cli.app.command()(lambda out: fit(pathlib.Path(out), **{options!r}))
cli.main()
"""


def child(out: Path, shell: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The run as the command line would do it, after some lines of shell in a mount namespace of
    its own.
    """
    code = CHILD.format(helpers=str(Path(builders.__file__).parent), options=options)
    start = (
        ["unshare", "--map-root-user", "--mount", "sh", "-c"] if "mount" in shell else ["sh", "-c"]
    )
    return subprocess.run(
        [*start, f'{shell}\nexec "$@"', "sh", sys.executable, "-c", code, str(out)],
        capture_output=True,
        text=True,
    )


def can_mount() -> bool:
    where = "/tmp" if Path("/tmp").is_dir() else "."
    tried = ["unshare", "--map-root-user", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs {where}"]
    try:
        return subprocess.run(tried, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(
    not can_mount(), reason="this system does not let users mount a tmpfs in a namespace of theirs"
)


def told_without_traceback(ended: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    said = " ".join(ended.stderr.split())
    assert ended.returncode == code, said
    assert "Traceback" not in said
    for word in words:
        assert word in said, said


@pytest.mark.faults
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_no_room_for_a_file(limit, tmp_path):
    """Files may have no more than so many blocks: writes fail as on a full disk, and the run goes
    on once there is room.
    """
    options: dict[str, Any] = {"rounds": 60, "checkpoint_every": 1}
    whole = fit(tmp_path / "whole", **options)
    out = tmp_path / "run"
    told_without_traceback(
        child(out, f"ulimit -f {limit}; trap '' XFSZ", **options),
        1,
        "File too large",
        "--resume",
        str(out),
    )
    assert_same(fit(out, **options), whole, out)


@pytest.mark.faults
@needs_mounts
def test_a_full_disk(tmp_path):
    """A tmpfs of some kilobytes, a little larger each time.

    What it holds when the run fails is copied out, and goes on.
    """
    options: dict[str, Any] = {"rounds": 60, "checkpoint_every": 2}
    whole = fit(tmp_path / "whole", **options)
    disk = tmp_path / "disk"
    disk.mkdir()
    failed = 0
    for kilobytes in range(16, 200, 8 if cases(100) > 5 else 48):
        out = tmp_path / str(kilobytes)
        out.mkdir()
        shell = f'mount -t tmpfs -o size={kilobytes}k tmpfs {disk}; "$@"; code=$?; cp -r {disk}/run/. {out}/; exit $code'
        ended = child(disk / "run", shell, **options)
        if ended.returncode == 0:
            break
        told_without_traceback(ended, ended.returncode, "No space left on device", "run")
        assert ended.returncode in (1, 2)  # 2: not even the folder could be made
        failed += 1
        assert_same(fit(out, **options), whole, out)
    assert failed >= 2


@pytest.mark.faults
@needs_mounts
def test_a_folder_that_cannot_be_written_to(tmp_path):
    """Nobody writes to it, the super-user neither; a finished run in it can be used."""
    out = tmp_path / "run"
    fit(out, lambda done: None)
    mounted = f"mount --bind {out} {out}; mount -o remount,ro,bind {out}"
    ended = child(out, mounted)
    assert ended.returncode == 0 and not ended.stderr, (
        ended.stderr
    )  # finished: nothing is to be written
    told_without_traceback(child(out, mounted, lr=0.5, rounds=7), 2, "resume")
    flags = {"resume": False}
    told_without_traceback(child(out, mounted, **flags), 2, "resume")
    new = tmp_path / "empty"
    new.mkdir()
    shell = f"mount --bind {new} {new}; mount -o remount,ro,bind {new}"
    told_without_traceback(child(new, shell), 2, "Read-only file system", "--out")
    assert not list(new.iterdir())
