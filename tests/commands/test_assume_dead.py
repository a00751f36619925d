"""Stopping and resuming runs whose host cannot be asked."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from so_tui.cli import _call
from so_tui.commands.parser import build_parser
from so_tui.launch import lifecycle
from so_tui.runs import RunDirectory, create_run, read_state, write_state
from so_tui.runs.lock import ended_state
from so_tui.spec import DataSpec, ModelSpec, RunSpec
from tests.support.commands import problems_of


@pytest.fixture
def elsewhere() -> RunDirectory:
    """Return a run that trained on another host a moment ago."""
    run = create_run(
        RunSpec(name="tiny", model=ModelSpec(id="some/model"), data=DataSpec(source="rows.json"))
    )
    write_state(
        run,
        replace(read_state(run), state="training", attempt=1, host="elsewhere", boot_id="another"),
    )
    return run


def test_stop_waits_and_says_it_cannot_know(
    elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifecycle, "_AFTER_KILL_S", 0.5)
    assert problems_of("stop", elsewhere.name, "--grace", "0") == [
        ("run-may-be-live", "run", elsewhere.name)
    ]
    assert "elsewhere" in capsys.readouterr().out
    assert (elsewhere.control_dir / "stop").exists()
    assert read_state(elsewhere).state == "training"


def test_silent_host_is_gone(elsewhere: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.runs.liveness.STALE_S", 0.3)
    assert _call(build_parser().parse_args(["stop", elsewhere.name])) == 1
    assert read_state(elsewhere).state == "lost"
    assert ended_state(elsewhere).state == "lost"


def test_stop_records_the_end_by_the_users_word(elsewhere: RunDirectory) -> None:
    assert _call(build_parser().parse_args(["stop", elsewhere.name, "--assume-dead"])) == 0
    assert read_state(elsewhere).state == "lost"


def test_resume_needs_the_users_word(elsewhere: RunDirectory) -> None:
    assert problems_of("resume", elsewhere.name, "--detach") == [
        ("run-may-be-live", "run", elsewhere.name)
    ]
