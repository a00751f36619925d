"""Measurements are run in order, within the time, and the report is written after each and
continued later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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


def part(
    key: str,
    estimate_s: float,
    done: list[str],
    fails: Callable[[], BaseException | None] = lambda: None,
    limits: list[float] | None = None,
) -> _Measurement:
    def measure(_tell: Callable[[str], None], limit_s: float) -> MachineFound:
        done.append(key)
        if limits is not None:
            limits.append(limit_s)
        if (error := fails()) is not None:
            raise error
        return FOUND

    return _measurement(key, f"part {key}", estimate_s, measure)


def test_what_fits_is_measured_and_written_after_each(tmp_path: Path) -> None:
    done: list[str] = []
    written: list[list[str]] = []
    told: list[tuple[str, float]] = []

    def write(found: Report) -> None:
        reports.write(tmp_path, found)
        written.append([outcome.state for outcome in found.outcomes])

    parts = [part("a", 1.0, done), part("b", 1000.0, done), part("c", 1.0, done)]
    found = _run_parts(EMPTY, parts, 60.0, write, lambda text, share: told.append((text, share)))
    assert done == ["a", "c"]
    assert written[0] == ["pending"] * 3
    assert written[1] == ["measured", "pending", "pending"]
    assert written[-1] == ["measured", "left-out", "measured"]
    assert "1,000 s" in found.outcomes[1].reason
    assert reports.read(tmp_path) == found
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def run_parts(parts: list[_Measurement], seconds: float = 60.0, before: Report = EMPTY) -> Report:
    return _run_parts(before, parts, seconds, lambda _: None, lambda *_: None)


def states(report: Report) -> list[str]:
    return [outcome.state for outcome in report.outcomes]


def test_the_next_run_measures_what_was_not_measured() -> None:
    """What failed or was left out, and nothing else."""
    done: list[str] = []
    failing = part("b", 1, done, lambda: SoTuiError("no"))
    first = run_parts([part("a", 1, done), failing, part("c", 99, done)], 50.0)
    assert states(first) == ["measured", "failed", "left-out"]
    assert first.outcomes[1].reason == "no"
    done.clear()
    parts = [part("a", 1, done), part("b", 1, done), part("c", 99, done), part("d", 1, done)]
    second = run_parts(parts, 200.0, first)
    assert done == ["b", "c", "d"]
    assert states(second) == ["measured"] * 4


def test_a_stopped_run_keeps_what_it_measured(tmp_path: Path) -> None:
    done: list[str] = []
    parts = [part("a", 1, done), part("b", 1, done, lambda: KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt):
        _run_parts(
            EMPTY, parts, 60.0, lambda found: reports.write(tmp_path, found), lambda *_: None
        )
    kept = reports.read(tmp_path)
    assert kept is not None
    assert states(kept) == ["measured", "pending"]


@pytest.mark.parametrize(
    "error", [SoTuiError("no"), OSError("no"), ValueError("no"), KeyError("no")]
)
def test_what_fails_a_part_is_only_its_own_failure(error: Exception) -> None:
    done: list[str] = []
    found = run_parts([part("a", 1, done, lambda: error), part("b", 1, done)])
    assert states(found) == ["failed", "measured"]
    assert "no" in found.outcomes[0].reason


def test_a_part_that_hangs_is_given_up_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one follows."""
    limits: list[float] = []

    def hang(_tell: Callable[[str], None], limit_s: float) -> MachineFound:
        limits.append(limit_s)
        threading.Event().wait(limit_s)
        raise SoTuiError("was ended")

    monkeypatch.setattr(validate, "OVERRUN_S", 0.1)
    done: list[str] = []
    found = run_parts([_measurement("a", "a", 0.05, hang), part("b", 0.1, done)])
    assert limits == [pytest.approx(0.25)]
    assert states(found) == ["timed-out", "measured"]
    run_parts([part("c", 30.0, done, limits=limits)])
    assert 30.1 < limits[1] <= 60.1, "no part goes on for long after the time of all parts"


@pytest.mark.parametrize("content", ["{", '{"schema": 1}', "[]", "\x00"])
def test_a_folder_with_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / reports.FILE).write_text(content)
    with rejected("not-a-report"):
        reports.read(tmp_path)


def test_what_fits_is_judged_by_how_long_earlier_parts_took() -> None:
    done: list[str] = []
    quick = [part("a", 100.0, done), part("b", 70.0, done), part("c", 100.0, done)]
    found = run_parts(quick, 120.0)
    assert done == ["a", "b", "c"]  # each took no time, so that 100 s fit again
    slow = [outcome_of(outcome, seconds=3 * outcome.estimate_s) for outcome in found.outcomes[:2]]
    assert validate._pace(slow) == 3.0
    assert validate._pace([outcome_of(slow[0], state="failed")]) == 1.0
    assert validate._pace([outcome_of(slow[0], estimate_s=1.0)]) == 1.0

    def slowly(_tell: Callable[[str], None], _limit_s: float) -> MachineFound:
        time.sleep(0.3)
        return FOUND

    late = [_measurement("slow", "slow", 0.1, slowly), part("d", 59.8, done)]
    assert states(run_parts(late)) == ["measured", "left-out"]
