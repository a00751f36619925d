"""The dashboard says where ranks really are, and that a run is slower than its plan."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.supervisor.slowness import _cause_text
from so_tui.plan.plan import RankBinding
from so_tui.runs import RunDirectory, read_state, write_state
from so_tui.runs.records import BindingRecord, Cause, RankBindingReport, RankPlacement, Slowdown
from so_tui.ui.dashboard.panels import PlacementPanel
from so_tui.units import GIB
from tests.support.hostile import HOSTILE, unsafe
from tests.support.make_run import plan_for, quad_machine, sample, write_run
from tests.support.records import append_records, append_samples
from tests.support.screen import opened

MACHINE = quad_machine()
PLAN = plan_for(MACHINE, "qwen3-14b", 4, 5000)


def placed(binding: RankBinding, **changes: object) -> RankPlacement:
    node = binding.numa_node or 0
    right = RankPlacement(rank=binding.rank, cpus=binding.main_cpus, adam_cpus=binding.adam_cpus)
    return replace(right, **({"node_bytes": {node: 80 * GIB}} | changes))


def write_placement(run: RunDirectory, *placement: RankPlacement) -> None:
    """Add a newer sample with the placement of ranks."""
    found = sample(random.Random(1), 1, time.time(), MACHINE, PLAN)
    append_samples(run, MACHINE.hostname, replace(found, placement=placement))


async def shown(run: RunDirectory, size: tuple[int, int] = (120, 36)) -> list[str]:
    """Return the lines of the panel, which has something wrong to say."""
    async with opened(run.path.parent, size, open_run=run, shows="training") as ui:
        panel = ui.find("PlacementPanel", PlacementPanel)
        await ui.until(lambda: panel.display and "✗" in str(panel.content))
        return str(panel.content).splitlines()


@pytest.fixture
def run(runs_dir: Path) -> RunDirectory:
    return write_run(runs_dir, steps=20, seconds_of_samples=5)


async def test_misplaced_ranks_are_named_first(run: RunDirectory) -> None:
    first, second, third, fourth = PLAN.binding
    write_placement(
        run,
        placed(first, nice=19),
        placed(second, cpus=(0, 1), adam_cpus=(0, 1)),
        placed(third, node_bytes={2: 20 * GIB, 3: 60 * GIB}),
        placed(fourth),
    )
    for size in ((80, 24), (200, 50)):
        first_line, second_line, *rest = await shown(run, size)
        assert re.match("✗ rank 1 .*0-1.*72-143", first_line)
        assert re.match("✗ rank 2 .*25 %", second_line)
    assert "nice 19" in rest[0]


def write_report(run: RunDirectory, rank: int, host: str, problem: str = "") -> None:
    """Write what a rank reported after it was bound to cores 0 to 3."""
    found = {"found_cpus": (0,), "found_memory_policy": "default", "memory_policy": "default"}
    bound = {"cpus": (0, 1, 2, 3), "main_cpus": (0,), "adam_cpus": (1, 2, 3)}
    own = {"rank": rank, "host": host, "pid": 1, "gpu": 3, "corrected": False, "problem": problem}
    report = RankBindingReport(**(own | found | bound))  # type: ignore[arg-type]
    append_records(run, BindingRecord(attempt=1, time=time.time(), ranks=(report,)))


async def test_failed_and_foreign_bindings_are_shown(run: RunDirectory) -> None:
    write_report(run, 3, MACHINE.hostname, f"cannot run on cores 216-287 {HOSTILE}")
    lines = await shown(run)
    assert lines[0].startswith("✗ rank 3"), "before the first sample of it"
    assert not unsafe(lines[0])
    write_report(run, 7, "another")
    foreign = RankPlacement(rank=7, cpus=(0,), adam_cpus=(1,))
    write_placement(run, *map(placed, PLAN.binding), foreign)
    lines = await shown(run)
    assert re.match("✗ rank 7 · GPU 3.*0-3", lines[0])
    assert lines[1].startswith("✓ 4 ranks")


FOREIGN = Cause(code="foreign-load", seconds=1.0, measured=0.4, planned=0.0, nice=20)
CAUSES = (
    replace(FOREIGN, processes=("make", HOSTILE)),
    Cause(code="data", seconds=0.3, measured=0.5, planned=0.01),
)


async def test_a_slow_run_says_why_on_the_screen_and_in_lines(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    from so_tui.commands.follow import _Printer

    fine = read_state(run)
    slow = replace(fine, slowdown=Slowdown(step=20, step_s=4.6, planned_s=3.1, causes=CAUSES))
    write_state(run, slow)
    async with opened(run.path.parent, (120, 36), open_run=run) as ui:
        await ui.until(lambda: "slower than planned" in ui.shown("#news"))
        news = ui.shown("#news").replace("\n", " ")
    assert _cause_text(CAUSES[0]).split(" (")[0] in news
    printer = _Printer()
    for state in (fine, slow, slow, replace(slow, state="saving"), fine):
        printer.compare(state)
    told = capsys.readouterr().out.splitlines()
    assert ["warning" in line for line in told] == [True, False]
    assert not unsafe("".join([news, *told]))
