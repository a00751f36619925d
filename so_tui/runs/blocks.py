"""Steps in blocks: what charts need of BLOCK_STEPS consecutive steps, however many records there are.

A block ends at a multiple of BLOCK_STEPS. So blocks are the same whoever makes them and wherever a segment or an attempt begins, and the
mean of as many steps as one or more blocks have is exact at their ends. Blocks are rows of columns of doubles:

    first, last      first and last step with a record
    records          number of records
    offset           position in the segment of the first one
    METRIC.min, METRIC.max, METRIC.last, METRIC.sum, METRIC.finite
                     least and greatest finite value, last value, sum and number of the finite values
    METRIC.ema50 ... METRIC.ema99
                     sum of the finite values, each times a weight (0.50 ... 0.99) to the power of how many come after it: what an
                     exponential moving average with that weight needs to be exact at the ends of blocks
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Any

import msgspec

from so_tui.runs.records import StepRecord

BLOCK_STEPS = 50
POSITIONS = ("first", "last", "records", "offset")
PARTS = ("min", "max", "last", "sum", "finite")
EMA_WEIGHTS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Weights of exponential moving averages that are exact at the ends of blocks."""
WEIGHTED = {weight: f"ema{100 * weight:.0f}" for weight in EMA_WEIGHTS}
"""Parts with the weighted sums, by weight."""
_WEIGHTS = {part: weight for weight, part in WEIGHTED.items()}
_POWERS = {
    weight: tuple(weight**later for later in range(BLOCK_STEPS - 1, -1, -1))
    for weight in EMA_WEIGHTS
}

Columns = dict[str, "array[float]"]


def _is_number(kind: Any) -> bool:
    return kind in (int, float, int | None, float | None)


METRICS: tuple[str, ...] = tuple(
    field.name
    for field in msgspec.structs.fields(StepRecord)
    if field.name not in ("v", "attempt", "step") and _is_number(field.type)
)
"""Numeric fields of a step record that can be charted."""

_MISSING = {
    "min": math.inf,
    "max": -math.inf,
    "last": math.nan,
    "sum": 0.0,
    "finite": 0.0,
    **dict.fromkeys(_WEIGHTS, 0.0),
}


def block_end(step: float) -> int:
    """Return the last step of the block that a step belongs to."""
    return -(-int(step) // BLOCK_STEPS) * BLOCK_STEPS


def part_names(metrics: Iterable[str], weights: Iterable[float] = ()) -> list[str]:
    """Return the names of the columns of some metrics, with the sums of some of EMA_WEIGHTS."""
    parts = (*PARTS, *(WEIGHTED[weight] for weight in weights))
    return [f"{metric}.{part}" for metric in metrics for part in parts]


def no_blocks(metrics: Iterable[str], weights: Iterable[float] = ()) -> Columns:
    """Return the columns of no blocks."""
    return {name: array("d") for name in (*POSITIONS, *part_names(metrics, weights))}


def missing(name: str, rows: int) -> array[float]:
    """Return a column of a metric that was not recorded."""
    return array("d", [_MISSING[name.rpartition(".")[2]]]) * rows


def total(values: Iterable[float]) -> float:
    """Return the exact sum of finite values, rounded once; infinity or NaN where it is too large."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def metric_values(records: Sequence[StepRecord], metric: str) -> list[float]:
    """Return the values of a metric; NaN where it was not measured."""
    return [
        math.nan if value is None else float(value)
        for value in (getattr(record, metric) for record in records)
    ]


def weighted_sum(values: Sequence[float], weight: float) -> float:
    """Return the sum of a block's finite values, each times one of EMA_WEIGHTS to the power of how many come after it."""
    return float(sum(map(mul, values, _POWERS[weight][BLOCK_STEPS - len(values) :])))


def append_block(
    columns: Columns,
    metrics: Iterable[str],
    records: Sequence[StepRecord],
    offset: float,
    weights: Sequence[float] = (),
) -> None:
    """Append the block of these records, at least one."""
    for name, position in zip(
        POSITIONS, (records[0].step, records[-1].step, len(records), offset), strict=True
    ):
        columns[name].append(position)
    for metric in metrics:
        values = metric_values(records, metric)
        finite = [value for value in values if math.isfinite(value)]
        parts = (
            (min(finite), max(finite), values[-1], total(finite), len(finite))
            if finite
            else (math.inf, -math.inf, values[-1], 0.0, 0.0)
        )
        for part, value in zip(PARTS, parts, strict=True):
            columns[f"{metric}.{part}"].append(value)
        for weight in weights:
            columns[f"{metric}.{WEIGHTED[weight]}"].append(weighted_sum(finite, weight))


def blocks_of(
    records: Iterable[StepRecord], metrics: Sequence[str], weights: Sequence[float] = ()
) -> Columns:
    """Return the blocks of records in step order."""
    columns, block = no_blocks(metrics, weights), list[StepRecord]()
    for record in records:
        if block and block_end(record.step) != block_end(block[0].step):
            append_block(columns, metrics, block, 0.0, weights)
            block = []
        block.append(record)
    if block:
        append_block(columns, metrics, block, 0.0, weights)
    return columns


def extend(columns: Columns, more: Mapping[str, array[float]], start: int, stop: int) -> None:
    """Append the rows ``[start, stop)`` of later blocks; a first one that continues the last block is merged into it."""
    if (
        start < stop
        and columns["last"]
        and block_end(columns["last"][-1]) == block_end(more["first"][start])
    ):
        for name, column in columns.items():
            metric, _, part = name.rpartition(".")
            if part in _WEIGHTS:
                kept = _WEIGHTS[part] ** max(0.0, more[f"{metric}.finite"][start])
                column[-1] = kept * column[-1] + more[name][start]
            else:
                column[-1] = _merged(part, column[-1], more[name][start])
        start += 1
    for name, column in columns.items():
        column.extend(more[name][start:stop])


def _merged(part: str, earlier: float, later: float) -> float:
    match part:
        case "first" | "offset":
            return earlier
        case "last":
            return later
        case "min":
            return min(earlier, later)
        case "max":
            return max(earlier, later)
    return earlier + later  # records, sum, finite
