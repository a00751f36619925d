"""The norm of a step's gradients over all parameters and ranks, in which gradients that are not
finite show up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from superoffload.errors import NonFiniteGradientError
from superoffload.gpu_states import Gradient, SubGroup
from superoffload.transfers import Event, Transfers

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
        """Return the sums of squares over all ranks, one per sub-group.

        Args:
            whole: Whole gradients of sub-groups for which ``add`` was not called, with their
                indices.
            by_worker: Sums of squares that the Adam worker took, by sub-group.
        """
        squares = self._squares.clone()
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

    def begin_step(self) -> None:
        self._squares.zero_()

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
                self._fault = non_finite(self._sub_groups, index, step, poisoned=self._poisons)
                raise self._fault
        return math.sqrt(sum(squares))


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that brings a norm within a limit, as ``torch.nn.utils.clip_grad_norm_``
    computes it; 1 without a limit (0).
    """
    return min(1.0, limit / (norm + _CLIPPING_EPSILON)) if limit else 1.0


def non_finite(
    sub_groups: Sequence[SubGroup], index: int, step: int, *, poisoned: bool
) -> NonFiniteGradientError:
    """Return the error for a gradient of sub-group ``index``; ``poisoned`` if weights or moments
    were updated with it.
    """
    names = sub_groups[index].names
    state = (
        (
            "Weights and moments in memory were updated with it and will not be saved; resume from "
            "the last checkpoint"
        )
        if poisoned
        else "No weights were updated with it; the last checkpoint is valid"
    )
    return NonFiniteGradientError(
        f"Step {step}: the gradient of sub-group {index} ({names[0]} ... {names[-1]}) is not "
        f"finite. {state}. Usual causes: a learning rate that is too high, or a row of data that "
        "overflows the loss.",
        step=step,
        sub_group=index,
        poisoned=poisoned,
        parameter=names[0],
    )
