"""Samples stay bounded and the past stays visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.runs import RunDirectory, RunReader, SampleWriter, samples
from so_tui.runs.records import (
    ForeignProcess,
    GpuSample,
    NodeSample,
    RankPlacement,
    Rollup,
    Sample,
    decode_sample,
    encode_line,
)
from so_tui.runs.samples import RESOLUTIONS, Resolution, SampleReader, _single, roll_up

BEGIN = 1_000_000_000.0
SMALL = (
    Resolution("raw-", 0, 40_000, 8_000),
    Resolution("10s-", 10, 40_000, 8_000),
    Resolution("60s-", 60, 40_000, 8_000),
    Resolution("600s-", 600, 80_000, 8_000),
)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "RESOLUTIONS", SMALL)


def sample(
    second: float,
    *,
    busy: int = 50,
    cores: int = 2,
    attempt: int = 1,
    power_w: float | None = 300.0,
) -> Sample:
    node = NodeSample(
        id=0,
        cores=(busy,) * cores,
        memory_used_bytes=busy * 1000,
        memory_total_bytes=1 << 30,
        file_cache_bytes=5,
    )
    gpu = GpuSample(index=0, busy_percent=busy, power_w=power_w)
    return Sample(
        attempt=attempt,
        time=BEGIN + second,
        interval_s=1.0,
        nodes=(node,),
        gpus=(gpu,),
        run_cpu_s=busy / 100,
        run_memory_bytes=busy,
    )


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_samples_come_back_host_by_host(run: RunDirectory) -> None:
    reader = RunReader(run)
    writers = {host: SampleWriter(run, host) for host in ("node1", "node2.site")}
    for second in range(3):
        for writer in writers.values():
            writer.append(sample(second))
    update = reader.poll()
    assert dict(update.samples) == {host: tuple(sample(s) for s in range(3)) for host in writers}
    assert [*reader.samples] == ["node1", "node2.site"]
    assert reader.poll().samples == {}
    writers["node1"].append(sample(3))
    assert reader.poll().samples == {"node1": (sample(3),)}


def test_mean_and_peak_of_a_roll_up() -> None:
    whole = roll_up(
        [
            _single(sample(i, busy=busy, power_w=power))
            for i, (busy, power) in enumerate([(10, None), (20, 100.0), (90, 200.0)])
        ]
    )
    assert whole.samples == 3
    assert (whole.mean.time, whole.mean.interval_s) == (BEGIN + 2, 3.0)
    assert whole.mean.nodes[0].cores == (40, 40)
    assert whole.peak.nodes[0].cores == (90, 90)
    assert (whole.mean.gpus[0].power_w, whole.peak.gpus[0].power_w) == (150.0, 200.0)
    assert whole.mean.gpus[0].temperature_c is None
    assert whole.mean.run_cpu_s == pytest.approx(1.2)
    assert whole.peak.run_cpu_s == pytest.approx(2.7)
    again = roll_up([whole, _single(sample(3, busy=0))])
    assert again.mean.nodes[0].cores == (30, 30)
    assert again.peak.nodes[0].cores == (90, 90)


@pytest.mark.usefixtures("small_files")
def test_a_long_run_stays_bounded_and_its_past_visible(run: RunDirectory) -> None:
    writer = SampleWriter(run, "node1")
    hours = 6
    largest = 0
    for second in range(hours * 3600):
        writer.append(sample(second, busy=second // 3600 * 10))
        if second % 500 == 0:
            largest = max(largest, total_bytes(run.samples_dir("node1")))
    writer.close()
    assert largest <= sum(resolution.cap_bytes for resolution in SMALL)
    reader = SampleReader(run, "node1")
    for rows in (20, 100, 2000):
        history = list(reader.history(BEGIN, BEGIN + hours * 3600, rows))
        times = [row.mean.time for row in history]
        assert times == sorted(set(times))
        assert min(rows, 30) <= len(history) < 1500
        assert times[0] - BEGIN <= 600
        assert history[0].mean.nodes[0].cores == (0, 0)
        assert history[-1].peak.nodes[0].cores == (50, 50)
        assert times[-1] == BEGIN + hours * 3600 - 1
    recent = reader.history(BEGIN + hours * 3600 - 60, BEGIN + hours * 3600, 60)
    assert [row.mean for row in recent] == [
        sample(second, busy=50) for second in range(hours * 3600 - 60, hours * 3600)
    ]


def test_the_size_limits_cover_hours_and_weeks() -> None:
    """A big machine whose figures are all long has room for two hours of samples, and for three
    weeks at the lowest resolution.
    """
    b = 123456789012
    cores = (100,) * 72
    nodes = tuple(
        NodeSample(id=i, cores=cores, memory_used_bytes=b, memory_total_bytes=b, file_cache_bytes=b)
        for i in range(4)
    )
    values: dict[str, Any] = {
        field.name: b if field.name.endswith("_bytes_per_s") else 98765432109
        for field in msgspec.structs.fields(GpuSample)
    }
    values |= {"index": 0, "busy_percent": 99, "clock_mhz": 1755, "clock_max_mhz": 1980}
    values |= {name: 654.321 for name in values if "power" in name}
    gpu = GpuSample(**values | {"temperature_c": 58, "throttling": ("power",)})
    foreign = ForeignProcess(pid=1234567, name="x" * 15, cores=123.45, cpu=287)
    big = Sample(
        attempt=1, time=BEGIN, interval_s=1.0, nodes=nodes, gpus=(gpu,) * 4, foreign=(foreign,) * 3
    )
    place = RankPlacement(rank=0, cpus=cores[:7], adam_cpus=cores, node_bytes={1: b, 2: b})
    placed = msgspec.structs.replace(big, placement=(place,) * 4)  # one sample of ten
    raw_bytes = 0.9 * len(encode_line(big)) + 0.1 * len(encode_line(placed))
    assert sum(resolution.cap_bytes for resolution in RESOLUTIONS) < 100_000_000
    assert RESOLUTIONS[0].cap_bytes / raw_bytes > 2 * 3600
    assert RESOLUTIONS[-1].cap_bytes / len(encode_line(_single(big))) * 600 > 3 * 7 * 86400


def test_rollup_names_throttling_and_foreign_loads() -> None:
    def at(second: int, reasons: tuple[str, ...], **cores: float) -> Rollup:
        gpu = GpuSample(index=0, clock_mhz=1000 + second, throttling=reasons)
        foreign = tuple(
            ForeignProcess(pid=len(name), name=name, cores=load) for name, load in cores.items()
        )
        return _single(msgspec.structs.replace(sample(second), gpus=(gpu,), foreign=foreign))

    whole = roll_up(
        [
            at(0, ("heat",), a=1.0, bb=2.0),
            at(1, (), a=3.0, ccc=0.5, dddd=0.2),
            at(2, ("heat", "power")),
        ]
    )
    for part in (whole.mean, whole.peak):
        assert part.gpus[0].throttling == ("heat", "power")
        assert [(process.name, process.cores) for process in part.foreign] == [
            ("a", 3.0),
            ("bb", 2.0),
            ("ccc", 0.5),
        ]
    assert (whole.mean.gpus[0].clock_mhz, whole.peak.gpus[0].clock_mhz) == (1001, 1002)


def test_what_a_gpu_does_not_report_is_not_written() -> None:
    gpu = GpuSample(index=0, busy_percent=0)
    line = encode_line(
        msgspec.structs.replace(sample(0), gpus=(gpu,), run_memory_bytes=1, run_memory_peak_bytes=1)
    )
    assert b"null" not in line
    assert b"power" not in line
    found = decode_sample(line)
    assert found is not None
    assert found.gpus == (gpu,)


@pytest.mark.usefixtures("small_files")
def test_a_writer_that_comes_after_another_goes_on(run: RunDirectory) -> None:
    for attempt in (1, 2):
        writer = SampleWriter(run, "node1")
        for second in range(25):
            writer.append(sample(attempt * 25 + second, attempt=attempt))
        if attempt == 2:
            writer.close()  # the first one was killed
    reader = SampleReader(run, "node1")
    assert len(list(reader.history(BEGIN, BEGIN + 100, 100))) == 50
    assert {row.mean.attempt for row in reader.history(BEGIN, BEGIN + 100, 5)} == {1, 2}


@pytest.mark.usefixtures("small_files")
def test_a_reader_goes_on_where_segments_were_dropped(run: RunDirectory) -> None:
    writer = SampleWriter(run, "node1")
    reader = SampleReader(run, "node1")
    writer.append(sample(0))
    assert reader.poll() == (sample(0),)
    for second in range(1, 2000):
        writer.append(sample(second))
    times = []
    while samples := reader.poll():
        times += [each.time - BEGIN for each in samples]
    assert times == sorted(set(times))
    assert times[-1] == 1999


def test_no_samples_is_no_history(run: RunDirectory) -> None:
    assert not list(SampleReader(run, "nowhere").history(BEGIN, BEGIN + 10, 10))


def test_moment_is_read_without_decoding_all_of_its_segment(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SampleWriter(run, "node1")
    # A clock that is set back: lines are in the order of writing.
    times = [*range(100), *range(50, 150)]
    for second in times:
        writer.append(sample(second, busy=second % 100))
    reader = SampleReader(run, "node1")
    decoded: list[bytes] = []

    def counted(line: bytes) -> Sample | None:
        decoded.append(line)
        return decode_sample(line)

    monkeypatch.setattr("so_tui.runs.samples.decode_sample", counted)

    def at(first: float, last: float) -> list[float]:
        return [
            row.mean.time - BEGIN for row in reader.history(BEGIN + first, BEGIN + last, 1_000_000)
        ]

    expected = {(30, 33): [30, 31, 32, 33], (60, 61): [60, 61, 60, 61], (148, 160): [148, 149]}
    for _ in range(2):
        for (first, last), seconds in expected.items():
            decoded.clear()
            assert sorted(set(at(first, last))) == sorted(set(seconds))
    assert len(decoded) < 10
    writer.append(sample(155))
    assert at(148, 160) == [148, 149, 155]


def test_a_segment_that_begins_with_a_damaged_line_is_not_lost(run: RunDirectory) -> None:
    """The disk was full when it was begun, or a crash left its first line incomplete."""
    writer = SampleWriter(run, "node1")
    for second in range(5):
        writer.append(sample(second))
    (path,) = run.samples_dir("node1").glob("raw-*")
    for damage in (b"\n", b'{"v": 1, "atte\n', b"x" * 20_000 + b"\n"):
        path.write_bytes(damage + b"".join(encode_line(sample(second)) for second in range(5)))
        rows = SampleReader(run, "node1").history(BEGIN, BEGIN + 4, 100)
        assert [row.mean.time - BEGIN for row in rows] == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("small_files")
def test_the_past_is_visible_before_a_clock_was_set_back(run: RunDirectory) -> None:
    writer = SampleWriter(run, "node1")
    for second in (*range(1000, 1030), *range(500, 530)):
        writer.append(sample(second))
    paths = sorted(run.samples_dir("node1").glob("raw-*"))
    assert len(paths) > 2
    rows = SampleReader(run, "node1").history(BEGIN + 1000, BEGIN + 1029, 1000)
    assert [row.mean.time - BEGIN for row in rows] == list(range(1000, 1030))
