"""The metrics of a run of any length, made of one real segment: what as many steps would have
written, without writing each.
"""

from __future__ import annotations

import os
import re
import zlib
from array import array

import msgspec

from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.index import index_path, segments
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import StepRecord
from so_tui.ui.charts.series import FollowedSteps
from tests.support.records import step_record

SEGMENT_STEPS = 5000
FIRST = 1_000_001
"""The first step: all numbers of steps have as many digits, so that all segments have as many
bytes.
"""


def loss_at(step: int) -> float:
    """Return the loss of a step; one in every 5,000 steps has none."""
    place = (step - FIRST) % SEGMENT_STEPS
    return float("nan") if place == 1234 else 1.0 + (place * 7919 % 4999) / 1000


def write_long_run(run: RunDirectory, count: int, real_segments: int = 3) -> int:
    """Write ``count`` steps in segments of SEGMENT_STEPS, the last one without an index. Return the
    last step.

    The records of all but the last ``real_segments`` carry the steps of the first segment: only
    their indexes are to be read.
    """
    writer = MetricsWriter(run, 1, segment_bytes=1 << 24)
    for step in range(FIRST, FIRST + SEGMENT_STEPS):
        writer.append(step_record(step, loss=loss_at(step), time=1e9 + step))
    writer.close()
    (first,) = segments(run.metrics_dir).values()
    content, index = first.read_bytes(), index_path(first).read_bytes()
    parts = count // SEGMENT_STEPS
    for part in range(1, parts):
        path = first.with_name(f"{part + 1:06d}.jsonl")
        if part < parts - real_segments:
            os.link(first, path)
        else:
            path.write_bytes(moved_lines(content, part * SEGMENT_STEPS))
        if part < parts - 1:
            index_path(path).write_bytes(_moved_index(index, part * SEGMENT_STEPS))
    return FIRST + parts * SEGMENT_STEPS - 1


def moved_lines(content: bytes, steps: int) -> bytes:
    """Return the lines of step records with their steps and times moved on."""
    content = re.sub(
        rb'"step":(\d+)', lambda found: b'"step":%d' % (int(found[1]) + steps), content
    )
    return re.sub(rb'"time":(\d+)', lambda found: b'"time":%d' % (int(found[1]) + steps), content)


def _moved_index(content: bytes, steps: int) -> bytes:
    line, _, columns = content.partition(b"\n")
    header = msgspec.json.decode(line)
    rows, moved = header["rows"], array("d", columns)
    for at, name in enumerate(header["columns"]):
        if name in ("first", "last", "time.min", "time.max", "time.last"):
            for row in range(at * rows, (at + 1) * rows):
                moved[row] += steps
    header["crc32"] = zlib.crc32(moved)
    return msgspec.json.encode(header) + b"\n" + moved.tobytes()


def read_on(reader: MetricsReader, steps: FollowedSteps, span: int, limit_s: float = 0.1) -> bool:
    """Poll once. Return whether there is more."""
    progress = reader.poll(limit_records=5000, limit_s=limit_s)
    steps.take(
        [record for record in progress.records if isinstance(record, StepRecord)],
        redraw=progress.redraw,
    )
    steps.update(span)
    return progress.more
