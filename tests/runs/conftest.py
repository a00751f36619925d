"""Fixtures for tests of the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.runs import RunDirectory, create_run
from so_tui.spec.run_spec import DataSpec, ModelSpec, RunSpec


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes that readers make go with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


@pytest.fixture
def spec() -> RunSpec:
    return RunSpec(name="tiny", model=ModelSpec(id="some/model"), data=DataSpec(source="rows.json"))


@pytest.fixture
def run(spec: RunSpec) -> RunDirectory:
    return create_run(spec)
