"""Records to lines and back.

JSON has no NaN or infinity, and a loss that diverged must survive: non-finite floats are written as the strings ``"nan"``, ``"inf"``
and ``"-inf"`` and read back as floats (``null`` means: not measured).
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
    """One JSON object and its newline."""
    line = _encoder.encode(record)
    if b"null" in line:  # msgspec writes non-finite floats as null, like None: only then look closer
        line = _encoder.encode(_spelled(msgspec.to_builtins(record)))
    return line + b"\n"


def decode_metric(line: bytes) -> MetricRecord | None:
    """The record of a line; None for a torn line or a kind this version does not know."""
    try:
        return _metrics.decode(line)
    except msgspec.DecodeError:
        return None


def decode_sample(line: bytes) -> Sample | None:
    """The sample of a line; None for a torn line."""
    try:
        return _samples.decode(line)
    except msgspec.DecodeError:
        return None


def decode_rollup(line: bytes) -> Rollup | None:
    """The roll-up of a line; None for a torn line."""
    try:
        return _rollups.decode(line)
    except msgspec.DecodeError:
        return None


def _spelled(value: Any) -> Any:
    """The same tree with every non-finite float as a string."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
