"""What decides about a step: the norm of its gradients over all parameters and ranks, which shows
whether all are finite, and the policy by which each CPU sub-group is stepped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from superoffload.errors import NonFiniteGradientError
from superoffload.gpu_states import Gradient, SubGroup
from superoffload.transfers import Event, Transfers
from superoffload.worker import GradientSource, Operation

_CLIPPING_EPSILON = 1e-6


class GradientNorm:
    """Sums of squares of a step's gradients, one per sub-group, in double precision.

    They are summed on the GPU while backward runs. Clipping reads them within the step. Otherwise
    they are read a step later: by then they have been copied to the host, and nothing waits for
    them.

    Args:
        sub_groups: All sub-groups of the rank.
        device: Where gradients are.
        transfers: Copies the sums to the host.
        all_reduce: Sums a tensor over all ranks, in place.
        poisons: Whether gradients are already in the optimizer states when their norm is read.
    """

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        device: torch.device,
        transfers: Transfers,
        all_reduce: Callable[[Tensor], None],
        *,
        poisons: bool,
    ) -> None:
        self._sub_groups = sub_groups
        self._transfers = transfers
        self._all_reduce = all_reduce
        self._poisons = poisons
        self._squares = torch.zeros(len(sub_groups), dtype=torch.float64, device=device)
        self._last: tuple[int, Tensor, Event] | None = None
        """The last step's number, its sums on the host, and the event after which they are
        valid.
        """
        self._fault: NonFiniteGradientError | None = None

    def add(self, gradients: Sequence[Gradient]) -> None:
        """Add gradients that the current stream has computed."""
        for index in dict.fromkeys(gradient.sub_group for gradient in gradients):
            values = [
                gradient.values
                for gradient in gradients
                if gradient.sub_group == index and gradient.values.numel()
            ]
            if values:
                norms = torch.stack(torch._foreach_norm(values, 2, dtype=torch.float64))
                self._squares[index] += norms.square().sum()

    def all_rank_squares(
        self, whole: Iterable[tuple[int, Tensor]], by_worker: Mapping[int, float]
    ) -> Tensor:
        """Return the sums of squares over all ranks, one per sub-group, and reset them.

        Args:
            whole: Whole gradients of sub-groups for which ``add`` was not called, with their
                indices.
            by_worker: Sums of squares that the Adam worker took, by sub-group.
        """
        squares, self._squares = self._squares, torch.zeros_like(self._squares)
        for index, gradient in whole:
            # vector_norm would make a copy in double precision: 8 bytes an element, for hundreds of
            # millions of elements.
            squares[index] = torch._foreach_norm([gradient], 2, dtype=torch.float64)[0].square()
        for index, value in by_worker.items():
            squares[index] = value
        self._all_reduce(squares)
        return squares

    def read(self, squares: Tensor, step: int) -> float:
        """Return the norm now. Waits for the GPU. Raises NonFiniteGradientError."""
        return self._norm(squares.tolist(), step)

    def read_later(self, squares: Tensor, step: int) -> None:
        """Copy the sums to the host without waiting, for ``last``."""
        self._last = (step, *self._transfers.copy_to_host(squares))

    def last(self) -> float | None:
        """Return the norm passed to ``read_later`` last; None if there is none. Raises
        NonFiniteGradientError.
        """
        if self._last is None:
            return None
        step, values, event = self._last
        event.synchronize()
        return self._norm(values.tolist(), step)

    def forget_last(self) -> None:
        """Drop the last step's norm, because other states were loaded."""
        self._last = None

    def check(self) -> None:
        """Raise NonFiniteGradientError if the states were updated with a gradient that is not
        finite.
        """
        if self._fault is not None and self._fault.poisoned:
            raise self._fault

    def _norm(self, squares: Sequence[float], step: int) -> float:
        for index, value in enumerate(squares):
            if not math.isfinite(value):
                self._fault = NonFiniteGradientError(
                    self._sub_groups[index].names,
                    step=step,
                    sub_group=index,
                    poisoned=self._poisons,
                )
                raise self._fault
        return math.sqrt(sum(squares))


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that brings a norm within a limit, as ``torch.nn.utils.clip_grad_norm_``
    computes it; 1 without a limit (0).
    """
    return min(1.0, limit / (norm + _CLIPPING_EPSILON)) if limit else 1.0


# Speculation: whether to step sub-groups before the gradient norm is known, as if it were within
# the limit.
#
# A step that was taken too early is discarded and redone. Until the norm is known the Adam worker
# would have had nothing else to do, so a discarded step costs little: the sub-group that the
# worker is busy with, copies, and memory bandwidth beside backward. A run whose norm exceeds the
# limit in every step has nothing to gain and must not pay even that.


REMEMBERED = 4
"""Steps whose norms decide about the next one."""


class Speculation:
    """Decides for one rank and counts. All ranks see the same norms and so decide alike.

    Attributes:
        kept: Steps so far in which sub-groups were stepped early and the norm was within the limit.
        redone: Those in which it was not, so that these sub-groups were stepped again from the old
            states.
    """

    def __init__(self) -> None:
        self.kept = self.redone = 0
        self._within: deque[bool] = deque(maxlen=REMEMBERED)

    @property
    def is_worthwhile(self) -> bool:
        """Whether to speculate in the next step: unless all of the last steps' norms exceeded the
        limit.
        """
        return len(self._within) < REMEMBERED or any(self._within)

    def record(self, *, within: bool, speculated: bool) -> None:
        """Record a step whose norm was within the limit, or exceeded it; ``speculated``: whether
        sub-groups had been stepped early.
        """
        self._within.append(within)
        if speculated:
            self.kept += within
            self.redone += not within


# When a CPU sub-group is stepped, with which gradient, and who takes the gradient norm.
#
# Clipping needs the norm of all gradients before any sub-group's step is final. A sub-group that
# has a second set of states is stepped before that all the same, as if the norm were within the
# limit (``speculation``); the others are held back. Gradient accumulation sums gradients in fp32
# on the host, so only the Adam worker sees a whole gradient. That costs 4 bytes of host memory a
# parameter and none of the GPU's, which offloading is there to save; the 10 bytes of host traffic
# per parameter and micro-batch are hidden by that micro-batch. The three together decide
# everything below:
#
# gradient clipping speculates a CPU sub-group is stepped the worker finds its norm is taken
# accumulation gradient in 1 step off when its gradient is complete the staging buffer on the GPU,
# in backward 1 step on no when the norm is known the staging buffer on the GPU, in backward 1 step
# on yes when its gradient is complete, the staging buffer on the GPU, in backward out of place
# several off when its gradient is complete accumulated and staging by the worker, when it steps
# several on no when the norm is known accumulated by the worker, accumulating several on yes when
# its gradient is complete, accumulated and staging by the worker, when it steps out of place
#
# At the accumulation boundary (a step's last micro-batch) a gradient is added inside the Adam pass
# where nothing holds the step back. Otherwise it is accumulated like the ones before, because the
# worker must know the whole gradient's norm first.


class StepTime(Enum):
    """When a CPU sub-group may be stepped."""

    GRADIENT_COMPLETE = "gradient complete"
    """As soon as all of its gradients have arrived, while backward goes on."""
    SPECULATIVE = "speculative"
    """Likewise, but out of place: the step is final, or discarded, when the norm of all gradients
    is known.
    """
    NORM_KNOWN = "norm known"
    """Held back until the norm of all gradients is known, after backward."""


@dataclass(frozen=True)
class StepPolicy:
    """One row of the table above."""

    accumulates: bool
    """Whether the Adam worker sums the gradients of several micro-batches. Then it takes the sum of
    squares too: when it steps the sub-group, or adds the last gradient to one that is held back.
    Otherwise the GPU takes it, while backward runs.
    """
    step_time: StepTime

    @classmethod
    def of(cls, accumulation_steps: int, clipping: float) -> StepPolicy:
        """Return the policy for sub-groups that do not speculate.

        Args:
            accumulation_steps: Micro-batches per step.
            clipping: The largest gradient norm, 0 for no limit.
        """
        step_time = StepTime.NORM_KNOWN if clipping else StepTime.GRADIENT_COMPLETE
        return cls(accumulation_steps > 1, step_time)

    @property
    def norm_is_read_before_step(self) -> bool:
        """Whether ``step`` reads the norm on the host. Otherwise it is read a step later, and
        nothing waits for it.
        """
        return self.accumulates or self.step_time is not StepTime.GRADIENT_COMPLETE

    def on_complete(self, *, boundary: bool) -> Operation | None:
        """Return what the worker does with a sub-group whose gradients are complete; ``boundary``
        in a step's last micro-batch.

        None: the gradient waits in the staging buffer until the norm is known.
        """
        if boundary and self.step_time is StepTime.GRADIENT_COMPLETE:
            return Operation.STEP
        if boundary and self.step_time is StepTime.SPECULATIVE:
            return Operation.SPECULATE
        return Operation.ACCUMULATE if self.accumulates else None

    def gradient_source(self, micro_batch: int) -> GradientSource:
        """Return where the worker finds the gradient to step with.

        Args:
            micro_batch: Index of the step's last micro-batch, counted from 0. It does not matter
                where sub-groups are held back; otherwise the last gradient is added inside the Adam
                pass.
        """
        if not self.accumulates:
            return GradientSource.STAGING
        if self.step_time is StepTime.NORM_KNOWN:
            return GradientSource.ACCUMULATED
        # A step may be cut short to a single micro-batch: then nothing has been accumulated.
        return GradientSource.ACCUMULATED_AND_STAGING if micro_batch > 0 else GradientSource.STAGING
