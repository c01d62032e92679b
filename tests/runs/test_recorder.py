"""The records that a run keeps on disk while it goes."""

from __future__ import annotations

from typing import Any
import pytest
import torch
from fedhb.errors import InputError
from fitted import fit
import fedhb


def test_a_round_says_what_json_cannot_hold(tmp_path):
    class Adds(fedhb.Callback):
        def on_round(self, record: dict[str, Any], state: Any) -> None:
            record["norm"] = torch.ones(1)

    with pytest.raises(
        InputError, match="'norm'.*Tensor.*JSON"
    ):
        fit(out=tmp_path / "run", callbacks=[Adds()])
