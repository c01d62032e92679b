"""A small experiment of digits that the tests of this folder run."""

from __future__ import annotations

from pathlib import Path

COMMON = """
[common]
num_clients = 8
shards_per_client = 3
fraction = 0.5
rounds = 3
batch_size = 30
personal_epochs = 1
model = {hidden = 8}
"""

SETTINGS = f"""
title = "digits, small"
kind = "table"
seeds = [0, 1]
{COMMON}
[cells.one]
dataset = "digits"
[cells."two epochs"]
dataset = "digits"
local_epochs = 2
[variants]
niw = {{}}
"niw S=0" = {{algorithm = "niw", niw = {{num_samples = 0}}}}
fedavg = {{}}
"""

PRINTED = """cell,algorithm,task,metric,mean,std
one,niw,global,accuracy,97.80,0.12
one,fedavg,global,accuracy,97.16,
two epochs,niw,personalised,accuracy,98.00,1.50
"""


def write(
    folder: Path, settings: str = SETTINGS, name: str = "small", printed: str = PRINTED
) -> Path:
    """The folder of the experiments, with one in it."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "settings.toml").write_text(settings)
    if printed:
        (place / "printed.csv").write_text(printed)
    return folder
