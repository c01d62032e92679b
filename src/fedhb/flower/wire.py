"""Turns fedhb's arrays into Flower's records and back.

Arrays travel as .npy bytes; nothing is ever unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord

from fedhb.algorithms import Arrays


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as a record."""
    return ArrayRecord(
        {key: Array(value.detach().cpu().contiguous().numpy()) for key, value in arrays.items()}
    )


def to_arrays(record: ArrayRecord, device: str = "cpu") -> Arrays:
    """Return a record as arrays; raise ValueError where it holds something else."""
    try:
        return {
            key: torch.from_numpy(array.numpy().copy()).to(device) for key, array in record.items()
        }
    except (TypeError, ValueError, EOFError, OSError, SyntaxError, MemoryError) as error:
        raise ValueError(f"arrays that cannot be read ({type(error).__name__})") from None


def to_config(values: dict[str, Any]) -> ConfigRecord:
    """Return small values as a record; a value that is no number or text becomes JSON."""
    return ConfigRecord(
        {
            key: v if isinstance(v, (bool, int, float, str)) else json.dumps(v)
            for key, v in values.items()
        }
    )
