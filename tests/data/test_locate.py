"""The search path, what is said of missing files, and downloads from a server on this computer."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import struct
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedhb import data
from fedhb.data import locate
from fedhb.data.locate import Download
from fedhb.errors import InputError

MNIST = locate.SOURCES["mnist"].files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder and search path for every test."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(locate, "cache_folder", lambda: folder)
    monkeypatch.delenv("FEDHB_DATA", raising=False)
    return folder


def touch(folder: Path, names=tuple(f"{name}.gz" for name in MNIST)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def idx(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


def mnist_files(test: str = "t10k", prefix: str = "") -> dict[str, bytes]:
    x, y = np.ones((4, 28, 28)), np.arange(4)
    return {
        f"{prefix}{split}-{what}.gz": idx(array)
        for split in ("train", test)
        for what, array in (("images-idx3-ubyte", x), ("labels-idx1-ubyte", y))
    }


def test_the_cache_folder_is_the_platforms(monkeypatch):
    monkeypatch.undo()
    import pooch

    assert locate.cache_folder() == Path(pooch.os_cache("fedhb"))


def test_roots_are_the_variable_then_the_cache(tmp_path, monkeypatch, cache):
    assert locate.roots() == [cache]
    monkeypatch.setenv(
        "FEDHB_DATA",
        os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b"), str(tmp_path / "a")]),
    )
    assert locate.roots() == [tmp_path / "a", tmp_path / "b", cache]
    monkeypatch.setenv("FEDHB_DATA", "~/somewhere")
    assert locate.roots()[0] == Path.home() / "somewhere"


def test_the_first_root_with_all_files_wins(tmp_path, monkeypatch, cache):
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("FEDHB_DATA", os.pathsep.join([str(first), str(second)]))
    touch(cache / "mnist")
    assert locate.locate("mnist").folder == cache / "mnist"
    touch(second)
    assert locate.locate("mnist").folder == second
    touch(second / "mnist")
    assert locate.locate("mnist").folder == second / "mnist"
    touch(first, [f"{MNIST[0]}.gz"])
    assert locate.locate("mnist").folder == second / "mnist"
    touch(first / "mnist")
    assert locate.locate("mnist").folder == first / "mnist"


def test_a_given_root_is_the_only_one(tmp_path, cache):
    touch(cache / "mnist")
    assert locate.locate("mnist", tmp_path / "elsewhere").folder is None


def test_files_may_be_packed_or_not(tmp_path):
    names = (MNIST[0], f"{MNIST[1]}.gz", MNIST[2], f"{MNIST[3]}.gz")
    folder = touch(tmp_path / "mnist", names)
    assert locate.find("mnist", tmp_path) == tuple(folder / name for name in names)


def test_the_folder_of_the_official_emnist_archive_is_found(tmp_path):
    names = tuple(f"{name}.gz" for name in locate.SOURCES["emnist"].files)
    folder = touch(tmp_path / "emnist" / "gzip", names)
    assert locate.find("emnist", tmp_path)[0].parent == folder


def test_a_root_that_is_another_data_sets_folder_is_left_out(tmp_path, monkeypatch):
    mnist, fashion = touch(tmp_path / "mnist"), touch(tmp_path / "fashion-mnist")
    monkeypatch.setenv("FEDHB_DATA", os.pathsep.join([str(mnist), str(fashion)]))
    assert locate.locate("mnist").folder == mnist
    assert locate.locate("fashion-mnist").folder == fashion


def test_missing_files_are_named_with_folders_and_remedy(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("FEDHB_DATA", str(tmp_path / "typo"))
    touch(cache / "mnist", [f"{name}.gz" for name in MNIST[:3]])
    with pytest.raises(InputError) as caught:
        data.load("mnist")
    message = str(caught.value)
    assert f"missing {MNIST[3]}.gz;" in message  # and only that one
    assert f"\n  {tmp_path / 'typo'} (no such folder)\n  {cache / 'mnist'}\n  {cache}\n" in message
    assert (
        "fedhb data get mnist" in message
        and "FEDHB_DATA" in message
        and f"in {cache / 'mnist'}" in message
    )


def test_status(cache):
    touch(cache / "mnist")
    records = {record.name: record for record in data.status()}
    assert tuple(records) == data.NAMES
    assert records["digits"].present and records["mnist"].present
    assert records["mnist"].where == str(cache / "mnist") and records["mnist"].missing == ()
    assert not records["cifar-100"].present and records["cifar-100"].missing == (
        "train.bin",
        "test.bin",
    )
    assert "fedhb data get cifar-100" in records["cifar-100"].remedy


@pytest.fixture
def server(monkeypatch):
    """Serves the bytes in `.pages` by path; `.asked` lists the paths that were asked for."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = here.pages.get(self.path)
            here.asked.append(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header(
                "Content-Encoding", "gzip"
            )  # some servers declare a .gz so; it must stay packed
            self.end_headers()
            self.wfile.write((content or b"")[: here.cut_at])

        def log_message(self, *_):
            pass

    here = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here.pages, here.asked, here.cut_at = {}, [], None
    here.url = f"http://127.0.0.1:{here.server_port}"
    thread = threading.Thread(target=here.serve_forever, args=(0.01,))
    thread.start()
    yield here
    here.shutdown()
    here.server_close()
    thread.join()


def offer(
    monkeypatch, server, name: str, pages: dict[str, bytes], members=None, wrong: str = ""
) -> None:
    """Let a data set come from the server; the hash of the page `wrong` is not the published one."""
    downloads = []
    for page, content in pages.items():
        server.pages[f"/{page}"] = content
        md5 = "0" * 32 if page == wrong else hashlib.md5(content).hexdigest()
        downloads.append(Download(f"{server.url}/{page}", md5, members or {}))
    source = locate.SOURCES[name]
    fields = {**source.__dict__, "downloads": tuple(downloads)}
    monkeypatch.setitem(locate.SOURCES, name, type(source)(**fields))


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_download_of_plain_files(monkeypatch, server, cache, capfd):
    offer(monkeypatch, server, "mnist", mnist_files())
    assert len(data.load("mnist", download=True).train) == 4
    assert everything(cache) == sorted(["mnist", *(f"mnist/{name}.gz" for name in MNIST)])
    assert len(server.asked) == 4
    data.load("mnist", download=True)  # all there: nothing is asked for
    assert len(server.asked) == 4
    assert re.search(
        rf"{MNIST[0]}.gz .* (\d+)/\1 bytes", capfd.readouterr().err
    )  # progress was shown, up to the end


def test_a_second_try_gets_only_what_is_missing(monkeypatch, server, cache):
    pages = mnist_files()
    offer(monkeypatch, server, "mnist", pages, wrong=f"{MNIST[2]}.gz")
    with pytest.raises(InputError, match="hash"):
        data.load("mnist", download=True)
    assert everything(cache) == sorted(["mnist", *(f"mnist/{name}.gz" for name in MNIST[:2])])
    server.asked.clear()
    offer(monkeypatch, server, "mnist", pages)
    data.load("mnist", download=True)
    assert server.asked == [f"/{name}.gz" for name in MNIST[2:]]


def test_a_local_copy_is_not_replaced(monkeypatch, server, cache, tmp_path):
    offer(monkeypatch, server, "mnist", mnist_files())
    folder = touch(tmp_path / "mine" / "mnist", ())
    for name, content in mnist_files().items():
        (folder / name).write_bytes(
            gzip.compress(gzip.decompress(content), 1)
        )  # recompressed: another hash
    monkeypatch.setenv("FEDHB_DATA", str(tmp_path / "mine"))
    assert len(data.load("mnist", download=True).train) == 4
    assert server.asked == [] and not cache.exists()


def test_download_goes_to_a_given_root(monkeypatch, server, cache, tmp_path):
    offer(monkeypatch, server, "mnist", mnist_files())
    data.load("mnist", tmp_path / "mine", download=True)
    assert (tmp_path / "mine" / "mnist" / f"{MNIST[0]}.gz").is_file() and not cache.exists()


def zipped(members: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return buffer.getvalue()


RECORD = bytes(3074)


CIFAR = {"cifar-100-binary/train.bin": RECORD * 3, "cifar-100-binary/test.bin": RECORD * 2}


CIFAR_MEMBERS = locate.SOURCES["cifar-100"].downloads[0].members


EMNIST_MEMBERS = locate.SOURCES["emnist"].downloads[0].members


def test_only_the_wanted_members_of_a_zip_are_unpacked(monkeypatch, server, cache, tmp_path):
    members = {
        f"gzip/{name}": content for name, content in mnist_files("test", "emnist-bymerge-").items()
    }
    archive = zipped(
        {**members, "../../escaped": b"!", "gzip/emnist-letters-train-images-idx3-ubyte.gz": b"?"}
    )
    offer(monkeypatch, server, "emnist", {"gzip.zip": archive}, EMNIST_MEMBERS)
    assert len(data.load("emnist", download=True).test) == 4
    assert everything(cache) == sorted(["emnist", *(f"emnist/{name[5:]}" for name in members)])
    assert everything(tmp_path) == sorted(
        ["cache", *(f"cache/{name}" for name in everything(cache))]
    )


def test_only_the_wanted_members_of_a_tar_are_unpacked(monkeypatch, server, cache, tmp_path):
    archive = tarred(
        {**CIFAR, "../../escaped": b"!", "cifar-100-binary/fine_label_names.txt": b"?"}
    )
    offer(monkeypatch, server, "cifar-100", {"cifar.tar.gz": archive}, CIFAR_MEMBERS)
    assert len(data.load("cifar-100", download=True).train) == 3
    assert everything(cache / "cifar-100") == ["cifar-100-binary", *sorted(CIFAR)]
    assert everything(tmp_path)[0] == "cache" and not list(tmp_path.parent.glob("escaped"))
    assert data.load("cifar-100-coarse").num_classes == 20  # the same files serve both


BAD_ARCHIVES = {
    "a member is missing": tarred({"cifar-100-binary/train.bin": RECORD}),
    "a member is a link": tarred(
        {"cifar-100-binary/train.bin": RECORD}, {"cifar-100-binary/test.bin": "train.bin"}
    ),
    "cut off": tarred({name: os.urandom(6148) for name in CIFAR})[:-3000],
    "no archive at all": b"<html>moved</html>",
}


@pytest.mark.parametrize("how", BAD_ARCHIVES)
def test_a_bad_archive_leaves_nothing_behind(monkeypatch, server, tmp_path, how):
    offer(monkeypatch, server, "cifar-100", {"cifar.tar.gz": BAD_ARCHIVES[how]}, CIFAR_MEMBERS)
    with pytest.raises(InputError, match="failed"):
        data.load("cifar-100", download=True)
    assert everything(tmp_path) == []


@pytest.mark.parametrize("name", ["mnist", "cifar-100"])
@pytest.mark.parametrize("how", ["hash", "absent", "cut", "refused"])
def test_a_failed_download_leaves_nothing_behind(monkeypatch, server, tmp_path, name, how):
    page, content = (
        (f"{MNIST[0]}.gz", mnist_files()[f"{MNIST[0]}.gz"])
        if name == "mnist"
        else ("c.tar.gz", tarred(CIFAR))
    )
    members = {} if name == "mnist" else CIFAR_MEMBERS
    offer(monkeypatch, server, name, {page: content}, members, wrong=page if how == "hash" else "")
    if how == "absent":
        server.pages.clear()
    if how == "cut":
        server.cut_at = len(content) // 2
    if how == "refused":
        item = locate.SOURCES[name].downloads[0]
        fields = {
            **locate.SOURCES[name].__dict__,
            "downloads": (Download("http://127.0.0.1:9/x.gz", item.md5, members),),
        }
        monkeypatch.setitem(locate.SOURCES, name, locate.Source(**fields))
    with pytest.raises(InputError) as caught:
        data.load(name, download=True)
    message = str(caught.value)
    assert (
        locate.SOURCES[name].downloads[0].url in message
        and "Try again" in message
        and "FEDHB_DATA" in message
    )
    assert {"hash": "hash", "absent": "404", "cut": "", "refused": "127.0.0.1"}[how] in message
    assert everything(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(monkeypatch, server, tmp_path):
    offer(monkeypatch, server, "mnist", mnist_files())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="failed"):
        data.load("mnist", tmp_path / "file", download=True)
