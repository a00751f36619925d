"""The screen of a validation: a report, one that is still written, and none."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.folders import validation_dir
from so_tui.trust.decoding import read_json
from so_tui.ui.machine import validation
from so_tui.ui.machine.validation import _report_lines
from so_tui.validation import report as reports
from so_tui.validation.report import Outcome
from tests.support.screen import SIZES, opened
from tests.validation.test_report import REPORT, trained

LONG = "\x1b[31mtook longer than 165 s " * 9
OUTCOMES = (
    *REPORT.outcomes,
    trained("losses-gpu", (8.0, 7.0), 1.0, losses_only=True),
    trained("losses-2", (8.0, None), 1.0, losses_only=True),
    Outcome(key="hung", title="one that hung", estimate_s=9, state="timed-out", reason=LONG),
)
FULL = replace(REPORT, outcomes=OUTCOMES, agreement=reports._agreement_of(OUTCOMES))


@pytest.mark.parametrize("width", [40, 74, 114, 194])
def test_every_line_fits_and_every_failure_is_named(width: int) -> None:
    lines = _report_lines(FULL, width)
    assert max(line.cell_length for line in lines) <= width
    text = "\n".join(line.plain for line in lines)
    assert all(reason in text for reason in ("took too long", "no time left", "not finite"))
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [74, 114])
def test_parts_that_begin_alike_are_told_apart(width: int) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    report = read_json(results / "validate-h200.json", reports.Report)
    lines = [line.plain.split("  ")[0] for line in _report_lines(report, width)]
    training, losses = (
        next(at for at, line in enumerate(lines) if line.startswith(name))
        for name in ("training", "losses")
    )
    assert len({*lines[training + 1 : losses - 1]}) == 12
    assert len({*lines[losses + 1 :]}) == len(report.agreement)


async def test_a_report_that_is_read_slowly_is_shown(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes longer than the time after which it is read again, as on slow disks."""
    begun, ended = threading.Event(), threading.Event()
    calls = []

    def read(folder: Path) -> reports.Report | None:
        calls.append(folder)
        begun.set()
        ended.wait(60)
        return FULL

    monkeypatch.setattr(validation, "READ_EVERY_S", 0.01)
    monkeypatch.setattr(reports, "read", read)
    async with opened(runs_dir, (120, 36)) as ui:
        await ui.press("5", "e")
        await ui.until(begun.is_set)
        await asyncio.sleep(0.2)
        assert len(calls) == 1
        ended.set()
        await ui.until(lambda: "parts measured" in ui.shown("#report"))


@pytest.mark.parametrize("size", SIZES)
async def test_a_changed_report_is_read_again(runs_dir: Path, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as ui:
        await ui.press("5", "e")
        await ui.until(lambda: "no report yet" in ui.shown("#report-status"))
        reports.write(validation_dir(), FULL)
        await ui.until(lambda: "parts measured" in ui.shown("#report"))
        assert "s/step" in ui.text()
        (validation_dir() / reports.FILE).write_text("{")
        await ui.until(lambda: "is no report" in ui.shown("#report-status"))
        await ui.press("escape")
        assert ui.app.current_mode == "machine"
