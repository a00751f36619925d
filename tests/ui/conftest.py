"""The same terminal for every test, no waiting that nobody sees, and nothing worked out twice."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from so_tui.ui.form import GROUPS
from tests.support.screen import wait_for_what_runs
from tests.support.shared_work import share_work


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "SO_TUI_GLYPHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("COLORTERM", "truecolor")


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the form of most machines, whatever is installed here."""
    monkeypatch.setattr("so_tui.ui.preset_actions.has_slurm", lambda: False)


@pytest.fixture(autouse=True)
def _no_idle_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_what_runs(monkeypatch)
    monkeypatch.setattr("so_tui.ui.dashboard.screen.POLL_S", 0.1)


@pytest.fixture(autouse=True)
def _work_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share_work(monkeypatch)


@pytest.fixture
def _unhurried_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one poll read as much as it can: by the clock, a busy machine gets less far."""
    monkeypatch.setattr(
        "so_tui.runs.metrics.time", SimpleNamespace(sleep=time.sleep, monotonic=lambda: 0.0)
    )


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def _short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut Configure down to its first groups: mounting the others takes most of the time."""
    monkeypatch.setattr("so_tui.ui.configure.form.advanced_paths", tuple)
    monkeypatch.setattr("so_tui.ui.configure.form.GROUPS", GROUPS[:7])
