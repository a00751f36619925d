"""Writing and reading metrics through real files: what is written comes back, whoever is killed
when.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from so_tui.runs import MetricsWriter, RunDirectory, RunReader, SampleWriter, metrics
from so_tui.runs.metrics import MetricsReader, StepRows
from so_tui.runs.records import (
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    ResumedRecord,
    StartRecord,
    StepRecord,
    WarningRecord,
    encode_line,
)
from so_tui.runs.segments import read_lines, segments
from tests.support.records import step_record
from tests.support.waiting import LIMIT_S

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
    run: RunDirectory,
    attempt: int,
    records: list[MetricRecord],
    *,
    close: bool = True,
    segment_bytes: int = 1 << 22,
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
    return StartRecord(
        attempt=attempt, time=1e9, model="m", mode="gpu", ranks=1, total_steps=1000, parameters=7
    )


def losses(reader: RunReader, first: float = 0, last: float = math.inf) -> list[float]:
    return [record.loss for record in reader.metrics.steps(first, last)]


def rows(reader: RunReader, field: str) -> list[tuple[int, float | None]]:
    """What charts get."""
    portions = StepRows(reader.metrics, [field, "step_s"]).read(60.0)
    return [(row.step, getattr(row, field)) for portion in portions for row in portion]


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
    metrics = reader.metrics
    assert (metrics.events.start, metrics.latest, metrics.events.end) == (
        records[0],
        records[50],
        records[-1],
    )
    found = (*metrics.events.evaluations, *metrics.events.checkpoints, *metrics.events.warnings)
    assert found == tuple(records[51:54])
    assert reader.poll().records == ()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_diverged_loss_is_a_gap(run: RunDirectory, step: Step, loss: float) -> None:
    write(run, 1, [step(0, loss=2.0), step(1, loss=loss, gradient_norm=None), step(2, loss=1.0)])
    reader = RunReader(run)
    records = read_all(reader)
    assert isinstance(records[1], StepRecord)
    assert str(records[1].loss) == str(loss)
    assert records[1].gradient_norm is None
    assert str(rows(reader, "loss")) == str([(0, 2.0), (1, loss), (2, 1.0)])
    assert rows(reader, "gradient_norm") == [(0, 1.5), (1, None), (2, 1.5)]


def test_unknown_kinds_and_fields_are_skipped(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(0), step(1)])
    path = segments(run.metrics_dir)[1]
    newer = msgspec.json.decode(msgspec.json.encode(step(2)))
    newer["loss_of_tomorrow"] = [1, 2]
    with path.open("ab") as file:
        file.write(b'{"kind":"dream","attempt":1,"time":1.0,"about":"sheep"}\n')
        file.write(b'{"kind":"step","att\n\n\x00\xff garbage\n')
        file.write(msgspec.json.encode(newer) + b"\n")
    assert [
        record.step for record in read_all(RunReader(run)) if isinstance(record, StepRecord)
    ] == [0, 1, 2]


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
            assert reader.metrics.latest == step(i, loss=float(i))
    writer.close()
    seen += read_all(reader)
    assert len(segments(run.metrics_dir)) > 10
    assert seen == [step(i, loss=float(i)) for i in range(600)]
    assert losses(reader) == [float(i) for i in range(600)]
    assert rows(reader, "loss") == [(i, float(i)) for i in range(600)]


def test_a_late_reader_draws_what_it_did_not_read(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(i, loss=float(i % 100)) for i in range(3000)], segment_bytes=100_000)
    reader = RunReader(run)
    assert 0 < len(read_all(reader)) < 500
    assert rows(reader, "loss") == [(i, float(i % 100)) for i in range(3000)]
    assert losses(reader, 1000, 1049) == [float(i) for i in range(50)]
    assert [record.step for record in reader.metrics.recent(1500)] == list(range(1500, 3000))


def test_segments_are_read_once_for_charts_and_records(
    run: RunDirectory, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = CheckpointRecord(attempt=1, time=1.0, step=700, path="p", bytes=1, seconds=1.0)
    records: list[MetricRecord] = [*map(step, range(700)), saved, *map(step, range(700, 2000))]
    write(run, 1, records, segment_bytes=200_000)
    read_bytes = Counter[Path]()

    def counted(path: Path, offset: int, limit_bytes: int) -> tuple[list[bytes], int]:
        lines, end = read_lines(path, offset, limit_bytes)
        read_bytes[path] += end - offset
        return lines, end

    monkeypatch.setattr(metrics, "read_lines", counted)
    reader = MetricsReader(run)
    reader.poll(limit_records=5000, limit_s=60.0, earlier=False)
    assert reader.latest is not None
    assert reader.latest.step == 1999
    assert not list(reader.events.checkpoints)
    drawn = [row.step for rows in StepRows(reader, ["loss"]).read(60.0) for row in rows]
    assert drawn == list(range(2000))
    assert list(reader.events.checkpoints) == [saved]
    for path in sorted(read_bytes)[:-1]:  # the newest is read before all others, too
        assert read_bytes[path] <= path.stat().st_size + metrics._HEAD_BYTES


@pytest.mark.parametrize("resumed", [150, 167, 0])
@pytest.mark.parametrize("late", [False, True], ids=["live", "late"])
def test_resume_supersedes_steps(run: RunDirectory, step: Step, resumed: int, late: bool) -> None:
    """Later ones."""
    reader = RunReader(run)
    saved = [
        CheckpointRecord(attempt=1, time=1.0, step=s, path=str(s), bytes=1, seconds=1.0)
        for s in (0, resumed, resumed + 100)
    ]

    def written(attempt: int, *records: MetricRecord) -> None:
        write(run, attempt, list(records), segment_bytes=50_000)

    def newest() -> int:
        assert reader.metrics.latest is not None
        return reader.metrics.latest.step

    written(1, *(step(i, loss=1.0) for i in range(resumed + 200)), *saved)
    if not late:
        read_all(reader)
        assert newest() == resumed + 199
        assert rows(reader, "loss")[-1] == (resumed + 199, 1.0)
    written(2, start(2), ResumedRecord(attempt=2, time=2e9, step=resumed))
    before = StepRows(reader.metrics, ["loss"])
    reader.poll(limit_s=10)
    assert before.outdated is not late
    assert newest() == resumed
    assert rows(reader, "loss")[-1] == (resumed, 1.0)
    everything = resumed + 151
    written(2, *(step(i, attempt=2, loss=5.0) for i in range(resumed + 1, everything)))
    read_all(reader)
    expected = [1.0] * (resumed + 1) + [5.0] * 150
    fresh = RunReader(run)
    read_all(fresh)
    for each in (reader, fresh):
        assert losses(each) == expected
        assert rows(each, "loss") == list(enumerate(expected))
    assert [record.step for record in reader.metrics.recent(everything)] == list(range(everything))
    assert {record.path for record in reader.metrics.events.checkpoints} == {"0", str(resumed)}


def test_killed_writer_leaves_whole_records(run: RunDirectory, step: Step) -> None:
    reader = RunReader(run)
    steps: list[int] = []
    for attempt in range(1, 6):
        begin = reader.metrics.latest.step + 1 if reader.metrics.latest else 0
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOREVER, str(run.path), str(attempt), str(begin)],
            cwd=Path.cwd(),
        )
        deadline = time.monotonic() + LIMIT_S
        while len(steps) < 300 * attempt and time.monotonic() < deadline:
            steps += [
                record.step for record in reader.poll().records if isinstance(record, StepRecord)
            ]
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        steps += [record.step for record in read_all(reader) if isinstance(record, StepRecord)]
        with list(segments(run.metrics_dir).values())[-1].open(
            "ab"
        ) as torn:  # as if it had died in the middle of its write
            torn.write(b'{"kind":"step","attempt":1,"ti')
    assert len(steps) >= 1500
    assert steps == list(range(len(steps)))  # each once, in order
    MetricsWriter(run, 6).close()
    fresh = RunReader(run)
    read_all(fresh)
    for each in (reader, fresh):
        assert each.metrics.latest is not None
        assert each.metrics.latest.step >= steps[-1]
        assert losses(each) == [float(i) for i in range(each.metrics.latest.step + 1)]


def test_full_disk_does_not_damage_the_next_record(run: RunDirectory, step: Step) -> None:
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


def test_a_poll_is_bounded_also_of_an_empty_run(run: RunDirectory, step: Step) -> None:
    reader = RunReader(run)
    assert (read_all(reader), rows(reader, "loss"), losses(reader)) == ([], [], [])
    assert reader.metrics.latest is None
    write(run, 1, [step(i) for i in range(300)])
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


def test_half_a_record_is_cut_off_by_the_next_attempt(run: RunDirectory, step: Step) -> None:
    write(run, 1, [step(number) for number in range(1, 200)], close=False)
    segment = next(iter(segments(run.metrics_dir).values()))
    whole = segment.read_bytes()
    with segment.open("ab") as file:  # as a full disk leaves it, longer than a block
        file.write(whole[: len(whole) // 2][-100_000:].replace(b"\n", b" "))
    second = MetricsWriter(run, 2)
    assert segment.read_bytes() == whole
    second.append(step(200, attempt=2))
    second.close()
    assert [record.step for record in read_completely(run).recent(300)] == list(range(1, 201))


def read_completely(run: RunDirectory) -> MetricsReader:
    reader = MetricsReader(run)
    while reader.poll(limit_records=10_000, limit_s=10.0).more:
        continue
    return reader


def write_hundreds(run: RunDirectory, *attempts: int) -> None:
    """Write the steps of some attempts: of the first those from 100 to 199, and so on."""
    for attempt in attempts:
        first = 100 * attempt
        write(run, attempt, [step_record(s, attempt=attempt) for s in range(first, first + 100)])


def loop(path: Path) -> None:
    """Make opening a file fail, also for root."""
    path.unlink()
    path.symlink_to(path)


def test_an_earlier_segment_that_cannot_be_read_is_left_out(run: RunDirectory) -> None:
    write_hundreds(run, 1, 2, 3)
    loop(segments(run.metrics_dir)[2])
    reader = read_completely(run)
    assert [record.step for record in reader.steps(0, 1000)] == [*range(100, 200), *range(300, 400)]
    assert sum(map(len, StepRows(reader, ["loss"]).read(60.0))) == 200


def test_a_segment_that_appears_late_is_read(run: RunDirectory, step: Step) -> None:
    """And the newest is still followed."""
    write_hundreds(run, 1, 2)
    first, newest = segments(run.metrics_dir).values()
    late = first.rename(first.with_name("not-copied-yet"))
    reader = read_completely(run)
    late.rename(first)
    drawn = StepRows(reader, ["loss"])
    assert reader.poll(limit_records=1000, limit_s=10.0).records == ()
    assert drawn.outdated
    with newest.open("ab") as file:
        file.write(encode_line(step(300, attempt=2)))
    assert reader.poll(limit_records=1000, limit_s=10.0).records == (step(300, attempt=2),)
    assert [record.step for record in reader.steps(0, 1000)] == [*range(100, 301)]


def test_a_poll_says_whether_it_is_behind(run: RunDirectory) -> None:
    """Or whether only earlier records are still to be read."""
    write_hundreds(run, 1, 2)
    reader = MetricsReader(run)
    progress = reader.poll(limit_records=50, limit_s=10.0)
    assert (len(progress.records), progress.more, progress.behind) == (50, True, True)
    while (progress := reader.poll(limit_records=1000, limit_s=0.0)).behind:
        continue
    assert progress.more


def test_work_for_a_record_does_not_grow_with_events(
    run: RunDirectory, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    original = metrics._with_few_warnings

    def counted(events: list[MetricRecord]) -> list[MetricRecord]:
        passes.append(len(events))
        return original(events)

    monkeypatch.setattr(metrics, "_with_few_warnings", counted)
    records: list[MetricRecord] = []
    for number in range(100):
        evaluated = EvaluationRecord(attempt=1, time=1e9, step=number, loss=1.0, tokens=1)
        records += [step(number), evaluated]
    write(run, 1, records)
    reader = MetricsReader(run)
    reader.poll(limit_records=1000, limit_s=10.0)
    assert len(reader.events.evaluations) == 100
    assert len(passes) < 10


def test_newest_warnings_are_kept(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_WARNINGS", 10)
    for attempt in (1, 2):
        warnings = [WarningRecord(attempt=attempt, time=1e9, message=str(at)) for at in range(25)]
        write(run, attempt, [start(attempt), *warnings])
    reader = read_completely(run)
    assert [warning.message for warning in reader.events.warnings] == [
        str(at) for at in range(15, 25)
    ]
    assert reader.events.start == start(2)


def test_segment_that_fails_to_close_costs_no_record(
    run: RunDirectory, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may say only then that a quota is used up; the descriptor is free all
    the same, and another file may get it.
    """
    writer = write(run, 1, [step(1)], close=False, segment_bytes=1000)
    close, closed = os.close, []

    def failing(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("so_tui.runs.segments.os.close", failing)
    with pytest.raises(OSError, match="quota"):
        writer.append(step(2, loss=float("1" * 300)))
    monkeypatch.undo()
    other = os.open(os.devnull, os.O_RDONLY)
    assert closed == [other]
    for number in range(3, 9):
        writer.append(step(number))
    writer.close()
    os.close(other)  # is still open
    reader = RunReader(run)
    reader.poll(limit_s=10)
    assert [record.step for record in reader.metrics.recent(9)] == [1, *range(3, 9)]
