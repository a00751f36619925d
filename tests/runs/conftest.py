"""Fixtures for tests of the run directory: a run, and records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from so_tui.runs import RunDirectory, create_run
from so_tui.runs.records import StepRecord
from so_tui.spec.run_spec import DataSpec, ModelSpec, RunSpec
from tests.support.records import step_record

SPEC = RunSpec(name="tiny", model=ModelSpec(id="some/model"), data=DataSpec(source="rows.json"))


@pytest.fixture
def spec() -> RunSpec:
    return SPEC


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes that readers make go with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


@pytest.fixture
def run() -> RunDirectory:
    return create_run(SPEC)


@pytest.fixture
def step() -> Callable[..., StepRecord]:
    return step_record
