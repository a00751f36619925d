"""How many positions a micro-batch computes when documents lie end to end: few different numbers, so that memory is reused."""

from __future__ import annotations

_BUCKETS = 64
"""Sizes of a micro-batch at most. The padding at its end is less than this part of it, half of that on average."""
_SMALLEST = 8
"""Tokens of the smallest bucket: sizes that are a multiple of it suit matrix products."""


def bucket_tokens(capacity: int) -> int:
    """Return the multiple to which the computed positions of a micro-batch of ``capacity`` positions are rounded up."""
    return max(_SMALLEST, -(-capacity // _BUCKETS // _SMALLEST) * _SMALLEST)


def computed_tokens(useful: int, capacity: int, parts: int = 1) -> int:
    """Return the positions that are computed for ``useful`` tokens, in so many equal parts."""
    room = capacity // parts
    bucket = bucket_tokens(room)
    return parts * min(room, -(-useful // (parts * bucket)) * bucket)
