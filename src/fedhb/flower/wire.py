"""Between fedhb's arrays and Flower's records. Arrays travel as .npy bytes; nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord

from fedhb.algorithms import Arrays


def to_record(arrays: Arrays) -> ArrayRecord:
    """Arrays as a record."""
    return ArrayRecord(
        {key: Array(value.detach().cpu().contiguous().numpy()) for key, value in arrays.items()}
    )


def to_arrays(record: ArrayRecord, device: str = "cpu") -> Arrays:
    """A record as arrays; ValueError where it holds something else."""
    try:
        return {
            key: torch.from_numpy(array.numpy().copy()).to(device) for key, array in record.items()
        }
    except (TypeError, ValueError, EOFError, OSError, SyntaxError, MemoryError) as error:
        raise ValueError(f"arrays that cannot be read ({type(error).__name__})") from None


def to_config(values: dict[str, Any]) -> ConfigRecord:
    """Small values as a record; what is no number or text goes as JSON."""
    return ConfigRecord(
        {
            key: v if isinstance(v, (bool, int, float, str)) else json.dumps(v)
            for key, v in values.items()
        }
    )
