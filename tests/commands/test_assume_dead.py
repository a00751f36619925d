"""Stopping and resuming runs whose host cannot be asked."""

from __future__ import annotations

import pytest

from so_tui.launch import lifecycle
from so_tui.runs import RunDirectory, create_run, read_state
from so_tui.runs.lock import ended_state
from so_tui.spec import find_preset
from tests.support.commands import Call, problems_of
from tests.support.records import change_state


@pytest.fixture
def elsewhere() -> RunDirectory:
    """Return a run that trained on another host a moment ago."""
    run = create_run(find_preset("tiny").spec)
    change_state(run, state="training", attempt=1, host="elsewhere", boot_id="another")
    return run


def test_stop_waits_and_says_it_cannot_know(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifecycle, "_AFTER_KILL_S", 0.5)
    told = [("run-may-be-live", "run", elsewhere.name)]
    assert problems_of("stop", elsewhere.name, "--grace", "0") == told
    assert "elsewhere" in capsys.readouterr().out
    assert (elsewhere.control_dir / "stop").exists()
    assert read_state(elsewhere).state == "training"
    assert problems_of("resume", elsewhere.name, "--detach") == told


def test_silent_host_is_gone(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr("so_tui.runs.liveness.STALE_S", 0.3)
    assert call("stop", elsewhere.name).code == 1
    assert read_state(elsewhere).state == ended_state(elsewhere).state == "lost"


def test_stop_records_the_end_by_the_users_word(elsewhere: RunDirectory, call: Call) -> None:
    assert call("stop --assume-dead", elsewhere.name).code == 0
    assert read_state(elsewhere).state == "lost"
