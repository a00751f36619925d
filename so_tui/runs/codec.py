"""Encode records as lines and decode them.

JSON has no NaN or infinity, but a diverged loss must be recorded: non-finite floats are written as the strings ``"nan"``, ``"inf"`` and
``"-inf"`` and read back as floats. ``null`` means that a value was not measured.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec

from so_tui.runs.records import MetricRecord
from so_tui.runs.sample import Rollup, Sample
from so_tui.trust.decoding import decoded

_LARGEST = 2**53
"""The largest integer of a record: larger ones are not exact as floats, with which charts are drawn."""
_LATEST = 1e11
"""Unix seconds of the year 5138, before the years that Python's ``datetime`` cannot show."""

_COUNTS = {
    kind: tuple(
        field.name for field in msgspec.structs.fields(kind) if field.type in (int, int | None)
    )
    for kind in get_args(MetricRecord)
}
"""Fields of each kind of record that are integers."""

_encoder = msgspec.json.Encoder()
_metrics: msgspec.json.Decoder[MetricRecord] = msgspec.json.Decoder(MetricRecord, strict=False)
_samples = msgspec.json.Decoder(Sample)
_rollups = msgspec.json.Decoder(Rollup)


def encode_line(record: msgspec.Struct) -> bytes:
    """Return a record as one JSON object with a newline."""
    line = _encoder.encode(record)
    if b"null" in line:  # msgspec writes non-finite floats as null, like None
        line = _encoder.encode(_spelled(msgspec.to_builtins(record)))
    return line + b"\n"


def decode_metric(line: bytes) -> MetricRecord | None:
    """Return the record of a line; None for an incomplete or implausible line or an unknown kind."""
    try:
        record = decoded(_metrics, line)
    except msgspec.DecodeError:
        return None
    return record if _plausible(record) else None


def decode_sample(line: bytes) -> Sample | None:
    """Return the sample of a line; None for an incomplete line."""
    try:
        sample = decoded(_samples, line)
    except msgspec.DecodeError:
        return None
    return sample if is_time(sample.time) else None


def decode_rollup(line: bytes) -> Rollup | None:
    """Return the roll-up of a line; None for an incomplete line."""
    try:
        rollup = decoded(_rollups, line)
    except msgspec.DecodeError:
        return None
    return rollup if is_time(rollup.mean.time) else None


def _plausible(record: MetricRecord) -> bool:
    """Return whether the time and all integers of a record are ones that a run can have: readers show times and compute with steps."""
    if not is_time(record.time):
        return False
    for name in _COUNTS[type(record)]:  # a loop, since this is half of what reading a record costs
        value = getattr(record, name)
        if value is not None and not 0 <= value <= _LARGEST:
            return False
    return True


def is_count(number: int) -> bool:
    """Return whether a number is one that a run can have."""
    return 0 <= number <= _LARGEST


def is_time(time: float) -> bool:
    """Return whether a time can be shown as a date."""
    return 0 <= time < _LATEST


def _spelled(value: Any) -> Any:
    """Return the same value with every non-finite float as a string."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
