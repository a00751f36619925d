"""What ends a run before its end, in words for people: what happened, and what to do next."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.plan.alternatives import less_gpu_memory, less_host_memory
from so_tui.runs import RunDirectory
from so_tui.spec import InputError, RunSpec, SoTuiError
from superoffload.errors import NonFiniteGradientError, WorkerLostError

_NO_HOST_MEMORY = "this host ran out of memory"
_LOWER_RATE = (
    "Lower `train.learning_rate`, keep `train.gradient_clipping` on, look at the data around that step; "
    "then resume from the last checkpoint."
)


class Failure(Struct, frozen=True, kw_only=True):
    """Why a rank failed; written for the others as ``failure.rank<R>.json`` in the attempt's folder."""

    rank: int
    reason: str
    suggestion: str = ""
    step: int = 0


class TrainingError(SoTuiError):
    """A failure with its own words."""

    def __init__(self, reason: str, suggestion: str = "") -> None:
        self.reason, self.suggestion = reason, suggestion
        super().__init__(f"{reason}. {suggestion}" if suggestion else reason)


class NonFiniteError(TrainingError):
    """The weights are spoilt: nothing may be saved from them."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(
            f"the {what} was not finite at step {step}",
            _LOWER_RATE,
        )


def explain(error: BaseException, spec: RunSpec, rank: int, step: int) -> Failure:
    """An exception in words. Unknown ones keep their type and message; the log has the traceback."""
    reason, suggestion = _words(error, spec)
    return Failure(rank=rank, reason=reason, suggestion=suggestion, step=step)


def report(failure: Failure, run: RunDirectory, attempt: int) -> None:
    """Leave the failure where rank 0 and the supervisor find it."""
    _path(run, attempt, failure.rank).write_bytes(msgspec.json.encode(failure))


def reported(run: RunDirectory, attempt: int, ranks: int) -> Failure | None:
    """The failure that some rank left first; None when no rank did. Later ones are mostly its consequences."""
    paths = [path for rank in range(ranks) if (path := _path(run, attempt, rank)).exists()]
    if not paths:
        return None
    return msgspec.json.decode(min(paths, key=lambda path: path.stat().st_mtime_ns).read_bytes(), type=Failure)


def _path(run: RunDirectory, attempt: int, rank: int) -> Path:
    return run.attempt_dir(attempt) / f"failure.rank{rank}.json"


def _words(error: BaseException, spec: RunSpec) -> tuple[str, str]:
    match error:
        case TrainingError():
            return error.reason, error.suggestion
        case InputError():
            return "; ".join(f"{problem.field} = {problem.value}: {problem.message}" for problem in error.problems), error.problems[
                0
            ].remedy
        case NonFiniteGradientError():
            return str(error), _LOWER_RATE
        case WorkerLostError():
            return str(error), f"If the kernel ended it for want of memory (`dmesg` says so): {less_host_memory(spec)}"
        case SoTuiError():  # its message says what to do
            return str(error), ""
        case MemoryError() | OSError(errno=errno.ENOMEM):
            return _NO_HOST_MEMORY, less_host_memory(spec)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            where = f" ({error.filename})" if error.filename else ""
            return f"the disk is full{where}", "Make room there, then resume it. A new run can set `checkpoint.folder` to a larger disk."
        case _ if type(error).__name__ == "OutOfMemoryError":
            return f"the GPU ran out of memory: {_first_line(error)}", less_gpu_memory(spec)
    text = str(error)
    if "DefaultCPUAllocator" in text or "Cannot allocate memory" in text:
        return _NO_HOST_MEMORY, less_host_memory(spec)
    if "closed by peer" in text or "reset by peer" in text:
        return "another rank was lost", "Look at the end of the log; the kernel ends the largest process of a host that is out of memory."
    return f"{type(error).__name__}: {_first_line(error)}", "The log has the details."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
