"""Tests of Slurm without one: what this process learned of an earlier test's commands does not count."""

from __future__ import annotations

import pytest

from so_tui.launch.slurm import client


@pytest.fixture(autouse=True)
def _unknown_version() -> None:
    client.version.cache_clear()
