"""The way to a run's first step, as a timeline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from so_tui.runs import read_state, write_state
from so_tui.runs.records import PhaseRecord
from so_tui.ui.run_status import CHECKS, FIRST_STEP, LAUNCHER, _stages, timeline_lines
from tests.support.make_run import write_run
from tests.support.screen import opened


def phase(
    at: float, detail: str, kind: Literal["loading", "training"] = "loading", attempt: int = 2
) -> PhaseRecord:
    return PhaseRecord(attempt=attempt, time=at, phase=kind, detail=detail)


def test_stages_are_those_of_the_attempt_and_the_last_one_runs() -> None:
    phases = [
        phase(50, "of the attempt before", attempt=1),
        phase(103, "starting the ranks"),
        phase(110, "loading Phi-4"),
        phase(150, "", "training"),
    ]
    found = _stages(phases, 2, 100.0, None)
    assert [(stage.name, stage.since) for stage in found] == [
        (LAUNCHER, 100.0),
        ("starting the ranks", 103.0),
        ("loading Phi-4", 110.0),
        (FIRST_STEP, 150.0),
    ]
    signs = [line[0] for line in timeline_lines(found, 160.0, 80).plain.splitlines()]
    assert signs == ["✓", "✓", "✓", "▸"]
    behind = _stages([phase(90, "a clock that is behind")], 2, 100.0, None)
    assert "-" not in timeline_lines(behind, 95.0, 80).plain


def test_stages_have_one_row_each_after_the_checks() -> None:
    def loading(at: float, stage: str, done: int = 0, total: int = 0) -> PhaseRecord:
        return PhaseRecord(
            attempt=2,
            time=at,
            phase="loading",
            detail=f"doing {stage}",
            stage=stage,
            done=done,
            total=total,
        )

    begun = [
        loading(103, "ranks"),
        loading(105, "data"),
        loading(106, "data"),
        loading(110, "weights"),
    ]
    counted = [loading(110 + done, "weights", done, 8) for done in range(4)]
    found = _stages([*begun, *counted], 2, 100.0, checks_s=7.5)
    assert [(stage.name, stage.since) for stage in found] == [
        (CHECKS, 92.5),
        (LAUNCHER, 100.0),
        ("ranks", 103.0),
        ("data", 105.0),
        ("weights 3 of 8", 110.0),
    ]
    lines = timeline_lines(found, 120.0, 80).plain
    assert "doing weights" in lines
    assert "doing data" not in lines, "only what runs says what it does"
    last = _stages(
        [
            *begun,
            *counted,
            loading(130, "optimizer"),
            loading(131, "checkpoint"),
            phase(140, "", "training"),
        ],
        2,
        100.0,
        None,
    )
    assert [stage.name for stage in last][3:] == [
        "weights 3 of 8",
        "optimizer",
        "saved states",
        FIRST_STEP,
    ]


def test_the_lines_fit_and_their_bars_follow_each_other() -> None:
    phases = [phase(110, "x" * 200), phase(130, "loading")]
    for width in (40, 80, 160):
        lines = timeline_lines(_stages(phases, 2, 100.0, None), 200.0, width).plain.splitlines()
        assert all(len(line) <= width for line in lines)
    starts = [line.index("━") for line in lines]
    assert starts == sorted(starts)
    assert lines[-1].startswith("▸ loading")
    assert "1 m 10 s" in lines[-1]
    many = [phase(100 + number, f"stage {number}") for number in range(40)]
    assert "stage 39" in timeline_lines(_stages(many, 2, 100.0, None), 200.0, 80).plain


async def test_a_resumed_run_has_a_timeline_too(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=5, state="loading")
    state = read_state(run)
    write_state(run, replace(state, attempt=2, attempt_started=time.time() - 9, checks_s=4.0))
    async with opened(runs_dir, (80, 24), open_run=run, shows="loading") as ui:
        await ui.until(lambda: "▸ launcher" in ui.text())
        assert "✓ checks" in ui.text()
