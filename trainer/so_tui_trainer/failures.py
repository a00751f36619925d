"""Why a run failed: a code, a reason for people, and what to do next."""

from __future__ import annotations

import errno

from so_tui.plan.plan import Plan
from so_tui.plan.remedies import memory_advice
from so_tui.runs.state import Failure
from so_tui.spec import InputError, RunSpec, SoTuiError, first_line
from so_tui.units import thousands
from superoffload.errors import NonFiniteGradientError, OffloadError, WorkerLostError

_LOWER_RATE = (
    "Lower `train.learning_rate`, leave `train.gradient_clipping` on, inspect the data around that "
    "step; then resume from the last checkpoint."
)
SUPERSEDED = "superseded"
"""Code of the error of an attempt that counted as lost, once a newer one has been started."""
LESS_HOST_MEMORY = "lower `offload.ratio`, use more GPUs, or free host memory."
ALLOCATION_FAILED = ("DefaultCPUAllocator", "Cannot allocate memory", "failed to map segment")
_CONNECTION_LOST = ("closed by peer", "reset by peer")


class TrainingError(SoTuiError):
    """An error with a code, a reason and a suggestion."""

    def __init__(self, code: str, reason: str, suggestion: str = "") -> None:
        self.code, self.reason, self.suggestion = code, reason, suggestion
        super().__init__(f"{reason}. {suggestion}" if suggestion else reason)


class NonFiniteError(TrainingError):
    """A loss or a gradient is not finite: the weights must not be saved.

    Attributes:
        step: The first step for which this holds.
    """

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        super().__init__(
            "not-finite", f"the {what} was not finite at step {thousands(step)}", _LOWER_RATE
        )


def explain(
    error: BaseException, spec: RunSpec, rank: int, step: int, plan: Plan | None
) -> Failure:
    """Explain an exception of a rank.

    Args:
        error: The exception. The explanation of an unknown one is its type and message; the log has
            the traceback.
        spec: The run's spec, for suggestions.
        rank: The rank that failed.
        step: The last completed step.
        plan: What is to be trained, for suggestions.
    """
    found = _explained(error, spec, plan)
    return Failure(
        rank=rank, step=step, code=found.code, reason=found.reason, suggestion=found.suggestion
    )


def _explained(error: BaseException, spec: RunSpec, plan: Plan | None) -> TrainingError:
    """Return the error with the code, the reason and the suggestion for an exception."""
    match error:
        case TrainingError():
            return error
        case InputError():
            reasons = "; ".join(
                f"{problem.field} = {problem.value}: {problem.message}"
                for problem in error.problems
            )
            return TrainingError(error.problems[0].code, reasons, error.problems[0].remedy)
        case WorkerLostError(code="worker-ended"):
            return engine_failure(error, memory_advice(spec, "node", plan).message)
        case OffloadError():
            return engine_failure(error)
        case SoTuiError():  # The message includes what to do.
            return TrainingError("error", str(error))
        case MemoryError() | OSError(errno=errno.ENOMEM):
            return _host_out_of_memory(spec, plan)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            where = f" ({error.filename})" if error.filename else ""
            return TrainingError(
                "disk-full",
                f"the disk is full{where}",
                "Free some space there, then resume the run. A new run can set `checkpoint.folder` "
                "to a larger disk.",
            )
        case _ if type(error).__name__ == "OutOfMemoryError":
            return TrainingError(
                "gpu-out-of-memory",
                f"the GPU ran out of memory: {first_line(error)}",
                memory_advice(spec, "gpu", plan).message,
            )
        # torch's allocator and gloo have no types of their own for these.
        case RuntimeError() if any(part in str(error) for part in ALLOCATION_FAILED):
            return _host_out_of_memory(spec, plan)
        case RuntimeError() if any(part in str(error) for part in _CONNECTION_LOST):
            return TrainingError(
                "rank-lost",
                "another rank was lost",
                "See the end of the log. If the host ran out of memory, the kernel killed its "
                "largest process.",
            )
    return TrainingError(
        "unexpected", f"{type(error).__name__}: {first_line(error)}", "See the log for details."
    )


def engine_failure(error: OffloadError, less_memory: str = LESS_HOST_MEMORY) -> TrainingError:
    """Return the training error for an error of the engine.

    Args:
        error: The error.
        less_memory: What would need less host memory.
    """
    match error:
        case NonFiniteGradientError():
            return TrainingError("not-finite", str(error), _LOWER_RATE)
        case WorkerLostError(code="worker-stuck"):
            advice = (
                "Give CPU Adam more cores (`offload.cpu_adam_cores_fraction`), and see `so-tui "
                "doctor`."
            )
            return TrainingError("adam-timeout", str(error), advice)
        case WorkerLostError():
            return TrainingError(
                "adam-worker-lost",
                str(error),
                f"If the kernel killed it for lack of memory (see `dmesg`): {less_memory}",
            )
    return TrainingError(error.code, str(error))  # The message includes what to do.


def _host_out_of_memory(spec: RunSpec, plan: Plan | None) -> TrainingError:
    return TrainingError(
        "host-out-of-memory",
        "this host ran out of memory",
        memory_advice(spec, "node", plan).message,
    )
