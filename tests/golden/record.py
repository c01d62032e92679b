"""Make the numbers of tests/golden anew, or compare two versions of the code to the last bit.

python tests/golden/record.py                    writes numbers.json for `make test`
python tests/golden/record.py --exact FILE.npz   writes every array whole, for `--compare`
python tests/golden/record.py --compare A.npz B.npz
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

ENTRIES = 6
"""Numbers that are kept of an array, beside its length."""


def digest(array: np.ndarray) -> list[float]:
    """A few numbers that tell two arrays apart: its size, its norm, and entries evenly spaced."""
    flat = array.astype(np.float64).reshape(-1)
    chosen = (
        flat[np.linspace(0, len(flat) - 1, min(ENTRIES, len(flat))).astype(int)]
        if len(flat)
        else flat
    )
    return [float(len(flat)), float(np.linalg.norm(flat)), *chosen.tolist()]


def recorded() -> dict[str, dict[str, list[float]]]:
    """Return the numbers of numbers.json."""
    found: dict[str, dict[str, list[float]]] = json.loads((HERE / "numbers.json").read_text())
    return found


def made() -> dict[str, dict[str, np.ndarray]]:
    """The arrays of every case."""
    from cases import cases

    torch.set_num_threads(1)
    found = {}
    for name, run in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(Path(folder))
        print(name, file=sys.stderr)
    return found


def differences(one: Path, other: Path) -> list[str]:
    """The arrays that are not the same to the last bit; those under names of their own are matched
    by what they hold.
    """
    a, b = np.load(one), np.load(other)
    found = []
    for case in sorted({key.split("|")[0] for key in (*a, *b)}):
        left, right = (
            {key: content[key] for key in content if key.split("|")[0] == case}
            for content in (a, b)
        )
        spare = [value for key, value in right.items() if key not in left]
        for key, value in left.items():
            twins = [right[key]] if key in right else spare
            if not any(
                value.tobytes() == twin.tobytes() and value.dtype == twin.dtype for twin in twins
            ):
                found.append(key)
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exact", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    given = parser.parse_args()
    if given.compare:
        found = differences(*given.compare)
        print("\n".join(found) or "the same to the last bit")
        return 1 if found else 0
    arrays = made()
    if given.exact:
        flat = {
            f"{case}|{key}": value for case, part in arrays.items() for key, value in part.items()
        }
        np.savez_compressed(given.exact, **flat)
        return 0
    rows = {
        case: {key: digest(value) for key, value in part.items()} for case, part in arrays.items()
    }
    lines = [f"{json.dumps(case)}: {json.dumps(part)}" for case, part in rows.items()]
    (HERE / "numbers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
