"""Where the time of a training part went."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from so_tui.runs.records import PhaseRecord
from so_tui.validation.show import _markdown
from so_tui.validation.validate import _phase_seconds
from tests.support.records import step_record
from tests.validation.test_report import REPORT


def loading(time: float, stage: str) -> PhaseRecord:
    return PhaseRecord(attempt=1, time=time, phase="loading", stage=stage)


RECORDS = (
    loading(5.0, "imports"),
    loading(8.0, "ranks"),
    loading(9.0, "data"),
    loading(9.5, "weights"),
    loading(10.0, "weights"),
    loading(12.0, "optimizer"),
    PhaseRecord(attempt=1, time=13.0, phase="training"),
    step_record(1, time=15.0),
    step_record(2, time=16.0),
    PhaseRecord(attempt=1, time=17.0, phase="training"),
    step_record(3, time=18.0),
    PhaseRecord(attempt=1, time=18.1, phase="saving"),
)
LENGTHS = {
    "preparation": 1,
    "launcher": 4,
    "imports": 3,
    "ranks": 1,
    "data": 0.5,
    "weights": 2.5,
    "optimizer": 1,
    "first_step": 2,
}


def test_every_second_from_planning_to_the_end_belongs_to_a_phase() -> None:
    found: dict[str, Any] = msgspec.structs.asdict(
        _phase_seconds(RECORDS, begun=0.0, started=1.0, ended=20.0, over=20.5)
    )
    assert found == pytest.approx(
        {f"{name}_s": seconds for name, seconds in LENGTHS.items()}
        | {"steps_s": 3, "end_s": 2, "cleaning_s": 0.5}
    )
    assert sum(found.values()) == pytest.approx(20.5)


def test_what_an_older_trainer_did_not_record_took_no_time() -> None:
    found = _phase_seconds(RECORDS[1:], begun=0.0, started=1.0, ended=20.0, over=20.0)
    assert (found.launcher_s, found.imports_s, found.ranks_s) == (7.0, 0.0, 1.0)


def test_a_run_without_a_step_has_only_a_start_and_an_end() -> None:
    found = _phase_seconds((), begun=0.0, started=1.0, ended=4.0, over=5.0)
    assert (found.launcher_s, found.first_step_s, found.steps_s, found.end_s, found.cleaning_s) == (
        3.0,
        0.0,
        0.0,
        0.0,
        1.0,
    )


def test_a_report_shows_them_in_one_row_a_part() -> None:
    phases = _phase_seconds(RECORDS, begun=0.0, started=1.0, ended=20.0, over=20.5)
    outcome = next(one for one in REPORT.outcomes if one.key == "gpu")
    assert outcome.result is not None
    report = REPORT.with_outcome(
        msgspec.structs.replace(
            outcome, result=msgspec.structs.replace(outcome.result, phases=phases)
        )
    )
    rows = [
        line
        for line in _markdown(report).partition("## Where the time went")[2].splitlines()
        if line.startswith("| <")
    ]
    cells = ["1.0", "4.0", "3.0", "1.0", "0.5", "2.5", "1.0", "2.0", "3.0", "2.0", "0.5", "20.5"]
    assert rows == [f"| {outcome.title} | {' | '.join(cells)} |"]
    assert "Where the time went" not in _markdown(REPORT)
