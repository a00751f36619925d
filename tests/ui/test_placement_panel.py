"""The dashboard says where ranks really are, and that a run is slower than its plan."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.supervisor.slowness import _cause_text
from so_tui.plan.plan import RankBinding
from so_tui.runs import RunDirectory, SampleWriter, read_state, write_state
from so_tui.runs.records import BindingRecord, Cause, RankBindingReport, RankPlacement, Slowdown
from so_tui.ui.dashboard.panels import PlacementPanel
from so_tui.units import GIB
from tests.support.hostile import HOSTILE, unsafe
from tests.support.make_run import plan_for, quad_machine, sample, write_run
from tests.support.records import append_records
from tests.support.screen import opened

MACHINE = quad_machine()
PLAN = plan_for(MACHINE, "qwen3-14b", 4, 5000)


def placed(binding: RankBinding, **changes: object) -> RankPlacement:
    node = binding.numa_node or 0
    right = RankPlacement(
        rank=binding.rank,
        cpus=binding.main_cpus,
        adam_cpus=binding.adam_cpus,
        node_bytes={node: 80 * GIB},
    )
    return replace(right, **changes)


def write_placement(run: RunDirectory, *placement: RankPlacement) -> None:
    """Add a newer sample with the placement of ranks."""
    writer = SampleWriter(run, MACHINE.hostname)
    found = sample(random.Random(1), 1, time.time(), MACHINE, PLAN)
    writer.append(replace(found, placement=placement))
    writer.close()


SIZES = ((200, 50), (120, 36), (80, 24))


async def panels_of(
    run: RunDirectory, runs_dir: Path, *sizes: tuple[int, int]
) -> AsyncIterator[list[str]]:
    """Yield the lines of the panel in each size; none while it is hidden."""
    async with opened(runs_dir, sizes[0], open_run=run, shows="training") as ui:
        for size in sizes:
            await ui.resize(*size)
            await ui.until(lambda: "node 3" in ui.text() or ui.app.size.height < 30)
            panel = ui.screen.query_one(PlacementPanel)
            ui.lines()
            yield str(panel.content).splitlines() if panel.display else []


@pytest.fixture
def run(runs_dir: Path) -> RunDirectory:
    return write_run(runs_dir, steps=20, seconds_of_samples=5)


async def test_placed_ranks_have_a_line_each_if_it_fits(run: RunDirectory, runs_dir: Path) -> None:
    lines, (line,), none = [found async for found in panels_of(run, runs_dir, *SIZES)]
    assert none == []
    assert line.startswith("✓ 4 ranks")
    assert [line.partition("  ")[0] for line in lines] == [
        f"✓ rank {rank} · GPU {rank}" for rank in range(4)
    ]
    for line, binding in zip(lines, PLAN.binding, strict=True):
        assert f"{binding.main_cpus[0]}-{binding.main_cpus[-1]}" in line
        assert f"{binding.adam_cpus[0]}-{binding.adam_cpus[-1]}" in line
        assert f"node {binding.numa_node} 99" in line


async def test_misplaced_ranks_are_named_first(run: RunDirectory, runs_dir: Path) -> None:
    first, second, third, fourth = PLAN.binding
    write_placement(
        run,
        placed(first, nice=19),
        placed(second, cpus=(0, 1), adam_cpus=(0, 1)),
        placed(third, node_bytes={2: 20 * GIB, 3: 60 * GIB}),
        placed(fourth),
    )
    async for lines in panels_of(run, runs_dir, *reversed(SIZES)):
        assert lines[0].startswith("✗ rank 1")
        assert "0-1" in lines[0]
        assert "72-143" in lines[0]
        assert lines[1].startswith("✗ rank 2")
        assert "25 %" in lines[1]
    assert "nice 19" in lines[2]


def write_report(run: RunDirectory, rank: int, host: str, problem: str = "") -> None:
    """Write what a rank reported after it was bound to cores 0 to 3."""
    report = RankBindingReport(
        rank=rank,
        host=host,
        pid=1,
        gpu=3,
        found_cpus=(0,),
        cpus=(0, 1, 2, 3),
        main_cpus=(0,),
        adam_cpus=(1, 2, 3),
        found_memory_policy="default",
        memory_policy="default",
        corrected=False,
        problem=problem,
    )
    append_records(run, BindingRecord(attempt=1, time=time.time(), ranks=(report,)))


async def test_failed_and_foreign_bindings_are_shown(run: RunDirectory, runs_dir: Path) -> None:
    write_report(run, 3, MACHINE.hostname, f"cannot run on cores 216-287 {HOSTILE}")
    (lines,) = [found async for found in panels_of(run, runs_dir, (120, 36))]
    assert lines[0].startswith("✗ rank 3"), "before the first sample of it"
    assert not unsafe(lines[0])
    write_report(run, 7, "another")
    write_placement(
        run, *map(placed, PLAN.binding), RankPlacement(rank=7, cpus=(0,), adam_cpus=(1,))
    )
    (lines,) = [found async for found in panels_of(run, runs_dir, (120, 36))]
    assert lines[0].startswith("✗ rank 7 · GPU 3")
    assert "0-3" in lines[0]
    assert lines[1].startswith("✓ 4 ranks")


CAUSES = (
    Cause(
        code="foreign-load",
        seconds=1.0,
        measured=0.4,
        planned=0.0,
        nice=20,
        processes=("make", HOSTILE),
    ),
    Cause(code="data", seconds=0.3, measured=0.5, planned=0.01),
)


async def test_a_slow_run_says_why_on_the_screen_and_in_lines(
    run: RunDirectory, runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from so_tui.commands.follow import _Printer

    fine = read_state(run)
    slow = replace(fine, slowdown=Slowdown(step=20, step_s=4.6, planned_s=3.1, causes=CAUSES))
    write_state(run, slow)
    async with opened(runs_dir, (120, 36), open_run=run) as ui:
        await ui.until(lambda: "slower than planned" in ui.shown("#news"))
        news = ui.shown("#news").replace("\n", " ")
        assert _cause_text(CAUSES[0]).split(" (")[0] in news
        assert not unsafe(news)
    printer = _Printer()
    for state in (fine, slow, slow, replace(slow, state="saving"), fine):
        printer.compare(state)
    told = capsys.readouterr().out.splitlines()
    assert ["warning" in line for line in told] == [True, False]
    assert not unsafe("".join(told))
