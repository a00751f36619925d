"""Steps of the CPU sub-groups: each is stepped at the time, and with the gradient, that ``step_policy`` says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from superoffload.commands import Command, GradientSource, Operation
from superoffload.cpu_states import CpuStates
from superoffload.errors import OffloadError
from superoffload.speculation import Speculation
from superoffload.step_policy import StepPolicy, StepTime, SubGroupAction
from superoffload.sub_groups import SubGroup
from superoffload.transfers import Event


@dataclass(frozen=True)
class WholeGradient:
    """A sub-group's gradient of a whole step."""

    copied: Event
    """After it, the last micro-batch's gradient is in the staging buffer."""
    source: GradientSource


class CpuSteps:
    """Has the worker step one rank's CPU sub-groups. A step begins with its first gradient and ends with ``finish`` or ``undo``.

    Args:
        sub_groups: All sub-groups of the rank.
        adamw: Gives learning rate, betas, epsilon and weight decay.
        cpu: The sub-groups' states.
        policy: That of sub-groups that do not speculate.
        speculative: That of those that do.
        second: Sub-groups that have a second set of states.
    """

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        adamw: torch.optim.AdamW,
        cpu: CpuStates,
        policy: StepPolicy,
        speculative: StepPolicy,
        second: frozenset[int],
    ) -> None:
        self._sub_groups, self._adamw, self._cpu = sub_groups, adamw, cpu
        self._policy, self._speculative = policy, speculative
        self._second = second
        self.speculation = Speculation()
        self.speculating = second
        """Sub-groups that are stepped before the norm is known, in this step."""
        self.gradients: dict[int, WholeGradient] = {}
        """Those of sub-groups that were complete at the accumulation boundary."""
        self._learning_rates: dict[int, float] = {}
        """Of the sub-groups that the worker already steps."""

    def on_complete(
        self, index: int, copied: Event, *, step: int, micro_batch: int, boundary: bool
    ) -> None:
        """Handle a sub-group whose gradients of a micro-batch have all arrived.

        Args:
            index: The sub-group.
            copied: The event after which they are in the staging buffer.
            step: The step's number, counted from 1.
            micro_batch: Counted from 0 within the step.
            boundary: Whether it is the step's last one.
        """
        policy = self._policy_of(index)
        if boundary:
            self.gradients[index] = WholeGradient(copied, policy.gradient_source(micro_batch))
        match policy.on_complete(boundary=boundary):
            case SubGroupAction.STEP:
                self._send(index, step)
            case SubGroupAction.SPECULATE:
                self._send(index, step, operation=Operation.SPECULATE)
            case SubGroupAction.ACCUMULATE:
                self._cpu.accumulate(index, step, first_micro_batch=micro_batch == 0, after=copied)
            case SubGroupAction.HOLD:
                pass

    @property
    def has_all_gradients(self) -> bool:
        """Whether every sub-group was complete at the accumulation boundary."""
        return len(self.gradients) == len(self._cpu.indices)

    def check_learning_rates(self) -> None:
        """Raise OffloadError (``learning-rate-changed``) if a sub-group was stepped with another learning rate than it has now."""
        for index, rate in self._learning_rates.items():
            if rate != float(
                self._adamw.param_groups[self._sub_groups[index].parameter_group]["lr"]
            ):
                raise OffloadError(
                    "The learning rate changed between backward and step. Set it before the step's last backward.",
                    code="learning-rate-changed",
                )

    def finish(self, step: int, factor: float) -> None:
        """Accept what was stepped before the norm was known, or discard it; step what was discarded or held back.

        Args:
            step: The step's number.
            factor: That of clipping; 1 if the norm is within the limit.
        """
        within = factor == 1.0
        discarded: Collection[int] = ()
        if within:
            self._cpu.accept()
        else:
            discarded = self._cpu.discard()
        for index in self._cpu.in_order_of_use:
            if index in discarded or self._policy_of(index).step_time is StepTime.NORM_KNOWN:
                self._send(index, step, factor)
        self.speculation.record(within=within, speculated=bool(self.speculating))
        self._begin()

    def undo(self, last_step: int) -> None:
        """Return to the weights of ``last_step``, the last that was taken, where a sub-group was stepped before the norm was known."""
        for index in self._cpu.discard():
            self._cpu.restore(index, last_step, self.gradients[index].copied)
        self._begin()

    def leave_out_lent(self) -> None:
        """Do not step sub-groups early whose second set of states is lent to a copy."""
        self.speculating -= self._cpu.lent

    def _begin(self) -> None:
        self.gradients, self._learning_rates = {}, {}
        self.speculating = self._second if self.speculation.is_worthwhile else frozenset()
        self.leave_out_lent()

    def _policy_of(self, index: int) -> StepPolicy:
        return self._speculative if index in self.speculating else self._policy

    def _send(
        self, index: int, step: int, scale: float = 1.0, operation: Operation = Operation.STEP
    ) -> None:
        group = self._adamw.param_groups[self._sub_groups[index].parameter_group]
        gradient = self.gradients[index]
        rate = float(
            group["lr"]
        )  # now: it may be a tensor that a scheduler writes to before the command leaves
        command = Command(
            operation,
            self._cpu.slot[index],
            step,
            gradient=gradient.source,
            scale=scale,
            learning_rate=rate,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            epsilon=group["eps"],
            weight_decay=group["weight_decay"],
        )
        self._learning_rates[index] = rate
        self._cpu.step(index, command, gradient.copied)
