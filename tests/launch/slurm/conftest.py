"""A Slurm that tests make of functions and shell scripts; tests/slurm has the real one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from so_tui.launch.slurm import client

Install = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Slurm's answers in a file of the test's own."""
    monkeypatch.setattr(client, "cache_home", lambda: tmp_path / "cache")


@pytest.fixture
def _cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the cluster ``here``; it has no accounting."""
    monkeypatch.setattr(client, "cluster_name", lambda: "here")
    monkeypatch.setattr(client, "accounted", lambda _: None)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a command of Slurm of the lines that a shell executes."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def installed(name: str, lines: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o700)

    return installed
