"""What the state says of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import RunState
from so_tui.runs.state import _overwrite, read_state, write_state


@pytest.mark.parametrize(
    ("times", "took_s"),
    [
        ({}, None),
        ({"started": 100.0, "attempt_started": 100.0}, None),
        ({"started": 100.0, "attempt_started": 100.0, "ended": 160.0}, 60.0),
        ({"started": 100.0, "attempt_started": 9000.0, "earlier_s": 60.0, "ended": 9030.0}, 90.0),
        ({"started": 100.0, "attempt_started": 100.0, "ended": 99.0}, 0.0),
        ({"started": 100.0, "ended": 160.0}, 60.0),  # as written before attempts were counted
    ],
)
def test_run_took_the_time_of_attempts(times: dict[str, float], took_s: float | None) -> None:
    assert RunState(name="r", state="finished", **times).took_s == took_s  # type: ignore[arg-type]


def test_overwritten_state_is_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_state(run, RunState(name="r", state="training", detail="x" * 200))
    for reason in ("full", "full" * 200):
        last = RunState(name="r", state="failed", reason=reason)
        _overwrite(run.state_path, msgspec.json.encode(last))
        assert read_state(run) == last
