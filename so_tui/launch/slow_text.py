"""Sentences about a run that is slower than its plan, for the dashboard and ``run --plain``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from so_tui.launch.placement import IDLE_NICE
from so_tui.runs.slowdown import Cause, Slowdown
from so_tui.trust.printable import brief_line
from so_tui.units import bandwidth, duration, percent, plural, thousands

_LONGEST_NAME = 20
_MOST = 8
"""Causes that are read: more than there are."""
_REMEDIES = {
    "binding": "Something moved its processes (`taskset`, a cpuset): the dashboard shows where they are. Start the run again.",
    "memory-node": "Its node was full, or binding failed: `so-tui doctor` shows what fills it. Start the run again once it is free.",
    "foreign-load": "End the other processes on its cores (`top`), or give the run a node of its own.",
    "clocks": "`nvidia-smi -q -d PERFORMANCE` says what limits the clock: heat, power or a setting.",
    "copies": "`so-tui doctor` checks the link between GPU and host; `so-tui calibrate` measures it once the GPU is idle.",
    "adam": "`so-tui doctor` looks for limits of cores and memory; without `SO_TUI_MPAM=on`, a run has no partition for them.",
    "data": "Put the data and so-tui's cache on a faster disk, and look for other load on this host (`top`).",
}


def slowdown_text(found: Slowdown) -> str:
    """Return how slow a run is and why, the most likely cause first."""
    slower = f"slower than planned ({duration(_bounded(found.step_s))} a step, not {duration(_bounded(found.planned_s))})"
    causes = [text for cause in found.causes[:_MOST] if (text := cause_text(cause))]
    if not causes:
        return f"{slower}: nothing that is measured explains it"
    return f"{slower}: {'; also '.join(causes)}"


def slowdown_remedy(found: Slowdown) -> str:
    """Return what helps against the most likely cause."""
    known = (remedy for cause in found.causes[:_MOST] if (remedy := _REMEDIES.get(cause.code)))
    return next(known, "`so-tui plan --probe` measures whether the plan is right.")


def cause_text(cause: Cause) -> str:
    """Return a cause in words; empty for one that this version does not know."""
    measured, planned = _bounded(cause.measured), _bounded(cause.planned)
    match cause.code:
        case "binding":
            more = f" and {plural(round(measured) - 1, 'more rank')}" if measured > 1 else ""
            return f"rank {_rank(cause)}{more} may not run on the planned cores"
        case "memory-node":
            return (
                f"only {percent(min(measured, 1.0))} of rank {_rank(cause)}'s memory is on its node"
            )
        case "foreign-load":
            return " and ".join(_foreign_load(cause, measured))
        case "clocks":
            return f"a GPU runs at {thousands(round(measured))} of {thousands(round(planned))} MHz"
        case "copies":
            return f"copies between GPU and host reach {bandwidth(measured)} instead of {bandwidth(planned)}"
        case "adam":
            return f"Adam moves {bandwidth(measured)} instead of {bandwidth(planned)}"
        case "data":
            return f"each step waits {duration(measured)} for data"
        case _:
            return ""


def _foreign_load(cause: Cause, share: float) -> Iterator[str]:
    names = (
        f" ({', '.join(brief_line(name, _LONGEST_NAME) for name in cause.processes[:2])})"
        if cause.processes
        else ""
    )
    yield f"other processes{names} take {percent(min(share, 1.0))} of its cores' time"
    if cause.nice > 0:
        yield "go first, as it runs at " + (
            f"nice {cause.nice}" if cause.nice < IDLE_NICE else "idle priority"
        )


def _rank(cause: Cause) -> int:
    return int(_bounded(cause.rank))


def _bounded(value: float) -> float:
    """Return a number whose text is short: anybody may have written the state."""
    return min(max(value, 0.0), 1e15) if math.isfinite(value) else 0.0
