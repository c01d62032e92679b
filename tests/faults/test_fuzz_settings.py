"""Settings and records from elsewhere: a result or an InputError."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import LIMIT, ROOM, changed, many, only_input_errors, peak

from fedhb.data import cifar, idx, table
from fedhb.errors import InputError
from fedhb.runs import checkpoint
from fedhb.runs.settings import Settings


@pytest.fixture(autouse=True)
def bounded(monkeypatch) -> Iterator[None]:
    """Peak memory over the whole test, from the kernel's own count."""
    for module, name in (
        (idx, "MAX_BYTES"),
        (cifar, "MAX_BYTES"),
        (table, "MAX_BYTES"),
        (checkpoint, "MOST_BYTES"),
    ):
        monkeypatch.setattr(module, name, LIMIT)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    yield
    grown = peak() - before
    assert grown < 8 * LIMIT + ROOM, f"{grown / 2**20:.0f} MiB"


TOML = b"""
# a comment
dataset = "digits"
algorithm = "niw"
rounds = 3
lr = 1e-2
fraction = 0.5
seed = 0x1F
schedule = 'step'
workers = 1_0
model = "mlp"
[niw]
kl_weight = 1e-4
begin = \"\"\"global\"\"\"
p_do = inf
[mixture]
sigma2 = [1.0, 2.0]
when = 1979-05-27T07:32:00Z
[fedavg]
deep = {a = {b = [1, {c = true}]}}
"""


PLAIN = b"""
dataset = "digits"
rounds = 3
lr = 1e-2
fraction = 0.5
schedule = 'step'
[niw]
begin = \"\"\"last\"\"\"
num_samples = 3
[fedprox]
mu = 0.5
"""


WORDS = [
    b"= 1",
    b"[niw]",
    b"[[niw]]",
    b"[" * 300,
    b"=" + b"[" * 5000,
    b"= " + b"9" * 5000,
    b"\r\n",
    b"= nan",
    b"= -1",
    b"= 1e400",
]
WORDS += [
    b"\xef\xbb\xbf",
    b"\x00",
    b'"""',
    b"= {}",
    b"= [1, 2]",
    b"model = 3",
    b"[model]\nname = 1",
    b"= 07:32:00",
    b"a.b.c = 1",
]


@many
def test_toml(path, rng):
    content = changed(rng.choice((TOML, PLAIN)), rng)
    for _ in range(rng.choice((0, 0, 1, 2))):
        place = rng.randrange(400)
        content = content[:place] + rng.choice(WORDS) + content[place:]
    path.write_bytes(content)
    found = only_input_errors(lambda: Settings.resolve(path, {}))
    if found is not None:
        path.write_text(found.to_toml({}), encoding="utf-8")
        assert repr(Settings.resolve(path, {})) == repr(
            found
        )  # what is written is read back, and NaN is NaN


def test_a_settings_file_has_a_bound(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_bytes(b"#" * 2**21)
    with pytest.raises(InputError, match="1048576 bytes"):
        Settings.resolve(path, {})


@many
def test_overrides(path, rng):
    text = "niw.p_do=" + "".join(
        rng.choice('[]{}="\n.#9-eainf_:T') for _ in range(rng.choice((3, 10, 5000)))
    )
    only_input_errors(lambda: Settings.resolve(None, {}, [text[rng.choice((0, 0, 0, 3, 5)) :]]))
