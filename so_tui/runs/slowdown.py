"""That a run is slower than its plan, and why: values that a supervisor finds and ``state.json`` carries.

``so_tui/launch/slow_causes.py`` finds causes, ``so_tui/launch/slow_text.py`` has the words.
"""

from __future__ import annotations

from msgspec import Struct


class Cause(Struct, frozen=True, kw_only=True):
    """One thing that makes steps longer than planned."""

    code: str
    """``slow_causes.CauseCode``; newer versions may have more."""
    seconds: float
    """Of a step, the most that it explains."""
    measured: float
    """In the unit of the code: misplaced ranks for ``binding``, a share of memory for ``memory-node``, a share of core time for
    ``foreign-load``, MHz for ``clocks``, bytes per second for ``copies`` and ``adam``, seconds for ``data``."""
    planned: float
    rank: int = 0
    """Of ``binding`` and ``memory-node``: the first, or the worst, of the ranks that are misplaced."""
    processes: tuple[str, ...] = ()
    """Of ``foreign-load``: the names of the busiest, which their owners chose."""
    nice: int = 0
    """Of ``foreign-load``: the lowest priority of the run's processes, to which other processes are preferred."""


class Slowdown(Struct, frozen=True, kw_only=True):
    """Steps have taken noticeably longer than planned for a while."""

    step: int
    """The last step that was looked at."""
    step_s: float
    """Median over that while."""
    planned_s: float
    causes: tuple[Cause, ...] = ()
    """Most likely first; empty if nothing that is measured explains it."""
