"""Samples stay bounded and the past stays visible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.runs import RunDirectory, RunReader, SampleWriter, samples
from so_tui.runs.records import (
    ForeignProcess,
    GpuSample,
    NodeSample,
    Rollup,
    Sample,
    decode_sample,
)
from so_tui.runs.samples import SampleReader, _Resolution, roll_up

BEGIN = 1_000_000_000.0
SMALL = tuple(
    _Resolution(f"{name}-", interval_s, 80_000 if interval_s == 600 else 40_000, 8_000)
    for name, interval_s in (("raw", 0), ("10s", 10), ("60s", 60), ("600s", 600))
)


@pytest.fixture
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "RESOLUTIONS", SMALL)


small_files = pytest.mark.usefixtures("_small_files")


def single(measured: Sample) -> Rollup:
    return Rollup(samples=1, mean=measured)


def sample(second: float, busy: int = 50, attempt: int = 1, power_w: float | None = 300) -> Sample:
    node = NodeSample(
        id=0,
        cores=(busy, busy),
        memory_used_bytes=busy * 1000,
        memory_total_bytes=1 << 30,
        file_cache_bytes=5,
    )
    return Sample(
        attempt=attempt,
        time=BEGIN + second,
        interval_s=1.0,
        nodes=(node,),
        gpus=(GpuSample(index=0, busy_percent=busy, power_w=power_w),),
        run_cpu_s=busy / 100,
    )


@pytest.fixture
def writer(run: RunDirectory) -> Iterator[SampleWriter]:
    with closing(SampleWriter(run, "node1")) as made:
        yield made


def history(run: RunDirectory, first: float, last: float, rows: int = 1_000_000) -> list[Rollup]:
    return list(SampleReader(run, "node1").history(BEGIN + first, BEGIN + last, rows))


def seconds(rows: list[Rollup]) -> list[float]:
    return [row.mean.time - BEGIN for row in rows]


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


def test_mean_of_a_roll_up() -> None:
    measured = [(10, None), (20, 100.0), (90, 200.0)]
    whole = roll_up([single(sample(i, b, power_w=w)) for i, (b, w) in enumerate(measured)])
    assert (whole.samples, whole.mean.time, whole.mean.interval_s) == (3, BEGIN + 2, 3.0)
    assert whole.mean.nodes[0].cores == (40, 40)
    assert whole.mean.gpus[0].power_w == 150.0
    assert whole.mean.gpus[0].temperature_c is None
    assert whole.mean.run_cpu_s == pytest.approx(1.2)
    again = roll_up([whole, single(sample(3, busy=0))])
    assert again.mean.nodes[0].cores == (30, 30)


@small_files
def test_a_long_run_stays_bounded_and_its_past_visible(
    run: RunDirectory, writer: SampleWriter
) -> None:
    end = 6 * 3600
    largest = 0
    for second in range(end):
        writer.append(sample(second, busy=second // 3600 * 10))
        if second % 500 == 0:
            files: list[Path] = [*run.samples_dir("node1").iterdir()]
            largest = max(largest, sum(path.stat().st_size for path in files))
    writer.close()
    assert largest <= sum(resolution.cap_bytes for resolution in SMALL)
    for rows in (20, 100, 2000):
        found = history(run, 0, end, rows)
        times = seconds(found)
        assert times == sorted(set(times))
        assert min(rows, 30) <= len(found) < 1500
        assert times[0] <= 600
        assert times[-1] == end - 1
        assert (found[0].mean.nodes[0].cores, found[-1].mean.nodes[0].cores) == ((0, 0), (50, 50))
    recent = [row.mean for row in history(run, end - 60, end, 60)]
    assert recent == [sample(second) for second in range(end - 60, end)]


def test_rollup_names_throttling_and_foreign_loads() -> None:
    def at(second: int, reasons: tuple[str, ...], **cores: float) -> Rollup:
        gpu = GpuSample(index=0, clock_mhz=1000 + second, throttling=reasons)
        foreign = tuple(
            ForeignProcess(pid=len(name), name=name, cores=load) for name, load in cores.items()
        )
        return single(replace(sample(second), gpus=(gpu,), foreign=foreign))

    parts = [
        at(0, ("heat",), a=1.0, bb=2.0),
        at(1, (), a=3.0, ccc=0.5, dddd=0.2),
        at(2, ("heat", "power")),
    ]
    mean = roll_up(parts).mean
    assert (mean.gpus[0].throttling, mean.gpus[0].clock_mhz) == (("heat", "power"), 1001)
    loads = [(process.name, process.cores) for process in mean.foreign]
    assert loads == [("a", 3.0), ("bb", 2.0), ("ccc", 0.5)]


@small_files
def test_a_writer_that_comes_after_another_goes_on(run: RunDirectory) -> None:
    for attempt in (1, 2):
        writer = SampleWriter(run, "node1")
        for second in range(25):
            writer.append(sample(attempt * 25 + second, attempt=attempt))
    writer.close()  # the first one was killed
    assert len(history(run, 0, 100, 100)) == 50
    assert {row.mean.attempt for row in history(run, 0, 100, 5)} == {1, 2}


@small_files
def test_a_reader_goes_on_after_dropped_segments(run: RunDirectory, writer: SampleWriter) -> None:
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


def test_moment_is_read_without_decoding_all_of_its_segment(
    run: RunDirectory, writer: SampleWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that is set back: lines are in the order of writing.
    for second in (*range(100), *range(50, 150)):
        writer.append(sample(second))
    reader = SampleReader(run, "node1")
    decoded: list[bytes] = []

    def counted(line: bytes) -> Sample | None:
        decoded.append(line)
        return decode_sample(line)

    monkeypatch.setattr("so_tui.runs.samples.decode_sample", counted)

    def at(first: float, last: float) -> set[float]:
        return set(seconds(list(reader.history(BEGIN + first, BEGIN + last, 1_000_000))))

    assert (at(30, 33), at(148, 160)) == ({30, 31, 32, 33}, {148, 149})
    decoded.clear()
    assert at(20, 21) == {20, 21}
    assert len(decoded) < 10
    assert at(60, 61) == {60, 61}
    writer.append(sample(155))
    assert at(148, 160) == {148, 149, 155}


def test_segment_with_a_damaged_first_line_is_read(run: RunDirectory, writer: SampleWriter) -> None:
    """The disk was full when it was begun, or a crash left its first line incomplete."""
    for second in range(5):
        writer.append(sample(second))
    (path,) = run.samples_dir("node1").glob("raw-*")
    whole = path.read_bytes()
    for damage in (b"\n", b'{"v": 1, "atte\n', b"x" * 20_000 + b"\n"):
        path.write_bytes(damage + whole)
        assert seconds(history(run, 0, 4, 100)) == [0, 1, 2, 3, 4]


@small_files
def test_past_is_visible_if_a_clock_is_set_back(run: RunDirectory, writer: SampleWriter) -> None:
    for second in (*range(1000, 1030), *range(500, 530)):
        writer.append(sample(second))
    assert len(sorted(run.samples_dir("node1").glob("raw-*"))) > 2
    assert seconds(history(run, 1000, 1029, 1000)) == list(range(1000, 1030))
