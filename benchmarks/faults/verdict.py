"""What must hold after every fault, as a pure function of what was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.faults.kind import Told

Losses = Mapping[int, frozenset[str]]
"""Losses by step, as hexadecimal floats: several where attempts that repeat a step differ."""


@dataclass(frozen=True)
class Expected:
    """What is right after a fault."""

    told: frozenset[Told]
    refusals: frozenset[str]
    losses: Losses
    """Of a run that nothing disturbed."""
    loses_records: bool
    resumed_from: int
    """The earliest step from which the run may be resumed: that of the newest checkpoint that is
    not damaged.
    """
    starter_exit: frozenset[int] | None


@dataclass(frozen=True)
class Seen:
    """What was seen after a fault, and after the run was resumed."""

    reported: str
    """The state that ``runs --json`` gave once the fault was over."""
    recorded: Told
    """State and code of ``state.json``; empty where it could not be read."""
    refused: tuple[str, ...]
    """Codes of the first resume."""
    end: str
    """The state at the very end."""
    losses: Losses
    resumed_from: int | None = None
    """The step after which training continued; None if the run was not resumed."""
    trained_twice: tuple[int, ...] = ()
    """Steps that one attempt recorded more than once."""
    orphans: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    """Incomplete checkpoints in the folder of the finished run."""
    tracebacks: tuple[str, ...] = ()
    """Commands and logs of supervisors with a Python traceback."""
    starter_exit: int | None = None


def problems(expected: Expected, seen: Seen) -> tuple[str, ...]:
    """Return what did not hold, as codes; empty if everything did."""
    recorded_final = seen.recorded[0] in {
        state for state, _ in expected.told
    } and seen.recorded != ("", "")
    checks = {
        "wrong-state": seen.reported not in {state for state, _ in expected.told},
        "wrong-code": recorded_final and seen.recorded not in expected.told,
        "not-refused": bool(expected.refusals) and not expected.refusals & set(seen.refused),
        "refused": not expected.refusals and bool(seen.refused),
        "not-finished": seen.end != "finished",
        "loss-differs": any(
            found != expected.losses.get(step) for step, found in seen.losses.items()
        ),
        "steps-missing": not expected.loses_records and set(seen.losses) != set(expected.losses),
        "steps-repeated": bool(seen.trained_twice),
        "resumed-too-early": seen.resumed_from is not None
        and seen.resumed_from < expected.resumed_from,
        "orphan-process": bool(seen.orphans),
        "shared-memory-left": bool(seen.shared_memory),
        "lock-held": bool(seen.locks),
        "partial-checkpoint-left": bool(seen.partial),
        "traceback": bool(seen.tracebacks),
        "wrong-exit-code": expected.starter_exit is not None
        and seen.starter_exit not in expected.starter_exit,
    }
    return tuple(code for code, broken in checks.items() if broken)
