"""What nodes and GPUs did over time: heat of cores, memory, limits, throttling, foreign load."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.runs import RunReader, SampleWriter
from so_tui.runs.records import ForeignProcess, GpuSample, NodeSample, Sample
from so_tui.runs.samples import SampleReader
from so_tui.ui import snapshot
from so_tui.ui.chart_metrics import BY_KEY, HARDWARE, hardware_keys, sampled_lines
from so_tui.ui.node_lines import LEVELS, NodePicture, group_cores, table_of
from so_tui.ui.numa_nodes import NumaNodes, NumaPanel, _heat_rows, _heat_texts
from so_tui.ui.snapshot import CORES, Loads, LoadStore, sampled_value
from so_tui.units import GIB
from tests.support.make_run import plan_for, quad_machine, sample, write_run
from tests.support.records import append_samples
from tests.support.screen import SIZES, opened, rows_of


@pytest.mark.parametrize(
    ("cores", "adam", "main", "height"),
    [(cores, cores // 8 * 7, cores, height) for cores in (1, 288) for height in (1, 7, 300)]
    # Shares of rows are rounded: a group has no more rows than cores, and one is lost.
    + [(18, 6, 12, 17)],
)
def test_every_core_is_in_one_row_and_groups_do_not_mix(
    cores: int, adam: int, main: int, height: int
) -> None:
    cpus = tuple(range(1000, 1000 + cores))
    groups = group_cores(cpus, frozenset(cpus[:adam]), frozenset(cpus[adam:main]))
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
    groups = group_cores((0, 1, 2, 3), frozenset({0, 3}), frozenset({1, 2}))
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
        newest = one_sample(float(second), cores=loads)
        store.append("here", newest)
    (view,) = store.view({"here": newest}, {}).nodes
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
        for sign in "Am":
            labels = [re.findall(rf"\b{sign} +\d+ ", line) for line in lines[4:]]
            assert sum(map(len, labels)) >= 4, lines
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
        line = nodes.render_line(0).text
        assert re.search(r"! \S+ 1\.5 cores on 66 +of another user", line), line
        assert "\x1b" not in line
        await ui.resize(80, 24)
        line = nodes.render_line(0).text.rstrip()
        assert re.search(r"! \S+ 1\.5 cores on 66$", line), line


SUPERCHIPS = re.compile(
    r"chip (?P<chip>\d) .* (?P<busy>\d+) % +(?P<gpu>\d+/\d+ GiB).* A \S+ +\d+ %.*"
    r" (?P<host>\d+/\d+ GiB)"
)


@pytest.mark.parametrize("width", [80, 100, 120, 160, 220])
async def test_a_superchip_has_one_line_with_whole_figures(runs_dir: Path, width: int) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=5)
    async with opened(runs_dir, (width, 36), open_run=run, shows="training") as ui:
        nodes = ui.find("#nodes", NumaNodes)
        await ui.until(lambda: len(nodes.pictures) == 4)
        lines = [SUPERCHIPS.search(line) for line in rows_of(nodes)[:4]]
        assert [found and found["chip"] for found in lines] == ["0", "1", "2", "3"], rows_of(nodes)
        for found, picture in zip(lines, nodes.pictures, strict=True):
            assert found is not None
            gpu = picture.gpus[0].sample
            assert found["busy"] == str(gpu.busy_percent)
            assert found["gpu"] == "78/95 GiB"
            used = round(picture.view.sample.memory_used_bytes / GIB)
            assert found["host"] == f"{used}/117 GiB"
        assert "GPU 0" not in ui.text(), "no second list"
        heading = ui.find("NumaPanel", NumaPanel).heading.render().plain
        for name, mark in (("Adam", "A "), ("main", "m ")):
            row = ui.lines()[nodes.region.y]
            title = ui.lines()[nodes.region.y - 1]
            assert title.index(name) == row.index(f" {mark}") + 1, (title, row)
        assert " host" in heading
        assert heading.endswith("╮" if width >= 100 else "─")
        assert len(heading) == ui.find("NumaPanel", NumaPanel).heading.size.width


@pytest.mark.parametrize(("cores", "banded"), [(1, False), (2, False), (16, True)])
async def test_one_or_two_cores_have_no_band(runs_dir: Path, cores: int, banded: bool) -> None:
    machine = quad_machine(nodes=1, cores=cores)
    run = write_run(runs_dir, machine=machine, gpus=1, preset="tiny", steps=60, total=99)
    found = SampleReader(run, machine.hostname).poll()[-1]
    loads = tuple(range(0, 100, 100 // cores))[:cores]
    node = replace(found.nodes[0], cores=loads)
    for second in range(1, 60):
        later = replace(found, time=found.time + second, nodes=(node,), gpus=())
        append_samples(run, machine.hostname, later)
    async with opened(runs_dir, (100, 50), open_run=run, shows="training") as ui:
        nodes = ui.find("#nodes", NumaNodes)
        await ui.press("x")
        await ui.until(lambda: nodes.pictures and nodes.pictures[0].view.load[1].length > 50, 10)
        assert nodes.plot_height > 2
        band = nodes._role_styles.get(nodes)["band"].color
        drawn = [
            part.style.color
            for y in range(nodes.lines, nodes.size.height - 1)
            for part in nodes.render_line(y)
            if part.style is not None and part.text.strip()
        ]
        assert (band in drawn) == banded


def test_hardware_is_named_only_as_far_as_it_is_known() -> None:
    store = LoadStore()
    gpus = [GpuSample(index=at, busy_percent=5, pcie_to_gpu_bytes_per_s=1e9) for at in range(2)]
    gpus[0] = replace(gpus[0], pcie_to_host_bytes_per_s=2e9)
    store.append("n1", shown := one_sample(0, *gpus))
    view = store.view({"n1": shown}, {})
    picture = NodePicture(view.nodes[0], "", (), group_cores((0, 1), frozenset(), frozenset()), ())
    table = table_of((picture,), view.gpus, 120, "block", True)
    node, first, second = ("".join(text for text, _ in line) for line in table.lines)
    assert node.startswith("node 0 ")
    assert "2 out   1 in" in first
    assert "out" not in second
    assert [label for _, label in table.labels] == ["GPU", "cores", "host memory", "PCIe, GB/s"]
    table = table_of((picture,), (), 120, "block", True)
    assert [label for _, label in table.labels] == ["cores", "host memory"]


def test_the_strip_of_adam_stays_small_on_wide_screens() -> None:
    store, cpus = LoadStore(), tuple(range(72))
    store.append("n1", shown := one_sample(0, cores=(100,) * 72))
    view = store.view({"n1": shown}, {})
    groups = group_cores(cpus, frozenset(cpus[:65]), frozenset(cpus[65:]))
    for width in (80, 220, 400):
        (line,) = table_of(
            [NodePicture(view.nodes[0], "", (0,), groups, ())], (), width, "block", True
        ).lines
        assert 10 <= sum(len(text) for text, role in line if role == "adam") <= 16


EVERY_NAME = tuple(
    name for metric in HARDWARE for name in (*metric.samples, metric.limit, metric.marked) if name
)


def one_sample(
    second: float, *gpus: GpuSample, cores: tuple[int, ...] = (100, 50), run_cpu_s: float = 0.0
) -> Sample:
    node = NodeSample(
        id=0, cores=cores, memory_used_bytes=3, memory_total_bytes=9, file_cache_bytes=2
    )
    return Sample(
        attempt=1, time=second, interval_s=1.0, nodes=(node,), gpus=gpus, run_cpu_s=run_cpu_s
    )


def test_samples_are_kept_with_limits_and_throttling() -> None:
    store = LoadStore()
    store.want(EVERY_NAME)
    for second, reasons in enumerate([(), ("heat",), ("heat", "power"), ()]):
        values: dict[str, Any] = {"busy_percent": 90 + second, "clock_mhz": 1000 + second}
        values |= {"memory_used_bytes": 5 << 30, "memory_total_bytes": 95 << 30}
        values |= {"power_w": 650.0, "power_limit_w": 700.0, "throttling": reasons}
        gpu = GpuSample(index=3, **values)
        store.append("here", one_sample(second, gpu, run_cpu_s=0.5))
    sampled = store.sampled()

    def newest(key: str) -> list[tuple[str, str, float]]:
        lines = sampled_lines(BY_KEY[key], sampled)
        return [(line.role, name, line.series.value(3)) for line, name in lines]

    assert newest("gpu-power") == [("limit", "limit", 700.0), ("gpu", ".", 650.0)]
    used = [("limit", 95 << 30), ("memory", 5 << 30)]
    assert [found[::2] for found in newest("gpu-used")] == used
    assert [found[2] for key in ("gpu-busy", "gpu-clock") for found in newest(key)] == [93, 1003]
    (throttled,) = sampled[BY_KEY["gpu-clock"].marked]
    marked = [throttled.series.extremes(at, at + 1) for at in range(4)]
    assert marked == [None, (1001, 1001), (1002, 1002), None]
    assert sampled["node.file_cache_bytes"][0].series.value(0) == 2
    foreign = sampled["host.foreign_cores"][0].series.value(0)
    assert foreign == 1.0, "one and a half cores are busy, half a core with the run"
    assert sampled["gpu.module_power_w"][0].series.extremes(0, 4) is None


def test_several_gpus_have_a_line_and_a_colour_each() -> None:
    store = LoadStore()
    store.want(("gpu.c2c_to_gpu_bytes_per_s", "gpu.c2c_to_host_bytes_per_s", "gpu.power_w"))
    gpus = [GpuSample(index=at, c2c_to_gpu_bytes_per_s=1e9, power_w=500.0) for at in range(2)]
    store.append("n1", one_sample(0, *gpus))
    lines = sampled_lines(BY_KEY["c2c"], store.sampled())
    assert [name for _, name in lines] == ["to GPU: GPU 0", "1", "to host: GPU 0", "1"]
    # Both directions of a GPU differ, too.
    assert [line.role for line, _ in lines] == [f"run-{number}" for number in range(1, 5)]
    store.append("n2", one_sample(0, *gpus[:1]))
    lines = sampled_lines(BY_KEY["gpu-power"], store.sampled())
    assert [name for _, name in lines] == ["GPU n1 0", "n1 1", "n2 0"]


def test_only_what_a_machine_reports_is_offered() -> None:
    assert hardware_keys([]) == ("cores", "node-memory", "file-cache", "foreign")
    gpu = GpuSample(index=0, busy_percent=0, power_w=70.0, pcie_to_gpu_bytes_per_s=0.0)
    store = LoadStore()
    store.append("here", shown := one_sample(0, gpu))
    on_pcie = hardware_keys(store.view({"here": shown}, {}).gpus)
    assert on_pcie[:3] == ("gpu-busy", "gpu-power", "pcie")
    for metric in HARDWARE:
        if metric.limit.startswith("gpu."):
            assert sampled_value(metric.limit, GpuSample(index=0)) is None


def test_a_screen_open_for_weeks_has_few_rows(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_ROWS", 700)
    monkeypatch.setattr(snapshot, "HISTORY_ROWS", 50)
    machine = quad_machine(nodes=1, cores=2)
    run = write_run(runs_dir, machine=machine, gpus=1, steps=3, now=1e9)
    reader = RunReader(run)
    reader.poll()
    found = Loads(reader)
    found.want(("node.memory_used_bytes",))
    plan, chance = plan_for(machine, "qwen3-14b", 1, 100), random.Random(1)
    writer = SampleWriter(run, machine.hostname)
    for second in range(1000):
        taken = sample(chance, 1, 1e9 + second, machine, plan)
        writer.append(taken)
        found.add(machine.hostname, (taken,), 1e9)
        (node,) = found.view(machine, None).nodes
        assert node.load[0].length <= 701
    (memory,) = found.store.sampled()["node.memory_used_bytes"]
    assert memory.times[0] <= 1e9 + 30, "the begin is not forgotten"
    assert memory.times[memory.length - 1] == 1e9 + 999
    writer.close()
