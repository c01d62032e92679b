"""Where the files of a data set lie on this computer, and how missing ones are downloaded.

A data set lies in its official file layout in `ROOT/NAME/` or in `ROOT/` itself, where ROOT is a folder of
`$FEDHB_DATA` (a list of folders, like PATH) or else the user's cache folder. Local files are checked by their structure
when they are read, so that a recompressed copy is as good as the original; only downloads are checked against known
hashes.
"""

from __future__ import annotations

import logging
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fedhb.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

VARIABLE = "FEDHB_DATA"
TIMEOUT = 30
"""Seconds without a byte after which a server is given up."""
CHUNK = 1 << 16

# What a connection, a disk, a wrong hash (ValueError) or an archive can raise.
_FAILURES = (OSError, ValueError, EOFError, KeyError, HTTPException, zlib.error, tarfile.TarError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Download:
    """One file on a server.

    Attributes:
        url: its address.
        md5: the published hash.
        members: for an archive, the wanted members and where each goes below the data set's folder; no other is used.
    """

    url: str
    md5: str
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """The files of a data set.

    Attributes:
        folder: the data set's folder below a root.
        files: the names of its files as they are when unpacked.
        gzipped: whether each file may also end in `.gz`.
        subfolders: where the files may lie below ROOT/NAME or ROOT, best first ("" is the folder itself).
        aliases: other folder names under which the same files may lie.
        downloads: where to get the files.
    """

    folder: str
    files: tuple[str, ...]
    gzipped: bool
    subfolders: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()

    @property
    def official_names(self) -> tuple[str, ...]:
        """The names of the files as they are published."""
        return tuple(f"{name}.gz" if self.gzipped else name for name in self.files)


_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_EMNIST_FILES = (
    "emnist-bymerge-train-images-idx3-ubyte",
    "emnist-bymerge-train-labels-idx1-ubyte",
    "emnist-bymerge-test-images-idx3-ubyte",
    "emnist-bymerge-test-labels-idx1-ubyte",
)


def _idx_downloads(server: str, *hashes: str) -> tuple[Download, ...]:
    return tuple(Download(f"{server}{name}.gz", md5) for name, md5 in zip(_MNIST_FILES, hashes, strict=True))


_CIFAR = Source(
    folder="cifar-100",
    files=("train.bin", "test.bin"),
    gzipped=False,
    subfolders=("cifar-100-binary", ""),
    downloads=(
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            {f"cifar-100-binary/{name}": f"cifar-100-binary/{name}" for name in ("train.bin", "test.bin")},
        ),
    ),
)

SOURCES: dict[str, Source] = {
    "mnist": Source(
        folder="mnist",
        files=_MNIST_FILES,
        gzipped=True,
        subfolders=("",),
        downloads=_idx_downloads(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": Source(
        folder="fashion-mnist",
        files=_MNIST_FILES,
        gzipped=True,
        subfolders=("",),
        downloads=_idx_downloads(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "emnist": Source(
        folder="emnist",
        files=_EMNIST_FILES,
        gzipped=True,
        subfolders=("", "gzip"),  # the official archive unpacks to a folder named gzip
        downloads=(
            Download(
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                {f"gzip/{name}.gz": f"{name}.gz" for name in _EMNIST_FILES},
            ),
        ),
    ),
    "cifar-100": _CIFAR,
    "cifar-100-coarse": replace(_CIFAR, aliases=("cifar-100-coarse",)),
}


@dataclass(frozen=True)
class Located:
    """The outcome of a search.

    Attributes:
        folder: where all files were found, or None.
        paths: the files, in the order of `Source.files`; empty if not all were found.
        missing: what the most complete folder lacks.
        searched: every folder that was looked into.
    """

    folder: Path | None
    paths: tuple[Path, ...]
    missing: tuple[str, ...]
    searched: tuple[Path, ...]


def cache_folder() -> Path:
    """The user's cache folder on this platform; downloads go there."""
    import pooch

    return Path(pooch.os_cache("fedhb")).expanduser()


def roots() -> list[Path]:
    """The folders in which data sets are looked for, in order."""
    named = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part.strip()]
    return list(dict.fromkeys([*named, cache_folder()]))


def locate(name: str, root: str | os.PathLike[str] | None = None) -> Located:
    """Look for the files of a data set, without reading them.

    Args:
        name: a key of `SOURCES`.
        root: look below this folder only (default: `roots()`).
    """
    source = SOURCES[name]
    searched = []
    lacking: tuple[str, ...] = source.official_names
    for folder in _candidates(source, roots() if root is None else [Path(root).expanduser()]):
        searched.append(folder)
        paths, missing = _look(source, folder)
        if not missing:
            return Located(folder, tuple(paths), (), tuple(searched))
        if len(missing) < len(lacking):
            lacking = tuple(missing)
    return Located(None, (), lacking, tuple(searched))


def find(name: str, root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """The files of a data set, in the order of `Source.files`.

    Raises:
        InputError: if a file is missing; the message says which, where they were looked for, and how to get them.
    """
    located = locate(name, root)
    if located.folder is None:
        where = "\n".join(f"  {folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in located.searched)
        raise InputError(f"data set {name}: missing {', '.join(located.missing)}; searched in\n{where}\n{remedy(name, root)}")
    return located.paths


def remedy(name: str, root: str | os.PathLike[str] | None = None) -> str:
    """What a user can do to get the files of a data set."""
    source = SOURCES[name]
    folder = (cache_folder() if root is None else Path(root).expanduser()) / source.folder
    packed = " (as they are or unpacked)" if source.gzipped else ""
    return (
        f"run `fedhb data get {name}`, or put {', '.join(source.official_names)}{packed} in {folder}, "
        f"or name their folder in {VARIABLE}"
    )


def _candidates(source: Source, search: list[Path]) -> Iterator[Path]:
    # MNIST and Fashion-MNIST have the same file names, so a root that is itself another data set's folder is left out.
    names = (source.folder, *source.aliases)
    others = {other.folder for other in SOURCES.values()} - set(names)
    for root in search:
        if not root.is_dir():
            yield root  # said once, not for every folder below it
            continue
        for name in names:
            for subfolder in source.subfolders:
                yield root / name / subfolder
        if root.name not in others:
            for subfolder in source.subfolders:
                yield root / subfolder


def _look(source: Source, folder: Path) -> tuple[list[Path], list[str]]:
    """(files that are there, official names of those that are not)."""
    paths, missing = [], []
    for name, official in zip(source.files, source.official_names, strict=True):
        present = [path for path in (folder / official, folder / name) if path.is_file()]
        if present:
            paths.append(present[0])
        else:
            missing.append(official)
    return paths, missing


def download(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """Download a data set, show the progress, and check every file against its published hash.

    A file appears under its name only once it is complete and checked; a failure leaves no partial file behind.

    Args:
        name: a key of `SOURCES`.
        root: the folder below which the data set's folder goes (default: the user's cache folder).

    Returns:
        The data set's folder.
    """
    source = SOURCES[name]
    folder = (cache_folder() if root is None else Path(root).expanduser()) / source.folder
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    url = source.downloads[0].url
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _progress() as progress:
            for item in source.downloads:
                url = item.url
                if item.members:
                    # The archive lives in a folder that goes away whatever happens.
                    with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as part:
                        _unpack(_fetch(item, Path(part), progress), item.members, Path(part), folder)
                else:
                    _fetch(item, folder, progress)
    except _FAILURES as error:
        for path in absent:
            with suppress(OSError):  # not empty: it holds files that did arrive
                path.rmdir()
        raise InputError(
            f"data set {name}: download from {url} to {folder} failed: {error}. Try again, or get the files another "
            f"way and put {', '.join(source.official_names)} in {folder}, or name their folder in {VARIABLE}"
        ) from error
    return folder


def _fetch(item: Download, folder: Path, progress: Progress) -> Path:
    """Download one file into a folder; pooch moves it there only when its hash is right, and skips what is there."""
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # the progress display says it already
    try:
        transfer = _transfer(item, progress)
        return Path(pooch.retrieve(item.url, f"md5:{item.md5}", item.file_name, folder, downloader=transfer))
    finally:
        logger.setLevel(level)


def _transfer(item: Download, progress: Progress) -> Callable[[str, str, object], None]:
    """What pooch calls to get a file.

    Its own would unpack a .gz that a server declares as encoded, so that the hash is wrong, and leave the connection of
    a failed request open.
    """
    task = progress.add_task(item.file_name, total=None)

    def transfer(url: str, output_file: str, pooch: object) -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "fedhb"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response, Path(output_file).open("wb") as file:
                progress.update(task, total=response.length)
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
        except urllib.error.HTTPError as error:
            error.close()
            raise

    return transfer


def _unpack(archive: Path, members: Mapping[str, str], part: Path, folder: Path) -> None:
    """Copy the wanted members out of an archive. Their names decide nothing about where they go, so none can escape."""
    staged = {}
    with _opened(archive) as open_member:
        for number, (member, target) in enumerate(members.items()):
            staged[target] = part / f"member-{number}"
            with open_member(member) as content, staged[target].open("wb") as file:
                shutil.copyfileobj(content, file)
    for target, path in staged.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        path.replace(folder / target)  # within one folder a rename: a reader sees the whole file or none


@contextmanager
def _opened(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """A function that opens a member of a zip or tar archive by its name."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            yield packed.open
        return
    with tarfile.open(archive, "r:gz") as unpacked:

        def open_member(name: str) -> IO[bytes]:
            entry = unpacked.getmember(name)
            content = unpacked.extractfile(entry) if entry.isfile() else None  # a link could point anywhere
            if content is None:
                raise ValueError(f"{name} in {archive.name} is not a regular file")
            return content

        yield open_member


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress
