"""A job as Slurm's commands list it."""

from __future__ import annotations

from msgspec import Struct

_NOTHING = frozenset(("", "N/A", "None", "(null)", "Unknown", "None assigned"))


class Job(Struct, frozen=True, kw_only=True):
    """A job as ``squeue`` or ``sacct`` lists it."""

    id: str
    state: str
    """``PENDING``, ``RUNNING``, ``NODE_FAIL`` ..."""
    reason: str = ""
    start: float | None = None
    """When it started, or is expected to, in seconds since the epoch."""
    nodes: str = ""
    folder: str = ""
    """Its working folder."""


def word(text: str) -> str:
    """Return a word of Slurm's; empty if it stands for nothing."""
    return "" if text in _NOTHING else text
