"""Evidence from outside the supervisor about how an attempt ended: failures that ranks wrote, and the plan's advice."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import msgspec

from so_tui.launch import locks
from so_tui.launch.host_check import HostDiffersError
from so_tui.launch.outcome import Failure, Outcome
from so_tui.launch.outcome_text import RunFacts
from so_tui.plan.memory_advice import less_gpu_memory, less_host_memory
from so_tui.plan.types import GivenMemory
from so_tui.runs.outcome import OutcomeCode
from so_tui.spec import RunSpec
from so_tui.trust.decoding import read_json


def failures_in(folder: Path) -> tuple[Failure, ...]:
    """Read what the ranks wrote about their failures, the earliest first."""
    found = []
    for file in folder.glob("failure.rank*.json"):
        # Incomplete if the rank was killed while it wrote. Whatever else is wrong with the file, the final state must be written.
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append((file.stat().st_mtime_ns, read_json(file, Failure)))
    return tuple(failure for _, failure in sorted(found, key=lambda item: item[0]))


def with_advice(outcome: Outcome, spec: RunSpec, facts: RunFacts, given: GivenMemory) -> RunFacts:
    """Add the plan's advice where the outcome calls for it. The final state does not depend on it: without it, the advice is general."""
    if outcome.reported:
        return facts  # with the trainer's own advice
    try:
        match outcome.code:
            case OutcomeCode.OUT_OF_GPU_MEMORY:
                return msgspec.structs.replace(facts, less_gpu_memory=less_gpu_memory(spec, given))
            case OutcomeCode.OUT_OF_HOST_MEMORY | OutcomeCode.KILLED_FOR_MEMORY:
                return msgspec.structs.replace(
                    facts, less_host_memory=less_host_memory(spec, given)
                )
    except Exception as error:  # noqa: BLE001 - the final state must be written in any case
        print(
            f"no advice from the plan: {type(error).__name__}: {error}", file=sys.stderr, flush=True
        )
    return facts


def not_started(error: Exception) -> Outcome:
    code = OutcomeCode.NOT_STARTED
    if isinstance(error, locks.LockTakenError):
        code = OutcomeCode.GPU_IN_USE
    elif isinstance(error, HostDiffersError):
        code = OutcomeCode.HOST_DIFFERS
    return Outcome(state="failed", code=code, detail="; ".join(str(error).splitlines()))
