"""Where examples come from: `load` reads a known data set, `read_npz` reads a file of yours."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fedhb.data import locate
from fedhb.data.dataset import Dataset, Examples
from fedhb.data.table import is_table, read_npz, read_table
from fedhb.errors import InputError

__all__ = [
    "NAMES",
    "Dataset",
    "Examples",
    "Status",
    "check_name",
    "is_table",
    "load",
    "read_npz",
    "read_table",
    "status",
]

NAMES = (
    "digits",
    "mnist",
    "fashion-mnist",
    "emnist",
    "cifar-100",
    "cifar-100-coarse",
    "cifar-100-c",
)


@dataclass(frozen=True)
class Status:
    """Whether a data set is on this computer.

    Attributes:
        name: its name.
        present: whether all its files are there.
        where: their folder, and whether they were made here; empty if not present.
        missing: the files that are not there.
        remedy: how to get them; empty if present.
    """

    name: str
    present: bool
    where: str
    missing: tuple[str, ...] = ()
    remedy: str = ""


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
    """Load a data set by its name.

    Args:
        name: one of `NAMES`.
        root: a folder that holds its files, in `root/NAME` or in `root` itself; default: every
            folder of `$FEDHB_DATA`, then the user's cache folder.
        download: get the files if they are missing, into `root/NAME` or the user's cache folder.
    """
    check_name(name)
    if name == "digits":
        from fedhb.data import digits

        return digits.load()
    if download and locate.locate(name, root).folder is None:
        locate.download(name, root)
    if name == "cifar-100-c":
        from fedhb.data import cifar_c

        return cifar_c.load(root)
    if name.startswith("cifar"):
        from fedhb.data import cifar

        return cifar.load(name, root)
    from fedhb.data import idx

    return idx.load(name, root)


def check_name(name: str) -> None:
    """Refuse a name that no data set has."""
    if is_table(name):
        raise InputError(
            f"dataset={name!r} is a file of your own: give it as data, --data {name}, or read it "
            "with read_npz"
        )
    if name not in NAMES:
        raise InputError(
            f"unknown data set {name!r}: choose one of {', '.join(NAMES)}, or give your own as a "
            ".npz file"
        )


def status() -> list[Status]:
    """Return which data sets are on this computer, in the order of `NAMES`; no file is read."""
    statuses = []
    for name in NAMES:
        if name == "digits":
            statuses.append(Status(name, True, "part of scikit-learn"))
            continue
        located = locate.locate(name)
        if located.folder is not None:
            made = " (regenerated)" if (located.folder / locate.SUMS).exists() else ""
            statuses.append(Status(name, True, f"{located.folder}{made}"))
        else:
            statuses.append(Status(name, False, "", located.missing, locate.remedy(name)))
    return statuses
