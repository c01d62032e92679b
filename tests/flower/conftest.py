"""A folder that `fedhb deploy init` has made, as a fixture."""

from __future__ import annotations

import pytest
from deploying import deploy


@pytest.fixture
def folder(tmp_path):
    deploy(
        "init",
        tmp_path / "fed",
        "--nodes",
        2,
        "--host",
        "server.example.org",
        "--host",
        "192.0.2.7",
        "--rounds",
        4,
    )
    return tmp_path / "fed"
