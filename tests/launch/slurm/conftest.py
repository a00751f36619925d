"""Tests of Slurm without one: what this process learned of an earlier test's commands does not count."""

from __future__ import annotations

import pytest

from so_tui.launch.executors.slurm import commands


@pytest.fixture(autouse=True)
def _unknown_version() -> None:
    commands.version.cache_clear()
