"""Writing and reading metrics through real files: what is written comes back, whoever is killed when."""

from __future__ import annotations

import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from so_tui.runs import MetricsWriter, RunDirectory, RunReader, SampleWriter
from so_tui.runs.index import BUCKET, index_path
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import (
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    ResumedRecord,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.runs.segments import segments

Step = Callable[..., StepRecord]

WRITE_FOREVER = """
import sys
import time
from tests.support.records import step_record
from so_tui.runs import MetricsWriter, RunDirectory
writer = MetricsWriter(RunDirectory(sys.argv[1]), int(sys.argv[2]), segment_bytes=64 * 1024)
step = int(sys.argv[3])
while True:
    writer.append(step_record(step, attempt=int(sys.argv[2]), loss=float(step)))
    step += 1
    time.sleep(0.0002)
"""


def write(
    run: RunDirectory, attempt: int, records: list[MetricRecord], *, close: bool = True, segment_bytes: int = 1 << 22
) -> MetricsWriter:
    writer = MetricsWriter(run, attempt, segment_bytes=segment_bytes)
    for record in records:
        writer.append(record)
    if close:
        writer.close()
    return writer


def read_all(reader: RunReader) -> list[MetricRecord]:
    records: list[MetricRecord] = []
    while True:
        update = reader.poll()
        records += update.records
        if not update.more:
            return records


def start(attempt: int) -> StartRecord:
    return StartRecord(attempt=attempt, time=1e9, model="m", mode="gpu", ranks=1, total_steps=1000, parameters=7)


def losses(reader: RunReader, columns: int, first: int | None = None, last: int | None = None) -> list[float]:
    return [column.last for column in reader.overview("loss", columns, first, last).columns]


def test_records_come_back_as_they_were_written(run: RunDirectory, step: Step) -> None:
    records: list[MetricRecord] = [
        start(1),
        *(step(i, loss=3.0 - i / 100) for i in range(50)),
        EvaluationRecord(attempt=1, time=2e9, step=49, loss=2.5, tokens=10),
        CheckpointRecord(attempt=1, time=2e9, step=49, path="/c", bytes=5, seconds=0.1),
        WarningRecord(attempt=1, time=2e9, message="slow", suggestion="packing"),
        EndRecord(attempt=1, time=2e9, state="finished", step=49),
    ]
    write(run, 1, records)
    reader = RunReader(run)
    assert read_all(reader) == records
    assert reader.latest == records[50]
    assert reader.start == records[0]
    assert reader.end == records[-1]
    assert (reader.evaluations[0].loss, reader.checkpoints[0].path, reader.warnings[0].message) == (2.5, "/c", "slow")
    assert reader.poll().records == ()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_loss_is_recorded_and_is_a_gap_in_the_chart(run: RunDirectory, step: Step, loss: float) -> None:
    write(run, 1, [step(0, loss=2.0), step(1, loss=loss, gradient_norm=None), step(2, loss=1.0)])
    reader = RunReader(run)
    records = read_all(reader)
    assert isinstance(records[1], StepRecord)
    assert str(records[1].loss) == str(loss)
    assert records[1].gradient_norm is None
    columns = reader.overview("loss", 3).columns
    assert [column.minimum for column in columns[::2]] == [2.0, 1.0]
    assert columns[1].rows == 1
    assert math.isnan(columns[1].minimum)


def test_unknown_kinds_and_fields_and_broken_lines_are_skipped(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(0), step(1)])
    path = segments(run.metrics_dir)[1]
    newer = msgspec.json.decode(msgspec.json.encode(step(2)))
    newer["loss_of_tomorrow"] = [1, 2]
    with path.open("ab") as file:
        file.write(b'{"kind":"dream","attempt":1,"time":1.0,"about":"sheep"}\n')
        file.write(b'{"kind":"step","att\n\n\x00\xff garbage\n')
        file.write(msgspec.json.encode(newer) + b"\n")
    assert [record.step for record in read_all(RunReader(run)) if isinstance(record, StepRecord)] == [0, 1, 2]


def test_an_incomplete_line_waits_for_its_rest(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(0)], close=False)
    reader = RunReader(run)
    assert len(read_all(reader)) == 1
    line = msgspec.json.encode(step(1)) + b"\n"
    path = segments(run.metrics_dir)[1]
    for part in (line[:40], line[40:-1]):
        with path.open("ab") as file:
            file.write(part)
        assert read_all(reader) == []
    with path.open("ab") as file:
        file.write(line[-1:])
    assert read_all(reader) == [step(1)]


def test_a_reader_follows_over_many_segments(run: RunDirectory, step: Step) -> None:
    reader = RunReader(run)
    writer = MetricsWriter(run, 1, segment_bytes=20_000)
    seen: list[MetricRecord] = []
    for i in range(600):
        writer.append(step(i, loss=float(i)))
        if i % 7 == 0:
            seen += read_all(reader)
            assert reader.latest == step(i, loss=float(i))
    writer.close()
    seen += read_all(reader)
    assert len(segments(run.metrics_dir)) > 10
    assert seen == [step(i, loss=float(i)) for i in range(600)]
    assert losses(reader, 600) == [float(i) for i in range(600)]
    few = reader.overview("loss", 6).columns
    assert (few[0].minimum, few[-1].maximum) == (0.0, 599.0)
    assert all(0 <= 100 * (i + 1) - column.last < 100 for i, column in enumerate(few))  # at most a column off


def test_a_late_reader_draws_what_it_did_not_read(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(i, loss=float(i % 100)) for i in range(3000)], segment_bytes=100_000)
    reader = RunReader(run)
    assert 0 < len(read_all(reader)) < 500
    columns = reader.overview("loss", 3).columns
    assert [(column.minimum, column.maximum) for column in columns] == [(0.0, 99.0)] * 3
    assert losses(reader, 50, 1000, 1049) == [float(i) for i in range(50)]
    assert [record.step for record in reader.recent(1500)] == list(range(1500, 3000))


def test_gaps_stay_gaps(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(i) for i in (*range(10), *range(90, 100))])
    reader = RunReader(run)
    read_all(reader)
    assert [column.rows > 0 for column in reader.overview("loss", 10).columns] == [True] + [False] * 8 + [True]
    assert all(math.isnan(column.last) for column in reader.overview("gpu_memory_peak_bytes", 10).columns)
    with pytest.raises(ValueError, match="no metric 'lost'"):
        reader.overview("lost", 10)


def test_an_empty_run_has_an_empty_chart(run: RunDirectory) -> None:
    reader = RunReader(run)
    assert read_all(reader) == []
    assert reader.latest is None
    assert [column.rows for column in reader.overview("loss", 4).columns] == [0] * 4


@pytest.mark.parametrize("resumed", [BUCKET * 3, BUCKET * 3 + 17, 0])
@pytest.mark.parametrize("late", [False, True], ids=["live", "late"])
def test_a_resume_supersedes_later_steps(run: RunDirectory, step: Step, resumed: int, late: bool) -> None:
    reader = RunReader(run)
    saved = [CheckpointRecord(attempt=1, time=1.0, step=s, path=str(s), bytes=1, seconds=1.0) for s in (0, resumed, resumed + 100)]
    first: list[MetricRecord] = [*(step(i, loss=1.0) for i in range(resumed + 200)), *saved]
    write(run, 1, first, segment_bytes=50_000)
    if not late:
        read_all(reader)
        assert reader.latest is not None
        assert reader.latest.step == resumed + 199
        assert reader.overview("loss", 10).last == resumed + 199
    write(run, 2, [start(2), ResumedRecord(attempt=2, time=2e9, step=resumed)], segment_bytes=50_000)
    update = reader.poll()
    assert update.redraw
    assert reader.latest is not None
    assert reader.latest.step == resumed
    assert reader.overview("loss", 10).last == resumed
    write(run, 2, [step(i, attempt=2, loss=5.0) for i in range(resumed + 1, resumed + 151)], segment_bytes=50_000)
    read_all(reader)
    everything = resumed + 151
    assert losses(reader, everything) == [1.0] * (resumed + 1) + [5.0] * 150
    assert {column.maximum for column in reader.overview("loss", 20, 0, resumed).columns if column.rows} == {1.0}
    assert [record.step for record in reader.recent(everything)] == list(range(everything))
    assert {record.path for record in reader.checkpoints} == {"0", str(resumed)}
    fresh = RunReader(run)
    read_all(fresh)
    assert losses(fresh, everything) == losses(reader, everything)


def test_a_killed_writer_leaves_whole_records_and_the_next_attempt_goes_on(run: RunDirectory, step: Step) -> None:
    reader = RunReader(run)
    steps: list[int] = []
    for attempt in range(1, 6):
        begin = reader.latest.step + 1 if reader.latest else 0
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(run.path), str(attempt), str(begin)], cwd=Path.cwd())
        deadline = time.monotonic() + 20
        while len(steps) < 300 * attempt and time.monotonic() < deadline:
            steps += [record.step for record in reader.poll().records if isinstance(record, StepRecord)]
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        steps += [record.step for record in read_all(reader) if isinstance(record, StepRecord)]
        with list(segments(run.metrics_dir).values())[-1].open("ab") as torn:  # as if it had died in the middle of its write
            torn.write(b'{"kind":"step","attempt":1,"ti')
    assert len(steps) >= 1500
    assert steps == sorted(set(steps))  # each once, in order; what the reader was too slow for it has taken over by index
    MetricsWriter(run, 6).close()
    assert all(index_path(path).exists() for path in segments(run.metrics_dir).values())
    fresh = RunReader(run)
    read_all(fresh)
    for each in (reader, fresh):
        assert each.latest is not None
        assert each.latest.step >= steps[-1]
        assert losses(each, each.latest.step + 1) == [float(i) for i in range(each.latest.step + 1)]


def test_without_indexes_the_segments_are_read_themselves(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(i, loss=float(i)) for i in range(500)], segment_bytes=50_000)
    for path in segments(run.metrics_dir).values():
        index_path(path).write_bytes(b"{damaged")
    reader = RunReader(run)
    assert len(read_all(reader)) == 500
    assert losses(reader, 500) == [float(i) for i in range(500)]


def test_a_missing_index_is_written_later(run: RunDirectory, step: Step) -> None:
    writer = write(run, 1, [step(i) for i in range(100)], close=False, segment_bytes=20_000)
    first = index_path(segments(run.metrics_dir)[1])
    first.unlink()
    for i in range(100, 200):
        writer.append(step(i))
    assert first.exists()


def test_a_full_disk_is_reported_and_does_not_damage_the_next_record(run: RunDirectory, step: Step) -> None:
    writer = write(run, 1, [step(0)], close=False)
    size = segments(run.metrics_dir)[1].stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
        with pytest.raises(OSError, match="large"):
            writer.append(step(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    writer.append(step(2))
    writer.close()
    assert read_all(RunReader(run)) == [step(0), step(2)]


def test_a_record_of_another_attempt_is_refused(run: RunDirectory, step: Step) -> None:
    with pytest.raises(ValueError, match="attempt 2"):
        MetricsWriter(run, 1).append(step(0, attempt=2))


def test_a_poll_is_bounded(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(i) for i in range(300)])
    reader = RunReader(run)
    update = reader.poll(limit_records=100, limit_s=10)
    assert (len(update.records), update.more) == (100, True)
    assert len(reader.poll(limit_records=1000, limit_s=10).records) == 200


def test_writing_does_not_bring_a_deleted_run_back(run: RunDirectory) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError):
        MetricsWriter(run, 1)
    with pytest.raises(FileNotFoundError):
        SampleWriter(run, "host")
    assert not run.path.exists()


def test_a_million_records_open_in_under_a_second(run: RunDirectory, step: Step) -> None:
    count, per_segment = 1_000_000, 8_000
    run.metrics_dir.mkdir(exist_ok=True)
    writer = MetricsWriter(run, 1)
    for i in range(per_segment):
        writer.append(step(i, loss=float(i % 1000)))
        if segments(run.metrics_dir).keys() > {1}:
            break
    writer.close()
    # One real segment, repeated with its steps moved on: what a million steps would have written, without writing each.
    content, index = (path.read_bytes() for path in (run.metrics_dir / "000001.jsonl", run.metrics_dir / "000001.index"))
    rows = content.count(b"\n")
    header, _, columns = index.partition(b"\n")
    count_of_rows = msgspec.json.decode(header)["rows"]
    for path in run.metrics_dir.iterdir():
        path.unlink()
    for number in range(count // rows + 1):
        table = array("d", columns)
        for row in range(2 * count_of_rows):  # first and last steps
            table[row] += number * rows
        (run.metrics_dir / f"{number + 1:06d}.jsonl").write_bytes(content)
        (run.metrics_dir / f"{number + 1:06d}.index").write_bytes(header + b"\n" + table.tobytes())
    began = time.process_time()
    reader = RunReader(run)
    while reader.poll().more:
        pass
    assert reader.latest is not None
    views = [reader.overview(metric, 240, 0, count) for metric in ("loss", "model_tflops_per_gpu", "step_s", "time")]
    opened_s = time.process_time() - began
    assert all(column.rows for view in views for column in view.columns)
    assert all(column.rows for column in reader.overview("loss", 40_000, 0, count).columns)
    assert (views[0].columns[100].minimum, views[0].columns[100].maximum) == (0.0, 999.0)
    began = time.process_time()
    reader.overview("loss", 240, 0, count)
    again_s = time.process_time() - began
    assert opened_s < 1.0
    assert again_s < 0.05
    print(f"opened in {opened_s:.3f} s of process time, drawn again in {again_s:.4f} s")


def test_half_a_record_at_the_end_of_an_attempt_is_cut_off_by_the_next(run: RunDirectory, step: Callable[..., StepRecord]) -> None:
    first = MetricsWriter(run, 1)
    for number in range(1, 200):
        first.append(step(number))
    segment = next(iter(segments(run.metrics_dir).values()))
    whole = segment.read_bytes()
    with segment.open("ab") as file:
        file.write(whole[: len(whole) // 2][-100_000:].replace(b"\n", b" "))  # as a full disk leaves it, longer than a block
    second = MetricsWriter(run, 2)
    assert segment.read_bytes() == whole
    second.append(step(200, attempt=2))
    second.close()
    reader = MetricsReader(run)
    while reader.poll(limit_records=10_000, limit_s=1.0).more:
        pass
    assert [record.step for record in reader.recent(300)] == list(range(1, 201))


def test_the_index_of_a_lost_segment_does_not_pass_for_that_of_a_new_one(run: RunDirectory, step: Callable[..., StepRecord]) -> None:
    first = MetricsWriter(run, 1)
    first.append(step(1))
    first.close()
    (segment,) = segments(run.metrics_dir).values()
    segment.unlink()
    second = MetricsWriter(run, 2)
    second.append(step(7, attempt=2))
    reader = MetricsReader(run)
    while reader.poll(limit_records=10_000, limit_s=1.0).more:
        pass
    assert [record.step for record in reader.recent(10)] == [7]
