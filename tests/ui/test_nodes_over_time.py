"""The NUMA nodes over time: heat of their cores, memory, and who else computes on them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.runs.records import ForeignProcess, NodeSample, Sample
from so_tui.runs.samples import SampleReader
from so_tui.ui.numa_nodes import LEVELS, NumaNodes, _group_cores, _heat_rows, _heat_texts
from so_tui.ui.snapshot import CORES, LoadStore
from tests.support.make_run import quad_machine, write_run
from tests.support.records import append_samples
from tests.support.screen import SIZES, opened, rows_of


@pytest.mark.parametrize(
    ("cores", "adam", "main", "height"),
    [(cores, cores // 8 * 7, cores, height) for cores in (1, 72, 288) for height in (1, 2, 7, 300)]
    # Shares of rows are rounded: a group has no more rows than cores, and one is lost.
    + [(18, 6, 12, 17)],
)
def test_every_core_is_in_one_row_and_groups_do_not_mix(
    cores: int, adam: int, main: int, height: int
) -> None:
    cpus = tuple(range(1000, 1000 + cores))
    groups = _group_cores(cpus, frozenset(cpus[:adam]), frozenset(cpus[adam:main]))
    rows = _heat_rows(groups, height)
    lost = height == 17
    assert len(rows) == min(height, cores) - lost
    seen = Counter(position for row in rows for position in row.positions)
    assert set(seen.values()) == {1}
    assert len(seen) == (cores if height >= len(groups) else len(groups[0].positions))
    for row in rows:
        assert len({(at >= adam) + (at >= main) for at in row.positions}) == 1
        assert row.label.endswith(f" {1000 + row.positions[0]} ")


def test_a_cell_is_the_mean_of_its_cores_over_its_time() -> None:
    groups = _group_cores((0, 1, 2, 3), frozenset({0, 3}), frozenset({1, 2}))
    rows = _heat_rows(groups, 2)
    assert [(row.role, row.positions) for row in rows] == [("adam", (0, 3)), ("main-core", (1, 2))]
    history = [bytes(loads) for loads in ((100, 0, 0, 100), (0, 50, 50, 0), (100, 0, 0, 0))]
    low, quarter, middle, high = (LEVELS["ascii"][level] for level in (0, 2, 4, -1))
    for borders, texts in (
        ([0, 1, 2, 3], [f"{high}{low}{middle}", f"{low}{middle}{low}"]),
        ([0, 2], [middle, quarter]),  # several samples are averaged
        ([0, 0, 1, 1, 3, 3, 3], [f" {high}{high}{quarter}  ", f" {low}{low}{quarter}  "]),
    ):
        assert _heat_texts(rows, history, borders, "ascii") == texts


def test_the_number_of_cores_in_a_sample_is_not_trusted() -> None:
    store = LoadStore()
    store.want((CORES,))
    for second, loads in enumerate([(10, 300), (5,), (1, 2, 3), (-4, 9)]):
        node = NodeSample(
            id=0, cores=loads, memory_used_bytes=1, memory_total_bytes=2, file_cache_bytes=0
        )
        sample = Sample(attempt=1, time=float(second), interval_s=1.0, nodes=(node,))
        store.append("here", sample)
    (view,) = store.view({"here": sample}, {}).nodes
    assert [tuple(loads) for loads in view.cores] == [(10, 100), (5, 0), (1, 2), (0, 9)]


@pytest.mark.parametrize("size", SIZES)
async def test_one_key_shows_load_heat_and_memory(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=60, seconds_of_samples=120)
    async with opened(runs_dir, size, open_run=run, shows="training") as ui:
        nodes = ui.find("#nodes", NumaNodes)
        await ui.until(lambda: nodes.pictures)
        await ui.press("h")
        await ui.until(lambda: nodes.plot == "cores" and nodes.pictures[0].view.cores)
        await ui.until(lambda: nodes.size.height > 4 * (2 + 1))
        lines = rows_of(nodes)
        for sign in ("A ", "m "):
            assert sum(line.startswith(sign) for line in lines) >= 4, lines
        assert lines[-1].startswith("  step ─"), "the axis has labels"
        await ui.press("h")
        await ui.until(lambda: nodes.plot == "memory" and nodes.pictures[0].view.memory)
        await ui.press("h")
        await ui.until(lambda: nodes.plot == "load" and ui.screen.maximized is None)


async def test_foreign_load_is_named_at_the_node_where_it_runs(runs_dir: Path) -> None:
    machine = quad_machine(nodes=1)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=20, seconds_of_samples=5)
    newest = SampleReader(run, machine.hostname).poll()[-1]
    foreign = ForeignProcess(pid=9, name="x\x1b[2Jy", cores=1.5, cpu=66)
    busy = replace(newest, time=newest.time + 0.5, foreign=(foreign,))
    append_samples(run, machine.hostname, busy)
    async with opened(runs_dir, (200, 50), open_run=run, shows="training") as ui:
        nodes = ui.find("#nodes", NumaNodes)
        await ui.until(lambda: nodes.pictures and nodes.pictures[0].view.foreign)
        heading = nodes.render_line(0).text
        assert "of another user 1.5 cores on core 66" in heading
        assert "\x1b" not in heading
        await ui.resize(80, 24)
        heading = nodes.render_line(0).text.rstrip()
        assert re.search(r"  ! \S+ 1\.5 cores on 66(  \d+ of \d+ GiB)?$", heading), heading
