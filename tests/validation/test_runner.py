"""Measurements are run in order, within the time, and the report is written after each and
continued later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace as outcome_of

from so_tui.machine.types import Software
from so_tui.spec import SoTuiError
from so_tui.validation import report as reports
from so_tui.validation import validate
from so_tui.validation.report import MachineFound, Report
from so_tui.validation.validate import _Measurement, _measurement, _run_parts
from tests.support.problems import rejected

FOUND = MachineFound(
    cpu="Neoverse-V2",
    architecture="aarch64",
    page_size_bytes=65536,
    cores=72,
    nodes=(),
    gpus=(),
    software=Software(),
    findings=(),
)
EMPTY = Report(
    so_tui="1",
    begun="2026-11-25T00:00:00+00:00",
    host="alps",
    gpus=1,
    shape="tiny, 6 layers",
    outcomes=(),
)


class Parts:
    """Makes parts of a report, and notes which were measured and within what limit."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.limits: dict[str, float] = {}

    def __call__(
        self, key: str, estimate_s: float, error: BaseException | None = None, takes_s: float = 0.0
    ) -> _Measurement:
        def measure(_tell: Callable[[str], None], limit_s: float) -> MachineFound:
            self.done.append(key)
            self.limits[key] = limit_s
            time.sleep(min(takes_s, limit_s))
            if error is not None:
                raise error
            return FOUND

        return _measurement(key, f"part {key}", estimate_s, measure)


def run_parts(parts: list[_Measurement], seconds: float = 60.0, before: Report = EMPTY) -> Report:
    return _run_parts(before, parts, seconds, lambda _: None, lambda *_: None)


def states(report: Report) -> list[str]:
    return [outcome.state for outcome in report.outcomes]


def test_what_fits_is_measured_and_written_after_each(tmp_path: Path) -> None:
    part, written, told = Parts(), list[list[str]](), list[float]()

    def write(found: Report) -> None:
        reports.write(tmp_path, found)
        written.append(states(found))

    parts = [part("a", 1.0), part("b", 1000.0), part("c", 1.0)]
    found = _run_parts(EMPTY, parts, 60.0, write, lambda text, share: told.append(share))
    assert part.done == ["a", "c"]
    assert written[:2] == [["pending"] * 3, ["measured", "pending", "pending"]]
    assert written[-1] == ["measured", "left-out", "measured"]
    assert "1,000 s" in found.outcomes[1].reason
    assert reports.read(tmp_path) == found
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_the_next_run_measures_what_was_not_measured() -> None:
    """What failed or was left out, and nothing else."""
    part, again = Parts(), Parts()
    first = run_parts([part("a", 1), part("b", 1, SoTuiError("no")), part("c", 99)], 50.0)
    assert states(first) == ["measured", "failed", "left-out"]
    assert first.outcomes[1].reason == "no"
    parts = [again("a", 1), again("b", 1), again("c", 99), again("d", 1)]
    assert states(run_parts(parts, 200.0, first)) == ["measured"] * 4
    assert again.done == ["b", "c", "d"]


def test_a_stopped_run_keeps_what_it_measured(tmp_path: Path) -> None:
    part = Parts()
    parts = [part("a", 1), part("b", 1, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        _run_parts(EMPTY, parts, 60.0, partial(reports.write, tmp_path), lambda *_: None)
    kept = reports.read(tmp_path)
    assert kept is not None
    assert states(kept) == ["measured", "pending"]


@pytest.mark.parametrize("error", [SoTuiError("no"), OSError("no"), KeyError("no")])
def test_what_fails_a_part_is_only_its_own_failure(error: Exception) -> None:
    part = Parts()
    found = run_parts([part("a", 1, error), part("b", 1)])
    assert states(found) == ["failed", "measured"]
    assert "no" in found.outcomes[0].reason


def test_a_part_that_hangs_is_given_up_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one follows."""
    monkeypatch.setattr(validate, "OVERRUN_S", 0.1)
    part = Parts()
    hung = part("a", 0.05, SoTuiError("was ended"), takes_s=60.0)
    assert states(run_parts([hung, part("b", 0.1)])) == ["timed-out", "measured"]
    run_parts([part("c", 30.0)])
    assert part.limits["a"] == pytest.approx(0.25)
    assert 30.1 < part.limits["c"] <= 60.1, "not for long after the time of all parts"


@pytest.mark.parametrize("content", ["{", '{"schema": 1}', "\x00"])
def test_a_folder_with_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / reports.FILE).write_text(content)
    with rejected("not-a-report"):
        reports.read(tmp_path)


def test_what_fits_is_judged_by_how_long_earlier_parts_took() -> None:
    part = Parts()
    found = run_parts([part("a", 100.0), part("b", 70.0), part("c", 100.0)], 120.0)
    assert part.done == ["a", "b", "c"]  # each took no time, so that 100 s fit again
    slow = [outcome_of(outcome, seconds=3 * outcome.estimate_s) for outcome in found.outcomes[:2]]
    assert validate._pace(slow) == 3.0
    assert validate._pace([outcome_of(slow[0], state="failed")]) == 1.0
    assert validate._pace([outcome_of(slow[0], estimate_s=1.0)]) == 1.0
    late = [part("slow", 0.1, takes_s=0.3), part("d", 59.8)]
    assert states(run_parts(late)) == ["measured", "left-out"]
