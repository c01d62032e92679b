"""CIFAR-100-C: made from CIFAR-100, stopped and gone on with, and read as published."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedhb import data
from fedhb.data import cifar_c, corruptions, locate
from fedhb.data.corruptions import CORRUPTIONS, corrupt
from fedhb.errors import InputError

pytest.importorskip("PIL")
COUNT = 7


def write_cifar(root, count=COUNT, seed=0):
    """CIFAR-100 with a few images: [n, 32, 32, 3] and labels of the test part."""
    folder = root / "cifar-100/cifar-100-binary"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for name in ("train.bin", "test.bin"):
        records = rng.integers(0, 256, size=(count, 3074)).astype(np.uint8)
        records[:, 0], records[:, 1] = np.arange(count) % 20, np.arange(count) % 100
        records.tofile(folder / name)
    return records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A data folder with CIFAR-100, and pictures of frost."""
    monkeypatch.setenv("FEDHB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(locate, "cache_folder", lambda: tmp_path / "cache")
    for module in (corruptions, cifar_c):
        monkeypatch.setattr(module, "frost_pictures", lambda: [np.full((40, 50, 3), 0.3)])
    write_cifar(tmp_path / "data")
    return tmp_path / "data"


def make(processes=1):
    told = []
    return cifar_c.make(processes, lambda *what: told.append(what)), told


def test_every_corruption_is_a_file_of_the_test_images(here):
    folder, told = make()
    assert folder == here / "cifar-100-c"
    assert sum(more for _, more, _ in told) == 19 * COUNT == told[0][2]
    images, labels = (
        np.fromfile(here / "cifar-100/cifar-100-binary/test.bin", np.uint8).reshape(-1, 3074)[:, k]
        for k in (slice(2, None), 1)
    )
    images = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    for name in CORRUPTIONS:
        found = np.load(folder / f"{name}.npy")
        assert found.dtype == np.uint8 and (found == corrupt(name, images)).all()
    assert (np.load(folder / "labels.npy") == labels).all()
    sums = dict(line.split()[::-1] for line in (folder / locate.SUMS).read_text().splitlines())
    assert len(sums) == 20
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*sums, locate.SUMS]
    )  # no part is left


def test_made_data_are_read_and_called_regenerated(here):
    make()
    found = data.load("cifar-100-c")
    assert found.title == "CIFAR-100-C (regenerated)" and found.num_classes == 100
    assert found.train.x.shape == (19 * COUNT, 3, 32, 32) and len(found.test) == 0
    assert len(found.groups) == 19 == len(set(found.groups)) and found.num_novel == 9
    assert set(found.groups) == set(CORRUPTIONS) and found.groups[:10] == cifar_c.TRAINING
    for k in (0, 12, 18 * COUNT + 2):
        name = found.groups[found.train.group[k]]
        image = np.load(here / f"cifar-100-c/{name}.npy")[found.train.original[k]]
        assert (found.train.x[k] == image.transpose(2, 0, 1)).all()
        assert found.train.y[k] == found.train.original[k] % 100
    where = {entry.name: entry for entry in data.status()}["cifar-100-c"]
    assert where.present and where.where.endswith("(regenerated)")


def test_what_is_there_is_kept_and_the_rest_is_made(here):
    folder, _ = make()
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / "fog.npy").unlink()
    np.save(folder / "snow.npy", np.zeros((2, 32, 32, 3), np.uint8))  # not whole
    kept = (folder / "frost.npy").stat().st_mtime_ns
    entry = {entry.name: entry for entry in data.status()}["cifar-100-c"]
    assert (
        not entry.present
        and entry.missing == ("fog.npy",)
        and "fedhb data make cifar-100-c" in entry.remedy
    )
    make()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    assert (folder / "frost.npy").stat().st_mtime_ns == kept


def test_processes_change_nothing(here, monkeypatch):
    monkeypatch.setattr(cifar_c, "IMAGES_PER_TASK", 3)
    names = ("gaussian_noise", "glass_blur", "elastic_transform")
    monkeypatch.setattr(cifar_c, "TRAINING", names)
    monkeypatch.setattr(cifar_c, "NOVEL", ())
    folder, _ = make(processes=2)
    for name in names:
        assert (np.load(folder / f"{name}.npy") == corrupt(name, images_of(here))).all()


def images_of(here):
    records = np.fromfile(here / "cifar-100/cifar-100-binary/test.bin", np.uint8).reshape(-1, 3074)
    return records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def test_a_killed_run_goes_on_to_the_same_files(tmp_path):
    write_cifar(tmp_path / "data", count=3000)
    code = (
        "import numpy as np; from fedhb.data import cifar_c, corruptions\n"
        "for module in (corruptions, cifar_c): module.frost_pictures = lambda: [np.full((40, 50, 3), 0.3)]\n"
        "cifar_c.make(1, lambda *what: None)"
    )
    environment = {**os.environ, "FEDHB_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, env=environment)
    folder, until = tmp_path / "data/cifar-100-c", time.monotonic() + 60
    while len(list(folder.glob("*.npy"))) < 4 and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.npy")}
    assert 4 <= len(before) < 20
    subprocess.run(command, env=environment, check=True)
    assert len(list(folder.glob("*.npy"))) == 20
    kept = [name for name in before if (folder / name).stat().st_mtime_ns == before[name]]
    assert set(before) == set(kept)
    sums = dict(line.split()[::-1] for line in (folder / locate.SUMS).read_text().splitlines())
    assert all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        for name, digest in sums.items()
    )
    images = images_of(tmp_path / "data")
    for name in ("brightness", "speckle_noise"):
        assert (np.load(folder / f"{name}.npy") == corrupt(name, images)).all()


def write_published(folder, count=COUNT):
    """Five severities one after another, the last of them 4."""
    folder.mkdir(parents=True)
    np.save(folder / "labels.npy", np.tile(np.arange(count), 5).astype(np.uint8))
    for number, name in enumerate(CORRUPTIONS):
        images = np.zeros((5, count, 32, 32, 3), np.uint8)
        images += np.arange(5, dtype=np.uint8).reshape(-1, 1, 1, 1, 1) + np.uint8(10 * number)
        images[..., 0] += np.arange(count, dtype=np.uint8).reshape(-1, 1, 1)
        np.save(folder / f"{name}.npy", images.reshape(-1, 32, 32, 3))


@pytest.mark.parametrize("name", ["cifar-100-c", "CIFAR-100-C", "cifar-100-c/CIFAR-100-C", ""])
def test_published_files_are_read_at_severity_five(tmp_path, name):
    write_published(tmp_path / "root" / name)
    found = data.load("cifar-100-c", tmp_path / "root")
    assert found.title == "CIFAR-100-C" and found.train.x.shape == (19 * COUNT, 3, 32, 32)
    order = [list(CORRUPTIONS).index(name) for name in found.groups]
    assert (found.train.x[:, 1, 0, 0] == np.repeat(10 * np.array(order) + 4, COUNT)).all()
    assert (found.train.x[:, 0, 0, 0] - found.train.x[:, 1, 0, 0] == found.train.original).all()
    assert (found.train.y == found.train.original).all()


def test_published_files_are_not_made_over(here):
    write_published(here / "cifar-100-c")
    with pytest.raises(InputError, match=str(here)):
        make()
    (here / "cifar-100-c/fog.npy").unlink()
    with pytest.raises(InputError, match=r"\.npy"):
        make()


def test_other_test_images_are_refused(here):
    folder, _ = make()
    np.save(folder / "labels.npy", np.zeros(COUNT, np.int64))
    with pytest.raises(InputError, match=r"cifar-100-c.*CIFAR-100"):
        make()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("fog.npy", np.zeros((COUNT, 32, 32, 3), np.uint8), "five severities"),
        ("fog.npy", np.zeros((5 * COUNT, 32, 32, 3)), "float64"),
        ("labels.npy", np.zeros(COUNT, np.uint8), "five severities"),
        ("labels.npy", np.arange(5 * COUNT), "five severities"),
        ("labels.npy", np.full(5 * COUNT, 100), r"0\.\.99"),
        ("labels.npy", None, ".npy file"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, message):
    write_published(tmp_path / "cifar-100-c")
    if content is None:
        (tmp_path / "cifar-100-c" / file).write_bytes(b"nothing")
    else:
        np.save(tmp_path / "cifar-100-c" / file, content)
    with pytest.raises(InputError, match=message):
        data.load("cifar-100-c", tmp_path)


def test_it_is_made_below_the_first_folder_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "cache_folder", lambda: tmp_path / "cache")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FEDHB_DATA", f"{file}{os.pathsep}{tmp_path / 'new'}")
    assert locate.place_for("cifar-100-c") == tmp_path / "new/cifar-100-c"
    monkeypatch.setenv("FEDHB_DATA", str(file))
    assert locate.place_for("cifar-100-c") == tmp_path / "cache/cifar-100-c"


def test_the_command_makes_it_and_says_where(here, monkeypatch, capsys):
    from fedhb.cli import main

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["fedhb", *words])
        monkeypatch.setattr(main.console, "_width", 200)
        monkeypatch.setenv("COLUMNS", "200")  # or the command line takes a width of its own
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, " ".join((printed.out + printed.err).split())

    code, printed = command("data")
    assert (
        code == 0
        and "gaussian_noise.npy, shot_noise.npy, impulse_noise.npy, ... (20 files)" in printed
    )
    assert "`fedhb data make cifar-100-c`" in printed
    code, printed = command("data", "make", "mnist")
    assert code == 2 and "'mnist'" in printed
    code, printed = command("data", "make", "cifar-100-c", "--jobs", "1")
    assert (
        code == 0 and str(here / "cifar-100-c") in printed and "sha256sum -c SHA256SUMS" in printed
    )
    assert printed.count(": done") == 19 and f"{19 * COUNT} of {19 * COUNT} images" in printed
    code, printed = command("data")
    assert f"{here / 'cifar-100-c'} (regenerated)" in printed
