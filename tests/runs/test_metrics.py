"""Records written to real metrics files are read back, whichever process is killed when."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
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
from tests.support.hostile_files import full_disk
from tests.support.records import step_record as step
from tests.support.waiting import LIMIT_S

WRITE_FOREVER = """
import sys
import time
from pathlib import Path
from tests.support.records import step_record
from so_tui.runs import MetricsWriter, RunDirectory
writer = MetricsWriter(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), segment_bytes=64 * 1024)
step = int(sys.argv[3])
while True:
    writer.append(step_record(step, attempt=int(sys.argv[2]), loss=float(step)))
    step += 1
    time.sleep(0.0002)
"""


def write(
    run: RunDirectory, attempt: int, *records: MetricRecord, segment_bytes: int = 1 << 22
) -> MetricsWriter:
    writer = MetricsWriter(run, attempt, segment_bytes=segment_bytes)
    for record in records:
        writer.append(record)
    return writer


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def read_all(reader: RunReader) -> list[MetricRecord]:
    records: list[MetricRecord] = []
    more = True
    while more:
        update = reader.poll()
        records += update.records
        more = update.more
    return records


def completely(run: RunDirectory) -> MetricsReader:
    reader = MetricsReader(run)
    while reader.poll(limit_records=10_000, limit_s=10.0).more:
        continue
    return reader


def start(attempt: int) -> StartRecord:
    return StartRecord(
        attempt=attempt, time=1e9, model="m", mode="gpu", ranks=1, total_steps=1000, parameters=7
    )


def saved(at: int) -> CheckpointRecord:
    return CheckpointRecord(attempt=1, time=1.0, step=at, path=str(at), bytes=1, seconds=1.0)


def losses(reader: RunReader) -> list[float]:
    return [record.loss for record in reader.metrics.steps(0, math.inf)]


def numbers(reader: MetricsReader) -> list[int]:
    return [record.step for record in reader.steps(0, math.inf)]


def rows(reader: RunReader, field: str = "loss") -> list[tuple[int, float | None]]:
    """What charts get."""
    portions = StepRows(reader.metrics, [field, "step_s"]).read(60.0)
    return [(row.step, getattr(row, field)) for portion in portions for row in portion]


def test_records_come_back_as_they_were_written(run: RunDirectory) -> None:
    """A diverged loss too, which charts show as a gap."""
    diverged = (math.nan, math.inf, -math.inf)
    steps = [step(i, loss=3.0 - i / 100) for i in range(47)]
    steps += [step(47 + i, loss=loss, gradient_norm=None) for i, loss in enumerate(diverged)]
    evaluation = EvaluationRecord(attempt=1, time=2e9, step=49, loss=2.5, tokens=10)
    warning = WarningRecord(attempt=1, time=2e9, message="slow", suggestion="packing")
    end = EndRecord(attempt=1, time=2e9, state="finished", step=49)
    records: list[MetricRecord] = [start(1), *steps, evaluation, saved(49), warning, end]
    write(run, 1, *records)
    reader = RunReader(run)
    assert str(read_all(reader)) == str(records)
    events = reader.metrics.events
    assert (events.start, str(reader.metrics.latest), events.end) == (start(1), str(steps[-1]), end)
    assert (*events.evaluations, *events.checkpoints, events.warning) == tuple(records[51:54])
    assert reader.poll().records == ()
    assert str(rows(reader)) == str([(each.step, each.loss) for each in steps])
    assert rows(reader, "gradient_norm") == [(each.step, each.gradient_norm) for each in steps]


def test_unknown_kinds_and_fields_are_skipped(run: RunDirectory) -> None:
    write(run, 1, step(0), step(1))
    newer = msgspec.to_builtins(step(2)) | {"loss_of_tomorrow": [1, 2]}
    append(
        segments(run.metrics_dir)[1],
        b'{"kind":"dream","attempt":1,"time":1.0,"about":"sheep"}\n'
        b'{"kind":"step","att\n\n\x00\xff garbage\n' + msgspec.json.encode(newer) + b"\n",
    )
    assert read_all(RunReader(run)) == [step(0), step(1), step(2)]


def test_an_incomplete_line_waits_for_its_rest(run: RunDirectory) -> None:
    write(run, 1, step(0))
    reader = RunReader(run)
    line = encode_line(step(1))
    for part, found in ((b"", [step(0)]), (line[:40], []), (line[40:-1], []), (b"\n", [step(1)])):
        append(segments(run.metrics_dir)[1], part)
        assert read_all(reader) == found


def test_segments_are_read_once_for_charts_and_records(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = map(step, range(2000))
    early = [next(steps) for _ in range(700)]
    write(run, 1, *early, saved(700), *steps, segment_bytes=200_000)
    read_bytes = Counter[Path]()

    def counted(path: Path, offset: int, limit_bytes: int) -> tuple[list[bytes], int]:
        lines, end = read_lines(path, offset, limit_bytes)
        read_bytes[path] += end - offset
        return lines, end

    monkeypatch.setattr(metrics, "read_lines", counted)
    reader = MetricsReader(run)
    reader.poll(limit_records=5000, limit_s=60.0, earlier=False)
    assert (reader.latest, reader.events.checkpoints) == (step(1999), ())
    drawn = [row.step for rows in StepRows(reader, ["loss"]).read(60.0) for row in rows]
    assert drawn == list(range(2000))
    assert reader.events.checkpoints == (saved(700),)
    assert [record.step for record in reader.steps(1000, 1049)] == list(range(1000, 1050))
    assert [record.step for record in reader.recent(1500)] == list(range(500, 2000))
    for path in sorted(read_bytes)[:-1]:  # the newest is read before all others, too
        assert read_bytes[path] <= path.stat().st_size + metrics._HEAD_BYTES


@pytest.mark.parametrize("resumed", [150, 167, 0])
@pytest.mark.parametrize("late", [False, True], ids=["live", "late"])
def test_resume_supersedes_steps(run: RunDirectory, resumed: int, late: bool) -> None:
    reader = RunReader(run)

    def newest() -> tuple[int, object]:
        assert reader.metrics.latest is not None
        return reader.metrics.latest.step, rows(reader)[-1]

    checkpoints = [saved(at) for at in (0, resumed, resumed + 100)]
    steps = [step(i, loss=1.0) for i in range(resumed + 200)]
    write(run, 1, *steps, *checkpoints, segment_bytes=50_000)
    if not late:
        read_all(reader)
        assert newest() == (resumed + 199, (resumed + 199, 1.0))
    write(run, 2, start(2), ResumedRecord(attempt=2, time=2e9, step=resumed))
    before = StepRows(reader.metrics, ["loss"])
    reader.poll(limit_s=10)
    assert before.outdated is not late
    assert newest() == (resumed, (resumed, 1.0))
    again = range(resumed + 1, resumed + 151)
    write(run, 2, *(step(i, attempt=2, loss=5.0) for i in again), segment_bytes=50_000)
    read_all(reader)
    fresh = RunReader(run)
    read_all(fresh)
    expected = [1.0] * (resumed + 1) + [5.0] * 150
    for each in (reader, fresh):
        assert losses(each) == expected
        assert rows(each) == list(enumerate(expected))
    assert [record.step for record in reader.metrics.recent(400)] == list(range(resumed + 151))
    assert {record.path for record in reader.metrics.events.checkpoints} == {"0", str(resumed)}


def test_killed_writer_leaves_whole_records(run: RunDirectory) -> None:
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
        # as if it had died in the middle of its write, which was longer than a block
        torn = b'{"kind":"step","attempt":1,"ti' * 5000
        append(list(segments(run.metrics_dir).values())[-1], torn)
    assert len(steps) >= 1500
    assert steps == list(range(len(steps)))  # each once, in order
    MetricsWriter(run, 6)
    assert list(segments(run.metrics_dir).values())[-1].read_bytes().endswith(b"}\n")
    fresh = RunReader(run)
    read_all(fresh)
    for each in (reader, fresh):
        assert each.metrics.latest is not None
        assert each.metrics.latest.step >= steps[-1]
        assert losses(each) == [float(i) for i in range(each.metrics.latest.step + 1)]


def test_full_disk_does_not_damage_the_next_record(run: RunDirectory) -> None:
    writer = write(run, 1, step(0))
    size = segments(run.metrics_dir)[1].stat().st_size
    with full_disk(size + 100), pytest.raises(OSError, match="large"):
        writer.append(step(1))
    writer.append(step(2))
    assert read_all(RunReader(run)) == [step(0), step(2)]


def test_a_poll_is_bounded_and_says_what_is_left(run: RunDirectory) -> None:
    """What is left may be newer records, or only earlier ones."""
    reader = RunReader(run)
    assert (read_all(reader), rows(reader), losses(reader)) == ([], [], [])
    assert reader.metrics.latest is None
    write(run, 1, *map(step, range(100)))
    write(run, 2, *(step(number, attempt=2) for number in range(100, 400)))
    metrics = MetricsReader(run)
    progress = metrics.poll(limit_records=100, limit_s=10.0)
    assert (len(progress.records), progress.more, progress.behind) == (100, True, True)
    while (progress := metrics.poll(limit_records=1000, limit_s=0.0)).behind:
        continue
    assert progress.more


def test_writing_does_not_bring_a_deleted_run_back(run: RunDirectory) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError):
        MetricsWriter(run, 1)
    with pytest.raises(FileNotFoundError):
        SampleWriter(run, "host")
    assert not run.path.exists()


def write_hundreds(run: RunDirectory, *attempts: int) -> None:
    """Write the steps of some attempts: of the first those from 100 to 199, and so on."""
    for attempt in attempts:
        first = 100 * attempt
        write(run, attempt, *(step(s, attempt=attempt) for s in range(first, first + 100)))


def test_an_earlier_segment_that_cannot_be_read_is_left_out(run: RunDirectory) -> None:
    write_hundreds(run, 1, 2, 3)
    second = segments(run.metrics_dir)[2]
    second.unlink()
    second.symlink_to(second)  # opening it fails, also for root
    reader = completely(run)
    assert numbers(reader) == [*range(100, 200), *range(300, 400)]
    assert sum(map(len, StepRows(reader, ["loss"]).read(60.0))) == 200


def test_a_segment_that_appears_late_is_read(run: RunDirectory) -> None:
    """And the newest is still followed."""
    write_hundreds(run, 1, 2)
    first, newest = segments(run.metrics_dir).values()
    late = first.rename(first.with_name("not-copied-yet"))
    reader = completely(run)
    late.rename(first)
    drawn = StepRows(reader, ["loss"])
    assert reader.poll(limit_records=1000, limit_s=10.0).records == ()
    assert drawn.outdated
    append(newest, encode_line(step(300, attempt=2)))
    assert reader.poll(limit_records=1000, limit_s=10.0).records == (step(300, attempt=2),)
    assert numbers(reader) == [*range(100, 301)]


def test_the_newest_warning_is_kept(run: RunDirectory) -> None:
    for attempt in (1, 2):
        warnings = [WarningRecord(attempt=attempt, time=1e9, message=str(at)) for at in range(25)]
        write(run, attempt, start(attempt), *warnings)
    events = completely(run).events
    assert (events.start, events.warning) == (start(2), warnings[-1])


def test_segment_that_fails_to_close_costs_no_record(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system may; its descriptor is free, and may be another file's."""
    writer = write(run, 1, step(1), segment_bytes=1000)
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
    assert numbers(completely(run)) == [1, *range(3, 9)]
