"""Source and wheel are built, installed into a clean environment, and used; what else
that brings along.

`make release-check` runs it: it needs a package index, and some minutes for torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[2]
LICENCES = ROOT / "docs/licences.md"

EXTRAS = "flower,privacy,tensorboard,corruptions"
"""The extras for users; the others are for work on fedhb itself."""

PERMISSIVE = (
    "MIT",
    "BSD",
    "APACHE",
    "PSF",
    "PYTHON SOFTWARE",
    "ISC",
    "MPL",
    "MOZILLA",
    "UNLICENSE",
    "ZLIB",
    "HPND",
    "CNRI",
)
"""Parts of the names of licences under which everything that comes along may be used and passed on.
"""

LIST = """
import importlib.metadata as m, json
found = {}
for d in m.distributions():
    meta = d.metadata
    kinds = [c.split(" :: ")[-1] for c in meta.get_all("Classifier") or [] if c.startswith("License :: ")]
    text = (meta.get("License") or "").strip().splitlines()
    short = text[0] if text and len(text[0]) < 60 else ""
    found[meta["Name"].lower().replace("_", "-")] = (d.version, meta.get("License-Expression") or "; ".join(kinds) or short)
print(json.dumps(found))
"""


def run(*command: object, cwd: Path | None = None, **env: str) -> str:
    words = [str(word) for word in command]
    ended = subprocess.run(
        words, cwd=cwd, env=os.environ | {"PYTHONPATH": ""} | env, capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The two files that a release is."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return {"source": source, "wheel": wheel}


def environment(folder: Path, *what: object) -> Path:
    """The interpreter of a new environment that holds this and what it asks for, at the versions of
    constraints.txt.
    """
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    for one in ("torch", *what):  # torch first: its build decides what comes with it
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            ROOT / "constraints.txt",
            one,
        )
    return python


@pytest.fixture(scope="module")
def clean(tmp_path_factory, built) -> Path:
    """With the wheel alone."""
    return environment(tmp_path_factory.mktemp("clean") / "env", built["wheel"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, built) -> Path:
    """With everything that users may ask for."""
    return environment(tmp_path_factory.mktemp("whole") / "env", f"{built['wheel']}[{EXTRAS}]")


def test_the_files_hold_what_they_should(built):
    with zipfile.ZipFile(built["wheel"]) as wheel, tarfile.open(built["source"]) as source:
        names, inside = (
            set(wheel.namelist()),
            {name.partition("/")[2] for name in source.getnames()},
        )
    modules = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src/fedhb").rglob("*.py")}
    assert modules <= names and "fedhb/py.typed" in names
    assert not [name for name in names if not name.startswith(("fedhb/", "fedhb-"))]
    assert any(name.endswith("LICENSE") for name in names)
    assert {"LICENSE", "README.md", "pyproject.toml"} | {
        f"src/{module}" for module in modules
    } <= inside


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_it_works_where_it_is_installed(kind, built, clean, tmp_path):
    """Train, resume, load, predict, from a folder that has nothing of the repository."""
    if kind == "source":
        run(
            clean,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--force-reinstall",
            built["source"],
        )
    fedhb = clean.parent / "fedhb"
    flags = ["--num-clients", 10, "--rounds", 3, "--fraction", 0.3, "--shards-per-client", 3]
    run(fedhb, "train", *flags, "--out", "runs/x", cwd=tmp_path)
    assert "finished already" in run(
        fedhb, "train", *flags, "--out", "runs/x", "--resume", cwd=tmp_path
    )
    make = "import numpy as n; from sklearn.datasets import load_digits as d; n.save('in.npy', d().images[:9, None])"
    run(clean, "-c", make, cwd=tmp_path)
    assert "9 predictions" in run(fedhb, "predict", "runs/x", "in.npy", cwd=tmp_path)
    where = run(clean, "-c", "import fedhb; print(fedhb.__file__)", cwd=tmp_path)
    assert str(clean.parents[1]) in where


def installed(clean: Path) -> dict[str, tuple[str, str]]:
    found = json.loads(run(clean, "-c", LIST))
    return {
        name: value
        for name, value in sorted(found.items())
        if name not in ("pip", "setuptools", "fedhb")
    }


def test_every_version_is_fixed(whole):
    """constraints.txt names everything that an installation brings along, so that it is the same
    tomorrow.
    """
    run(whole, "-m", "pip", "check")
    fixed = dict(
        re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    fixed = {name.lower().replace("_", "-"): version for name, version in fixed.items()}
    loose = {
        name: version
        for name, (version, _) in installed(whole).items()
        if fixed.get(name) != version.partition("+")[0]
    }
    loose = {
        name: version
        for name, version in loose.items()
        if not name.startswith(("nvidia-", "cuda-", "triton"))
    }
    assert not loose, "constraints.txt lacks " + ", ".join(
        f"{name}=={version}" for name, version in loose.items()
    )


def test_every_licence_is_listed_and_permissive(clean, whole):
    """docs/licences.md; `FEDHB_UPDATE=1 make release-check` writes it anew."""
    own = set(installed(clean))
    rows = {
        name: (licence or "?", "fedhb" if name in own else "extras")
        for name, (_, licence) in installed(whole).items()
    }
    rows = {
        name: row
        for name, row in rows.items()
        if not name.startswith(("nvidia-", "cuda-", "triton"))
    }
    strange = {
        name: licence
        for name, (licence, _) in rows.items()
        if not any(kind in licence.upper() for kind in PERMISSIVE)
    }
    assert not strange, strange
    if os.environ.get("FEDHB_UPDATE"):
        head = LICENCES.read_text(encoding="utf-8").partition("| package |")[0]
        table = "".join(
            f"| {name} | {licence} | {source} |\n" for name, (licence, source) in rows.items()
        )
        LICENCES.write_text(
            f"{head}| package | licence | comes with |\n|---|---|---|\n{table}", encoding="utf-8"
        )
    listed = re.findall(
        r"^\| ([\w.-]+) \| (.+) \| (fedhb|extras) \|$",
        LICENCES.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert {name: (licence, source) for name, licence, source in listed} == rows, (
        "FEDHB_UPDATE=1 make release-check"
    )


EXPLAINED: dict[str, str] = {}
"""Advisories that do not concern fedhb, each with the reason why."""


def test_no_version_has_a_known_weakness(whole, tmp_path):
    """pip-audit asks an advisory service about every fixed version.

    Where none answers the test is skipped and says so.
    """
    pins = tmp_path / "pins.txt"
    pins.write_text(
        "".join(
            f"{name}=={version.partition('+')[0]}\n"
            for name, (version, _) in installed(whole).items()
        )
    )
    found: dict[str, object] = {}
    for service in ("pypi", "osv"):
        command = [
            "-m",
            "pip_audit",
            "--no-deps",
            "--disable-pip",
            "--format",
            "json",
            "-s",
            service,
            "-r",
            str(pins),
        ]
        ended = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if not ended.stdout.strip().startswith("{"):
            continue  # no connection
        told = json.loads(ended.stdout)["dependencies"]
        if all("skip_reason" not in one for one in told):
            found = {
                one["name"]: one["vulns"]
                for one in told
                if [v for v in one["vulns"] if v["id"] not in EXPLAINED]
            }
            assert not found, found
            return
    pytest.skip("no advisory service can be reached from here: nothing was audited")
