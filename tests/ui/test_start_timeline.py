"""The way to a run's first step, as a timeline."""

from __future__ import annotations

import time
from pathlib import Path

from so_tui.runs.records import PhaseRecord
from so_tui.ui.run_status import CHECKS, FIRST_STEP, LAUNCHER, _stages, timeline_lines
from tests.support.make_run import write_run
from tests.support.records import change_state
from tests.support.screen import opened


def loading(at: float, detail: str = "", **more: object) -> PhaseRecord:
    values = {"attempt": 2, "time": at, "phase": "loading", "detail": detail} | more
    return PhaseRecord(**values)  # type: ignore[arg-type]


def shown(*phases: PhaseRecord, checks_s: float | None = None) -> list[tuple[str, float]]:
    """Return names and begins of the stages of attempt 2, which began at 100 s."""
    return [(stage.name, stage.since) for stage in _stages(phases, 2, 100.0, checks_s)]


def timeline(now: float, *phases: PhaseRecord, width: int = 80) -> list[str]:
    return timeline_lines(_stages(phases, 2, 100.0, None), now, width).plain.splitlines()


def test_stages_are_those_of_the_attempt_and_the_last_one_runs() -> None:
    phases = [
        loading(50, "of the attempt before", attempt=1),
        loading(103, "starting the ranks"),
        loading(110, "loading Phi-4"),
        loading(150, phase="training"),
    ]
    assert shown(*phases) == [
        (LAUNCHER, 100.0),
        ("starting the ranks", 103.0),
        ("loading Phi-4", 110.0),
        (FIRST_STEP, 150.0),
    ]
    assert [line[0] for line in timeline(160.0, *phases)] == ["✓", "✓", "✓", "▸"]
    assert "-" not in "".join(timeline(95.0, loading(90, "a clock that is behind")))


def test_stages_have_one_row_each_after_the_checks() -> None:
    begun = [
        loading(at, f"doing {stage}", stage=stage)
        for at, stage in ((103, "ranks"), (105, "data"), (106, "data"), (110, "weights"))
    ]
    begun += [
        loading(110 + done, "doing weights", stage="weights", done=done, total=8)
        for done in range(4)
    ]
    assert shown(*begun, checks_s=7.5) == [
        (CHECKS, 92.5),
        (LAUNCHER, 100.0),
        ("ranks", 103.0),
        ("data", 105.0),
        ("weights 3 of 8", 110.0),
    ]
    lines = "".join(timeline(120.0, *begun))
    # Only what runs says what it does.
    assert ("doing weights" in lines, "doing data" in lines) == (True, False)
    later = [loading(130, stage="optimizer"), loading(131, stage="checkpoint")]
    last = shown(*begun, *later, loading(140, phase="training"))[3:]
    assert [name for name, _ in last] == [
        "weights 3 of 8",
        "optimizer",
        "saved states",
        FIRST_STEP,
    ]


def test_the_lines_fit_and_their_bars_follow_each_other() -> None:
    for width in (40, 80, 160):
        lines = timeline(200.0, loading(110, "x" * 200), loading(130, "loading"), width=width)
        assert max(map(len, lines)) <= width
    starts = [line.index("━") for line in lines]
    assert starts == sorted(starts)
    assert lines[-1].startswith("▸ loading")
    assert "1 m 10 s" in lines[-1]
    many = [loading(100 + number, f"stage {number}") for number in range(40)]
    assert "stage 39" in timeline(200.0, *many)[-1]


async def test_a_resumed_run_has_a_timeline_too(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=5, state="loading")
    change_state(run, attempt=2, attempt_started=time.time() - 9, checks_s=4.0)
    async with opened(runs_dir, (80, 24), open_run=run, shows="loading") as ui:
        await ui.until(lambda: "▸ launcher" in ui.text())
        assert "✓ checks" in ui.text()
