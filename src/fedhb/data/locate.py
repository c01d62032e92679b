"""Where the files of a data set lie on this computer, and how missing ones are downloaded.

A data set lies in its official file layout in `ROOT/NAME/` or in `ROOT/` itself, where ROOT is a
folder of `$FEDHB_DATA` (a list of folders, like PATH) or else the user's cache folder. Local files
are checked by their structure when they are read, so that a recompressed copy is as good as the
original. Only downloads are checked against known hashes.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fedhb.data.sources import SOURCES, Download, Source
from fedhb.errors import InputError
from fedhb.progress_bars import download_bars

if TYPE_CHECKING:
    from rich.progress import Progress

VARIABLE = "FEDHB_DATA"
TIMEOUT = 30
"""A download fails after so many seconds without a byte."""
BYTES_PER_READ = 1 << 16
SUMS = "SHA256SUMS"
"""The file of hashes that lies beside a data set that was made here."""

# The exceptions of a connection, a disk, a wrong hash (ValueError) or an archive.
_FAILURES = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    HTTPException,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class Located:
    """The outcome of a search.

    Attributes:
        folder: the folder that holds all files, or None.
        paths: the files, in the order of `Source.files`; empty if some are missing.
        missing: the files that the most complete folder lacks.
        searched: all folders that were looked into.
    """

    folder: Path | None
    paths: tuple[Path, ...]
    missing: tuple[str, ...]
    searched: tuple[Path, ...]


def cache_folder() -> Path:
    """Return the user's cache folder on this platform; downloads go there."""
    import pooch

    return Path(pooch.os_cache("fedhb")).expanduser()


def roots() -> list[Path]:
    """Return the folders in which data sets are looked for, in order."""
    named = [
        Path(part).expanduser()
        for part in os.environ.get(VARIABLE, "").split(os.pathsep)
        if part.strip()
    ]
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
    """Return the files of a data set, in the order of `Source.files`.

    Raises:
        InputError: if a file is missing; the message names it, the folders that were searched, and
            how to get the files.
    """
    located = locate(name, root)
    if located.folder is None:
        where = "\n".join(
            f"  {folder}{'' if folder.is_dir() else ' (no such folder)'}"
            for folder in located.searched
        )
        raise InputError(
            f"data set {name}: missing {listed(located.missing)}; searched in\n{where}\n"
            f"{remedy(name, root)}"
        )
    return located.paths


def remedy(name: str, root: str | os.PathLike[str] | None = None) -> str:
    """Say how a user can get the files of a data set."""
    source = SOURCES[name]
    folder = (cache_folder() if root is None else Path(root).expanduser()) / source.folder
    packed = " (as they are or unpacked)" if source.gzipped else ""
    made = f"run `fedhb data make {name}`, or " if source.made else "run "
    return (
        f"{made}`fedhb data get {name}`, or put {listed(source.official_names)}{packed} in "
        f"{folder}, or name their folder in {VARIABLE}"
    )


def listed(names: Sequence[str]) -> str:
    """Write file names for a message: up to five names, or the first three of more."""
    return ", ".join(names if len(names) <= 5 else [*names[:3], f"... ({len(names)} files)"])


def place_for(name: str) -> Path:
    """Return the folder for a data set that is made here.

    It lies below the first folder of `roots` that can be written to.
    """
    for root in roots():
        existing = next(path for path in (root, *root.absolute().parents) if path.exists())
        if os.access(existing, os.W_OK | os.X_OK) and existing.is_dir():
            return root / SOURCES[name].folder
    raise InputError(
        f"no folder of {VARIABLE} can be written to, nor can {cache_folder()}: name a folder in "
        f"{VARIABLE} that can be written to"
    )


def _candidates(source: Source, search: list[Path]) -> Iterator[Path]:
    # MNIST and Fashion-MNIST have the same file names, so a root that is the folder of another data
    # set is left out.
    names = (source.folder, *source.aliases)
    others = {other.folder for other in SOURCES.values()} - set(names)
    for root in search:
        if not root.is_dir():
            yield root  # for the message: once, not for every folder below it
            continue
        for name in names:
            for subfolder in source.subfolders:
                yield root / name / subfolder
        if root.name not in others:
            for subfolder in source.subfolders:
                yield root / subfolder


def _look(source: Source, folder: Path) -> tuple[list[Path], list[str]]:
    """Return (the files that are in the folder, the official names of those that are not)."""
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

    A file gets its name only when it is complete and checked. A failure leaves no partial file
    behind.

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
        with download_bars() as progress:
            for item in source.downloads:
                url = item.url
                if item.members:
                    # The temporary folder is removed also after a failure.
                    with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as temporary:
                        part = Path(temporary)
                        _unpack(_fetch(item, part, progress), item.members, part, folder)
                else:
                    _fetch(item, folder, progress)
    except _FAILURES as error:
        for path in absent:
            with suppress(OSError):  # not empty: it holds files that did arrive
                path.rmdir()
        raise InputError(
            f"data set {name}: download from {url} to {folder} failed: {error}. Try again, or get "
            f"the files another way and put {listed(source.official_names)} in {folder}, or name "
            f"their folder in {VARIABLE}"
        ) from error
    return folder


def _fetch(item: Download, folder: Path, progress: Progress) -> Path:
    """Download one file into a folder.

    Pooch moves the file there only when its hash is right, and downloads no file that is there.
    """
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # the progress display says it already
    try:
        transfer = _transfer(item, progress)
        return Path(
            pooch.retrieve(item.url, f"md5:{item.md5}", item.file_name, folder, downloader=transfer)
        )
    finally:
        logger.setLevel(level)


def _transfer(item: Download, progress: Progress) -> Callable[[str, str, object], None]:
    """Return the function with which pooch gets a file.

    Pooch's default would unpack a .gz that a server declares as encoded, so that its hash is wrong,
    and would leave the connection of a failed request open.
    """
    task = progress.add_task(item.file_name, total=None)

    def transfer(url: str, output_file: str, pooch: object) -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "fedhb"})
        try:
            with (
                urllib.request.urlopen(request, timeout=TIMEOUT) as response,
                Path(output_file).open("wb") as file,
            ):
                progress.update(task, total=response.length)
                while chunk := response.read(BYTES_PER_READ):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
        except urllib.error.HTTPError as error:
            error.close()
            raise

    return transfer


def _unpack(archive: Path, members: Mapping[str, str], part: Path, folder: Path) -> None:
    """Copy the members that are used out of an archive.

    The names in the archive do not decide where a file goes, so none can be written elsewhere.
    """
    staged = {}
    with _opened(archive) as open_member:
        for number, (member, target) in enumerate(members.items()):
            staged[target] = part / f"member-{number}"
            with open_member(member) as content, staged[target].open("wb") as file:
                shutil.copyfileobj(content, file)
    for target, path in staged.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        # On one disk this is a rename: a reader sees the whole file or none.
        path.replace(folder / target)


@contextmanager
def _opened(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """Yield a function that opens a member of a zip or tar archive by its name."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            yield packed.open
        return
    with tarfile.open(archive) as unpacked:

        def open_member(name: str) -> IO[bytes]:
            entry = unpacked.getmember(name)
            # A link could point to any file of the computer, so only regular files are read.
            content = unpacked.extractfile(entry) if entry.isfile() else None
            if content is None:
                raise ValueError(f"{name} in {archive.name} is not a regular file")
            return content

        yield open_member
