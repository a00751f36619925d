"""The metrics of a run of any length, made of one real segment."""

from __future__ import annotations

import re

from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.segments import segments
from so_tui.ui.charts.series import FollowedSteps, Wanted
from tests.support.records import step_record

_RATES = ("useful_tokens_per_s_total", "model_tflops_per_gpu", "mfu", "step_s")
WANTED = Wanted(("loss", "gradient_norm", "learning_rate", *_RATES), ("loss", "gradient_norm"))
"""What pages of charts need."""
SEGMENT_STEPS = 5000
FIRST = 1_000_001
"""The first step: all numbers of steps have as many digits, and segments as many bytes."""


def loss_at(step: int) -> float:
    """Return the loss of a step; one in every 5,000 steps has none."""
    place = (step - FIRST) % SEGMENT_STEPS
    return float("nan") if place == 1234 else 1.0 + (place * 7919 % 4999) / 1000


def write_long_run(run: RunDirectory, count: int) -> int:
    """Write ``count`` steps in segments of SEGMENT_STEPS. Return the last step."""
    writer = MetricsWriter(run, 1, segment_bytes=1 << 24)
    for step in range(FIRST, FIRST + SEGMENT_STEPS):
        writer.append(step_record(step, loss=loss_at(step), time=1e9 + step))
    writer.close()
    (first,) = segments(run.metrics_dir).values()
    content, parts = first.read_bytes(), count // SEGMENT_STEPS
    for part in range(1, parts):
        path = first.with_name(f"{part + 1:06d}.jsonl")
        path.write_bytes(moved_lines(content, part * SEGMENT_STEPS))
    return FIRST + parts * SEGMENT_STEPS - 1


def moved_lines(content: bytes, steps: int) -> bytes:
    """Return the lines of step records with their steps and times moved on."""
    moved = lambda found: b'"%s":%d' % (found[1], int(found[2]) + steps)  # noqa: E731
    return re.sub(rb'"(step|time)":(\d+)', moved, content)


def read_on(
    reader: MetricsReader,
    steps: FollowedSteps,
    span: int,
    limit_s: float = 0.1,
    wanted: Wanted = WANTED,
) -> bool:
    """Poll once. Return whether there is more."""
    more = reader.poll(limit_records=5000, limit_s=limit_s, earlier=False).more
    return steps.read(wanted, span, limit_s) or more
