"""The way to a run's first step, as a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from so_tui.runs import MetricsWriter, read_state
from so_tui.runs.records import PhaseRecord
from so_tui.ui.start_timeline import FIRST_STEP, LAUNCH, stages, timeline_lines
from tests.support.make_run import write_run
from tests.support.screen import opened


def phase(at: float, detail: str, kind: Literal["loading", "training"] = "loading", attempt: int = 2) -> PhaseRecord:
    return PhaseRecord(attempt=attempt, time=at, phase=kind, detail=detail)


def test_stages_are_those_of_the_attempt_and_the_last_one_runs() -> None:
    phases = [
        phase(50, "of the attempt before", attempt=1),
        phase(103, "starting the ranks"),
        phase(110, "loading Phi-4"),
        phase(150, "", "training"),
    ]
    found = stages(phases, 2, 100.0, 160.0)
    assert [(stage.name, stage.seconds, stage.running) for stage in found] == [
        (LAUNCH, 3.0, False),
        ("starting the ranks", 7.0, False),
        ("loading Phi-4", 40.0, False),
        (FIRST_STEP, 10.0, True),
    ]
    assert stages([phase(90, "a clock that is behind")], 2, 100.0, 95.0)[0].seconds == 0.0


def test_the_lines_fit_and_their_bars_follow_each_other() -> None:
    phases = [phase(110, "x" * 200), phase(130, "loading")]
    for width in (40, 80, 160):
        lines = timeline_lines(stages(phases, 2, 100.0, 200.0), width).plain.splitlines()
        assert all(len(line) <= width for line in lines)
    starts = [line.index("━") for line in lines]
    assert starts == sorted(starts)
    assert lines[-1].startswith("▸ loading")
    assert "1 m 10 s" in lines[-1]
    many = [phase(100 + number, f"stage {number}") for number in range(40)]
    assert "stage 39" in timeline_lines(stages(many, 2, 100.0, 200.0), 80).plain


async def test_the_dashboard_shows_it_until_the_first_step(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=0, seconds_of_samples=5, state="loading")
    started = read_state(run).started or 0.0
    writer = MetricsWriter(run, 1)
    writer.append(PhaseRecord(attempt=1, time=started + 12, phase="loading", detail="preparing the optimizer"))
    writer.close()
    async with opened(runs_dir, (80, 24), open_run=run) as ui:
        await ui.state_shown("loading")
        await ui.until(lambda: "▸ preparing the optimizer" in ui.text())
        assert "✓ reading the weights" in ui.text()
        assert "12.0 s" in ui.text()
