"""All kinds of faults."""

from __future__ import annotations

from benchmarks.faults.kind import Kind
from benchmarks.faults.kinds import damage, environment, requests, signals

KINDS: tuple[Kind, ...] = (*signals.KINDS, *requests.KINDS, *damage.KINDS, *environment.KINDS)


def matching(part: str) -> tuple[Kind, ...]:
    """Return the kinds whose group this is, or whose name contains it; all for an empty text."""
    return tuple(kind for kind in KINDS if part == kind.group or part in kind.name)
