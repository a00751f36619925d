"""Text for the screen: the formatters of ``so_tui.units``, and shortening to a width."""

from __future__ import annotations

from so_tui.units import GIB, age, count, duration, mark_duration, memory_of, plural, rate, significant
from so_tui.units import disk_size as disk
from so_tui.units import memory_size as memory

__all__ = [
    "GIB",
    "age",
    "count",
    "disk",
    "duration",
    "mark_duration",
    "memory",
    "memory_of",
    "plural",
    "rate",
    "shorten",
    "shorten_path",
    "significant",
]


def shorten(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` cells, with an ellipsis in place of its end."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def shorten_path(path: str, width: int) -> str:
    """Return ``path`` in at most ``width`` cells, with an ellipsis in place of its start: paths differ at their end."""
    return path if len(path) <= width else "…" + path[len(path) - max(0, width - 1) :]
