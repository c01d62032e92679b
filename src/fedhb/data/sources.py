"""The data sets that lie in files: the names of their files, their folders, and their downloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedhb.data.corruptions import CORRUPTIONS


@dataclass(frozen=True)
class Download:
    """One file on a server.

    Attributes:
        url: its address.
        md5: the published hash.
        members: for an archive, the members that are used, and where each goes below the data
            set's folder.
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
        files: the names of its files when they are unpacked.
        gzipped: whether each file may also end in `.gz`.
        subfolders: the folders below ROOT/NAME or ROOT in which the files may lie, best first
            ("" is ROOT/NAME or ROOT itself).
        aliases: other names of the data set's folder.
        downloads: the files on servers.
        made: whether `fedhb data make` can make them.
    """

    folder: str
    files: tuple[str, ...]
    gzipped: bool
    subfolders: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    made: bool = False

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
_CORRUPTED_FILES = (*(f"{name}.npy" for name in CORRUPTIONS), "labels.npy")
_EMNIST_FILES = (
    "emnist-bymerge-train-images-idx3-ubyte",
    "emnist-bymerge-train-labels-idx1-ubyte",
    "emnist-bymerge-test-images-idx3-ubyte",
    "emnist-bymerge-test-labels-idx1-ubyte",
)


def _idx_downloads(server: str, *hashes: str) -> tuple[Download, ...]:
    return tuple(
        Download(f"{server}{name}.gz", md5) for name, md5 in zip(_MNIST_FILES, hashes, strict=True)
    )


_CIFAR = Source(
    folder="cifar-100",
    files=("train.bin", "test.bin"),
    gzipped=False,
    subfolders=("cifar-100-binary", ""),
    downloads=(
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            {
                f"cifar-100-binary/{name}": f"cifar-100-binary/{name}"
                for name in ("train.bin", "test.bin")
            },
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
    "cifar-100-c": Source(
        folder="cifar-100-c",
        files=_CORRUPTED_FILES,
        gzipped=False,
        subfolders=("", "CIFAR-100-C"),
        aliases=("CIFAR-100-C",),
        downloads=(
            Download(
                "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar",
                "11f0ed0f1191edbf9fa23466ae6021d3",
                {f"CIFAR-100-C/{name}": name for name in _CORRUPTED_FILES},
            ),
        ),
        made=True,
    ),
}
