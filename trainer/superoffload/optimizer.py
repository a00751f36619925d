"""AdamW for one rank, computed by its GPU and its CPU while backward and forward run.

The weights (bf16) are on the GPU, cut into sub-groups. The first sub-groups have their optimizer
states on the GPU and are stepped there. The states of the others are in host memory, shared with an
Adam worker. One staging buffer per sub-group carries the gradient to the host and the new weights
back, 2 bytes a parameter in each direction:

    backward        gradient -> staging buffer (d2h stream), as soon as it is reduced
    worker          AdamW, as soon as the sub-group is complete *; the new weights
                    overwrite the gradient
    worker client   staging buffer -> weights (h2d stream), as soon as the worker is done
    forward         waits, layer by layer, for the weights it is about to use

Weights can be in host memory instead (``host_weights``), those of the CPU sub-groups. Then the
worker leaves the new weights there, nothing is copied after a step, and every forward and backward
copies each layer to the GPU before it computes.

* Gradient clipping needs the norm of all gradients first. A sub-group that has a second set of
states is stepped into it all the same, as if the norm were within the limit. When the norm is known
the new set is accepted without a copy, or all sub-groups are stepped again from the old one.
Sub-groups without a second set are held back until then. Either way the result is exactly that of
clipped AdamW.

The worker always takes the sub-group that the next forward needs first. What it has not finished
when backward is over is needed late, so forward hides it.

With several gradient accumulation steps the worker sums the gradients in fp32 on the host.
``StepPolicy`` decides how clipping and accumulation combine.

This module does not depend on DeepSpeed. The states are in ``cpu_states``, which has the worker
step what is complete, and in ``gpu_states``. The gradient norm is in ``steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from superoffload.cpu_states import CpuStates
from superoffload.errors import NonFiniteGradientError, OffloadError
from superoffload.gpu_states import (
    Copies,
    GpuStates,
    Gradient,
    SubGroup,
    SubGroupState,
)
from superoffload.settings import HostRoom, Settings
from superoffload.shared_states import HostWeights
from superoffload.steps import GradientNorm, StepPolicy, StepTime, clip_factor
from superoffload.transfers import (
    CompletedEvent,
    Copy,
    Event,
    Meter,
    OffloadStats,
    transfers_for,
)

# Which gradients of the step in progress have arrived, micro-batch by micro-batch.


_SHOWN = 5
"""Parameters that an error names."""


class _Arrivals:
    """Counts the gradients of one rank's sub-groups since the last step.

    Args:
        sub_groups: All sub-groups of the rank.
        accumulation_steps: Micro-batches per step.
    """

    def __init__(self, sub_groups: Sequence[SubGroup], accumulation_steps: int) -> None:
        self._sub_groups = sub_groups
        self._accumulation_steps = accumulation_steps
        self.micro_batch = 0
        """Counted from 0 within the step."""
        self._members: dict[int, set[int]] = {}
        """By sub-group: its members with a gradient in this micro-batch."""

    @property
    def has_begun(self) -> bool:
        """Whether any gradient has arrived since the last step."""
        return bool(self.micro_batch or self._members)

    def add(self, gradient: Gradient) -> None:
        """Count a gradient.

        Raises:
            OffloadError: If it is there already (``second-gradient``), or the step has all its
                micro-batches (``too-many-micro-batches``).
        """
        members = self._members.setdefault(gradient.sub_group, set())
        if gradient.member in members:
            name = self._sub_groups[gradient.sub_group].names[gradient.member]
            raise OffloadError(
                f"The gradient of {name} arrived twice in one micro-batch. Call backward once per "
                "micro-batch.",
                code="second-gradient",
            )
        if self.micro_batch >= self._accumulation_steps:
            raise OffloadError(
                f"There were more backward passes than the configured {self._accumulation_steps} "
                "before a step. Set train.gradient_accumulation to the number of micro-batches.",
                code="too-many-micro-batches",
            )
        members.add(gradient.member)

    def is_complete(self, index: int) -> bool:
        """Return whether all gradients of a sub-group have arrived in this micro-batch."""
        return len(self._members.get(index, ())) == len(self._sub_groups[index].names)

    def end_micro_batch(self, step: int) -> None:
        """Begin the next micro-batch of step ``step``. Raises OffloadError (``missing-gradient``),
        with names, if gradients are missing.
        """
        missing = [
            name
            for index, group in enumerate(self._sub_groups)
            for member, name in enumerate(group.names)
            if member not in self._members.get(index, ())
        ]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (
                f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            )
            raise OffloadError(
                f"{len(missing)} trainable parameters got no gradient in step {step}, micro-batch "
                f"{self.micro_batch + 1}: {shown}. Freeze parameters on which the loss does not "
                "depend (requires_grad_(False)), list blocks of experts in model.leaf_modules, "
                "and use activation checkpointing with use_reentrant=False.",
                code="missing-gradient",
            )
        self._members.clear()
        self.micro_batch += 1

    def begin_step(self) -> None:
        """Count anew."""
        self.micro_batch = 0
        self._members.clear()


class SuperOffload:
    """The optimizer of one rank. Call all methods from the training thread.

    Args:
        sub_groups: All sub-groups of the rank.
        adamw: Steps the GPU sub-groups. Its parameter groups give learning rate, betas, epsilon and
            weight decay of all sub-groups.
        settings: How it runs.
        room: Sub-groups that have more than one set of states.
        device: What the model computes on.
        host_weights: Where the weights of the CPU sub-groups are, filled, unless they are on the
            GPU. It is closed with the optimizer.
        gradient_accumulation_steps: Micro-batches per step.
        clipping: Largest norm of a step's gradients, 0 for no limit.
        all_reduce: Sums a tensor over all ranks, in place.

    Raises:
        OffloadError: If it cannot be started. Nothing is left behind then.
    """

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        adamw: torch.optim.AdamW,
        settings: Settings,
        room: HostRoom,
        *,
        device: torch.device,
        host_weights: HostWeights | None = None,
        gradient_accumulation_steps: int,
        clipping: float,
        all_reduce: Callable[[Tensor], None],
    ) -> None:
        dtypes = {group.weights.dtype for group in sub_groups}
        if dtypes not in ({torch.bfloat16}, {torch.float32}):  # which the Adam kernel can read
            found = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise OffloadError(
                "SuperOffload trains models whose weights are all bfloat16 or all float32. These "
                f"are {' and '.join(found)}.",
                code="dtype",
            )
        self.sub_groups = tuple(sub_groups)
        self.steps_taken = 0
        self.skipped: NonFiniteGradientError | None = None
        """Why the last step was skipped; None if it was taken."""
        self.lazy_weights = True
        """If False, ``step`` waits for all weights, as other optimizers do (for comparison)."""
        self.clipping = clipping
        """Largest norm of a step's gradients. May be changed between steps, but not to or
        from 0.
        """
        self._max_skipped_steps = settings.max_skipped_steps
        self._skipped_steps = self._skipped_in_a_row = 0
        self._policy = StepPolicy.of(gradient_accumulation_steps, clipping)
        """Of sub-groups that do not speculate."""
        self._copies_in_use: set[int] = set()
        """Sub-groups whose copy may still be read."""
        self._closed = False
        self.transfers = transfers_for(device)
        self.meter = Meter()
        self._arrivals = _Arrivals(self.sub_groups, gradient_accumulation_steps)
        poisons = self._policy.step_time is StepTime.GRADIENT_COMPLETE
        self._norm = GradientNorm(
            self.sub_groups, device, self.transfers, all_reduce, poisons=poisons
        )
        self._gpu = GpuStates(self.sub_groups, adamw, room.copied)
        try:
            self.cpu = CpuStates(
                self.sub_groups,
                adamw,
                settings,
                room,
                self.transfers,
                self.meter,
                device,
                host_weights,
                self._policy,
            )
        except BaseException:
            self._gpu.close()
            raise

    # -- backward ----------------------------------------------------------------------------------

    @torch.no_grad()
    def receive(self, gradients: Sequence[Gradient], *, boundary: bool) -> None:
        """Take over gradients that the current stream has computed.

        Args:
            gradients: Gradients of one bucket.
            boundary: Whether this is the accumulation boundary: the step's last micro-batch.
        """
        self._check()
        micro_batch = self._arrivals.micro_batch
        on_cpu: list[Gradient] = []
        copies: list[Copy] = []
        after: list[Event] = []
        for gradient in gradients:
            self._arrivals.add(gradient)
            index, values = gradient.sub_group, gradient.values.flatten()
            if self.sub_groups[index].on_gpu:
                begin, _ = self.sub_groups[index].span(gradient.member)
                self._gpu.add(index, begin, values, first_micro_batch=micro_batch == 0)
            else:
                on_cpu.append(gradient)
                copies += self.cpu.stage_gradient(index, gradient.member, values)
                after += self.cpu.new_weights.copied(index)
        if boundary and not self._policy.accumulates:
            self._norm.add(on_cpu)
        copied: Event = CompletedEvent()
        if copies:
            transfer = self.transfers.gradients_to_host(copies, after)
            self.meter.current.d2h.append(transfer)
            copied = transfer.end
        for index in dict.fromkeys(gradient.sub_group for gradient in on_cpu):
            if self._arrivals.is_complete(index):
                self.cpu.on_complete(
                    index,
                    copied,
                    step=self.steps_taken + 1,
                    micro_batch=micro_batch,
                    boundary=boundary,
                )

    def end_of_backward(self) -> None:
        """End a micro-batch. Raises OffloadError (``missing-gradient``), with names, if parameters
        got no gradient.
        """
        self._check()
        self._arrivals.end_micro_batch(self.steps_taken + 1)

    # -- step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> bool:
        """Step all sub-groups. Their new weights may still be on their way: see
        ``wait_for_weights`` and ``synchronize``.

        Returns:
            Whether the step was taken. If not, a gradient is not finite (``skipped``), and the
            states are those of the step before.

        Raises:
            NonFiniteGradientError: With clipping, after too many skipped steps in a row, and in the
                very first step; the states are those of the step before. Without clipping,
                sub-groups have been stepped by then and nothing in memory may be saved.
            OffloadError: Without a complete backward before it (``incomplete-backward``), or if the
                learning rate changed since (``learning-rate-changed``).
        """
        self._check()
        if not self._arrivals.micro_batch or not self.cpu.has_all_gradients:
            raise OffloadError(
                "step() was called without a complete backward before it.",
                code="incomplete-backward",
            )
        self.cpu.check_learning_rates()
        self._norm.last()  # has long been on the host
        try:
            factor = self._clip_factor()
        except NonFiniteGradientError as error:
            self._skip(error)
            return False
        self.cpu.finish(self.steps_taken + 1, factor)
        self._gpu.step(factor)
        self.steps_taken += 1
        self.skipped, self._skipped_in_a_row = None, 0
        self._arrivals.begin_step()
        if not self.lazy_weights:
            begin = self.transfers.mark()
            self.cpu.new_weights.wait_for()
            self.meter.current.step_waits.append((begin, self.transfers.mark()))
        self.meter.end_step()
        return True

    def wait_for_weights(self, sub_groups: Collection[int]) -> None:
        """Make the current stream wait for the new weights of these sub-groups. Blocks until the
        worker has stepped them.
        """
        self.cpu.new_weights.wait_for(sub_groups)

    def measuring_wait(self, sub_groups: Collection[int]) -> AbstractContextManager[None]:
        """Return a context in which all of the forward pass's waits before a layer must happen, so
        that ``stats`` can tell them.

        Args:
            sub_groups: Those whose weights the current stream uses next. Within the context it is
                made to wait for them; other streams may be made to wait for others.
        """
        if (
            self._arrivals.has_begun
        ):  # backward and further micro-batches use the weights that a forward has waited for
            return nullcontext()
        return self.cpu.new_weights.measuring_wait(sub_groups)

    def synchronize(self) -> None:
        """Wait until all weights are those of the last step. Raises OffloadError if the states are
        not sound.
        """
        self._check()
        if self._arrivals.has_begun:
            raise OffloadError(
                "The optimizer state is in the middle of a step, between backward and step(), and "
                "cannot be saved or loaded.",
                code="middle-of-step",
            )
        self.cpu.new_weights.wait_for()
        self.cpu.wait_for_copies()
        self._norm.last()

    def gradient_norm(self) -> float | None:
        """Return the norm of the last step's gradients over all ranks, before clipping. Raises
        NonFiniteGradientError.
        """
        self._check()
        return self._norm.last()

    def stats(self) -> OffloadStats:
        """Return the times of the last step, from the end of the step before it, and what became of
        all steps so far.
        """
        counts = self.cpu.speculation
        return replace(
            self.meter.stats(),
            kept_steps=counts.kept,
            redone_steps=counts.redone,
            skipped_steps=self._skipped_steps,
        )

    def close(self) -> None:
        """End the worker and release the memory. Safe to call twice."""
        self._closed = True
        self.cpu.close()
        self._gpu.close()

    def _clip_factor(self) -> float:
        """Return this step's clipping factor. Waits for the norm only if the policy needs it.
        Raises NonFiniteGradientError.
        """
        step, factor = self.steps_taken + self._skipped_steps + 1, 1.0
        begin = self.transfers.mark()
        by_worker: Mapping[int, float] = {}
        if self._policy.accumulates:
            self.cpu.wait_for_squares()
            by_worker = self.cpu.squares
        squares = self._norm.all_rank_squares(self._gpu.gradients.items(), by_worker)
        if self._policy.norm_is_read_before_step:
            factor = clip_factor(self._norm.read(squares, step), self.clipping)
        self._norm.read_later(squares, step)
        self.meter.current.step_waits.append((begin, self.transfers.mark()))
        return factor

    def _skip(self, error: NonFiniteGradientError) -> None:
        """Return to the states of the step before.

        Raises the error after too many skipped steps in a row, in the very first step, or if the
        states of the step before are gone.
        """
        self.skipped = error
        self._skipped_steps += 1
        self._skipped_in_a_row += 1
        self.cpu.undo(self.steps_taken)
        self._arrivals.begin_step()
        self.meter.end_step()
        too_many = self._skipped_in_a_row > self._max_skipped_steps
        if (
            error.poisoned or too_many or not self.steps_taken
        ):  # weights with which no step has ever succeeded are no good
            raise error

    def _check(self) -> None:
        """Raise what has gone wrong with the states, now or earlier."""
        self._norm.check()
        self.cpu.check()
        if self._closed:
            raise OffloadError(
                "The offload engine is closed and its states are gone.", code="closed"
            )

    # -- states ------------------------------------------------------------------------------------

    def copy_states(self) -> Copies:
        """Copy the states of the last step where there is room for it, by sub-group, for writing
        them while training goes on.

        Call ``release_copy`` for each before the next call, in their order: the first ones keep
        sub-groups from speculating.

        Raises:
            OffloadError: As ``synchronize``; or if copies have not been released
                (``copies-in-use``).
        """
        self.synchronize()
        if self._copies_in_use:
            raise OffloadError(
                "The states are still being written. Finish or close the `Save` of the last "
                "`begin_save` before the next one.",
                code="copies-in-use",
            )
        copies = self._gpu.copies(self.transfers) | self.cpu.copies()
        self._copies_in_use.update(copies)
        in_order = sorted(copies, key=lambda index: (index not in self.cpu.lent, index))
        return {index: copies[index] for index in in_order}

    def release_copy(self, index: int) -> None:
        """Give the memory of a sub-group's copy back, from any thread. Its tensors must no longer
        be used.
        """
        self.cpu.lent.discard(index)
        self._copies_in_use.discard(index)  # Last: then the next copy may be made.

    def state(self, index: int) -> SubGroupState:
        """Return a sub-group's state. Call ``synchronize`` before reading it or writing it in
        place.
        """
        group = self.sub_groups[index]
        states: GpuStates | CpuStates = self._gpu if group.on_gpu else self.cpu
        return SubGroupState(
            "gpu" if group.on_gpu else "cpu",
            group.weights,
            states.master_weights(index),
            partial(states.moments, index),
            partial(states.set_moments, index),
            self.steps_taken,
            self.set_steps_taken,
        )

    def states(self) -> list[SubGroupState]:
        """Return the states of all sub-groups, as ``state``."""
        return [self.state(index) for index in range(len(self.sub_groups))]

    def set_steps_taken(self, steps: int) -> None:
        """Set the step count of all sub-groups, after loading their states."""
        self.steps_taken = steps
        self._norm.forget_last()
        self._gpu.set_steps_taken(steps)
