"""Encode records as lines and decode them.

JSON has no NaN or infinity, but a diverged loss must be recorded: non-finite floats are written as the strings ``"nan"``, ``"inf"`` and
``"-inf"`` and read back as floats. ``null`` means that a value was not measured.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from so_tui.runs.records import MetricRecord, Rollup, Sample

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
    """Return the record of a line; None for an incomplete line or an unknown kind."""
    try:
        return _metrics.decode(line)
    except msgspec.DecodeError:
        return None


def decode_sample(line: bytes) -> Sample | None:
    """Return the sample of a line; None for an incomplete line."""
    try:
        return _samples.decode(line)
    except msgspec.DecodeError:
        return None


def decode_rollup(line: bytes) -> Rollup | None:
    """Return the roll-up of a line; None for an incomplete line."""
    try:
        return _rollups.decode(line)
    except msgspec.DecodeError:
        return None


def _spelled(value: Any) -> Any:
    """Return the same value with every non-finite float as a string."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
