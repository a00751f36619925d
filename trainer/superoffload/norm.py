"""The gradient norm over all parameters and ranks, and the gradients that are not finite, which show in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from superoffload.errors import NonFiniteGradientError
from superoffload.sub_groups import Gradient, SubGroup
from superoffload.transfers import Event, Transfers


class GradientNorm:
    """Sums of squares of a step's gradients, one per sub-group, in double precision.

    They are added up on the GPU while backward runs. Clipping has to read them within the step. Otherwise they are read a step later,
    when they have long been on the host and nothing waits for them; ``poisons``: by then the gradients are in the states.
    """

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        transfers: Transfers,
        all_reduce: Callable[[torch.Tensor], None],
        *,
        poisons: bool,
    ) -> None:
        self._sub_groups = sub_groups
        self._transfers = transfers
        self._all_reduce = all_reduce
        self._poisons = poisons
        self._squares = torch.zeros(len(sub_groups), dtype=torch.float64, device=sub_groups[0].weights.device)
        self._last: tuple[int, torch.Tensor, Event] | None = None
        """Step, values on the host, when they are there."""
        self._fault: NonFiniteGradientError | None = None

    def add(self, gradients: Sequence[Gradient]) -> None:
        """What the current stream has computed."""
        for index in dict.fromkeys(gradient.sub_group for gradient in gradients):
            values = [gradient.values for gradient in gradients if gradient.sub_group == index and gradient.values.numel()]
            if values:
                norms = torch.stack(torch._foreach_norm(values, 2, dtype=torch.float64))
                self._squares[index] += norms.square().sum()

    def total(self, whole: Iterable[tuple[int, torch.Tensor]], known: Mapping[int, float]) -> torch.Tensor:
        """The sums of squares over all ranks. ``whole``: gradients of sub-groups that were not added; ``known``: squares of others."""
        squares = self._squares.clone()
        for index, gradient in whole:
            # vector_norm would make a copy in double precision, 8 bytes for each of up to hundreds of millions of elements.
            squares[index] = torch._foreach_norm([gradient], 2, dtype=torch.float64)[0].square()
        for index, value in known.items():
            squares[index] = value
        self._all_reduce(squares)
        return squares

    def read(self, squares: torch.Tensor, step: int) -> float:
        """The norm, now. Waits for the GPU. Raises NonFiniteGradientError."""
        return self._norm(squares.tolist(), step)

    def keep(self, squares: torch.Tensor, step: int) -> None:
        """For ``last`` to read."""
        self._last = (step, *self._transfers.fetch(squares))

    def last(self) -> float | None:
        """The norm that was kept; None if none was. Raises NonFiniteGradientError."""
        if self._last is None:
            return None
        step, values, event = self._last
        event.synchronize()
        return self._norm(values.tolist(), step)

    def begin_step(self) -> None:
        self._squares.zero_()

    def forget(self) -> None:
        """There is no last step: other states were loaded."""
        self._last = None

    def check(self) -> None:
        """Raises NonFiniteGradientError when the states have taken in a gradient that was not finite."""
        if self._fault is not None and self._fault.poisoned:
            raise self._fault

    def _norm(self, squares: Sequence[float], step: int) -> float:
        for index, value in enumerate(squares):
            if not math.isfinite(value):
                self._fault = non_finite(self._sub_groups, index, step, poisoned=self._poisons)
                raise self._fault
        return math.sqrt(sum(squares))


def non_finite(sub_groups: Sequence[SubGroup], index: int, step: int, *, poisoned: bool) -> NonFiniteGradientError:
    """The error for a gradient in this sub-group. ``poisoned``: something was stepped with it."""
    names = sub_groups[index].names
    state = (
        "Weights and moments in memory have taken it in and are not saved; resume from the last checkpoint"
        if poisoned
        else "Nothing was stepped with it; the last checkpoint stands"
    )
    return NonFiniteGradientError(
        f"Step {step}: the gradient of sub-group {index} ({names[0]} ... {names[-1]}) is not finite. {state}. "
        "Usual causes: a learning rate that is too high, or a row of data that overflows the loss.",
        step=step,
        sub_group=index,
        poisoned=poisoned,
    )
