"""AdamW for one rank, computed by its GPU and its CPU while backward and forward run.

The weights (bf16) are on the GPU, cut into sub-groups. The first sub-groups have their optimizer states on the GPU and are stepped there.
The states of the others are in host memory, shared with an Adam worker. One staging buffer per sub-group carries the gradient to the host
and the new weights back, 2 bytes a parameter in each direction:

    backward        gradient -> staging buffer (d2h stream)               as soon as it is reduced
    worker          AdamW; the new weights overwrite the gradient         as soon as the sub-group is complete *
    worker client   staging buffer -> weights (h2d stream)                as soon as the worker is done
    forward         waits, layer by layer, for the weights it is about to use

Weights can be in host memory instead (``host_weights``), those of the CPU sub-groups. Then the worker leaves the new weights there, nothing
is copied after a step, and every forward and backward copies each layer to the GPU before it computes.

* Gradient clipping needs the norm of all gradients first. A sub-group that has a second set of states is stepped into it all the same, as
if the norm were within the limit. When the norm is known the new set is accepted without a copy, or all sub-groups are stepped again from
the old one. Sub-groups without a second set are held back until then. Either way the result is exactly that of clipped AdamW.

The worker always takes the sub-group that the next forward needs first. What it has not finished when backward is over is needed late, so
forward hides it.

With several gradient accumulation steps the worker sums the gradients in fp32 on the host. That costs 4 bytes of host memory a parameter
and none of the GPU's, which offloading is there to save. The 10 bytes of host traffic per parameter and micro-batch are hidden by that
micro-batch. ``step_policy`` decides how clipping and accumulation combine.

This module does not depend on DeepSpeed. The states are in ``cpu_states`` and ``gpu_states``, the gradient norm in ``norm``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from msgspec.structs import replace

from so_tui.model.sharding import StatesFormat
from superoffload import worker
from superoffload.cpu_states import CpuStates
from superoffload.errors import NonFiniteGradientError, OffloadError
from superoffload.gpu_states import GpuStates
from superoffload.host_weights import HostWeights
from superoffload.meter import Meter, OffloadStats
from superoffload.norm import GradientNorm
from superoffload.shared_memory import host_available_bytes
from superoffload.speculation import Speculation
from superoffload.states_copy import StatesCopy
from superoffload.step_policy import NormSource, StepPolicy, StepTime, SubGroupAction, step_policy
from superoffload.sub_groups import (
    Gradient,
    SubGroup,
    check_dtypes,
    copied_within,
    second_states_bytes,
    spare_bytes,
    speculating_within,
)
from superoffload.transfers import CompletedEvent, Copy, Event, transfers_for

_CLIPPING_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True)
class _WholeGradient:
    """A CPU sub-group's gradient of a whole step."""

    copied: Event
    """After it, the last micro-batch's gradient is in the staging buffer."""
    source: worker.GradientSource


@dataclass
class _StepInProgress:
    """What has arrived since the last step."""

    speculating: frozenset[int]
    """Sub-groups that are stepped before the norm is known."""
    micro_batch: int = 0
    """Counted from 0 within the step."""
    arrived: dict[int, set[int]] = field(default_factory=dict)
    """By sub-group: its members with a gradient in this micro-batch."""
    complete: dict[int, _WholeGradient] = field(default_factory=dict)
    """CPU sub-groups that were complete at the accumulation boundary."""
    learning_rates: dict[int, float] = field(default_factory=dict)
    """Learning rates of the sub-groups that the worker already steps."""

    @property
    def has_begun(self) -> bool:
        return bool(self.micro_batch or self.arrived)


class SuperOffload:
    """The optimizer of one rank. Call all methods from the training thread.

    Args:
        sub_groups: All sub-groups of the rank.
        adamw: Steps the GPU sub-groups. Its parameter groups give learning rate, betas, epsilon and weight decay of all sub-groups.
        device: What the model computes on.
        host_weights: Where the weights of the CPU sub-groups are, filled, unless they are on the GPU. It is closed with the optimizer.
        gradient_accumulation_steps: Micro-batches per step.
        clipping: Largest norm of a step's gradients, 0 for no limit.
        speculation_bytes: Most host memory for second sets of states, which only clipping needs. They take no more than the states leave.
        copies_bytes: Most host memory for copies of states, from which ``copy_states`` lets a checkpoint be written while training goes on.
            They take no more than the states and the second sets leave.
        states: Format of the moments in host memory.
        seed: Selects the random bits by which compact moments are rounded.
        max_skipped_steps: How many steps in a row may be skipped because their gradients are not finite. Without clipping none can be.
        cpus: The Adam worker's cores.
        all_reduce: Sums a tensor over all ranks, in place.
        watchdog_timeout_s: How long the worker may compute without progress.
        available_bytes: Returns how much host memory this process can still allocate.

    Raises:
        OffloadError: If it cannot be started. Nothing is left behind then.
    """

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        adamw: torch.optim.AdamW,
        *,
        device: torch.device,
        host_weights: HostWeights | None = None,
        gradient_accumulation_steps: int,
        clipping: float,
        speculation_bytes: int = 0,
        copies_bytes: int = 0,
        states: StatesFormat = "fp32",
        seed: int = 0,
        max_skipped_steps: int = 0,
        cpus: Sequence[int],
        all_reduce: Callable[[torch.Tensor], None],
        watchdog_timeout_s: float,
        available_bytes: Callable[[], int | None] = host_available_bytes,
    ) -> None:
        check_dtypes(sub_groups)
        self.sub_groups = tuple(sub_groups)
        self.steps_taken = 0
        self.skipped: NonFiniteGradientError | None = None
        """Why the last step was skipped; None if it was taken."""
        self.lazy_weights = True
        """If False, ``step`` waits for all weights, as other optimizers do (for comparison)."""
        self._adamw = adamw
        self._accumulation_steps = gradient_accumulation_steps
        self.clipping = clipping
        """Largest norm of a step's gradients. May be changed between steps, but not to or from 0."""
        self._max_skipped_steps = max_skipped_steps
        self._policy = step_policy(gradient_accumulation_steps, clipping)
        """Of sub-groups that do not speculate."""
        self._speculative_policy = step_policy(gradient_accumulation_steps, clipping, speculates=True)
        self._speculating: frozenset[int] = frozenset()
        """Sub-groups that have a second set of states."""
        spare = spare_bytes(self.sub_groups, available_bytes(), states, accumulates=self._policy.accumulates)
        on_host = host_weights is not None
        if clipping and speculation_bytes:
            most = min(speculation_bytes, spare)
            self._speculating = frozenset(speculating_within(self.sub_groups, states, most, host_weights=on_host))
            spare -= second_states_bytes(self.sub_groups, states, self._speculating, host_weights=on_host)
        copied = copied_within(self.sub_groups, states, self._speculating, min(copies_bytes, spare))
        self._copies_in_use: set[int] = set()
        """Sub-groups whose copy may still be read."""
        self._speculation = Speculation()
        self._step = _StepInProgress(self._speculating)
        self._closed = False
        self._transfers = transfers_for(device)
        self._meter = Meter(self._transfers)
        steps_before_norm = self._policy.step_time is StepTime.GRADIENT_COMPLETE
        self._norm = GradientNorm(self.sub_groups, device, self._transfers, all_reduce, poisons=steps_before_norm)
        self._gpu = GpuStates(self.sub_groups, adamw, copied=[index for index in copied if self.sub_groups[index].on_gpu])
        try:
            self._cpu = CpuStates(
                self.sub_groups,
                self._transfers,
                self._meter,
                device=device,
                host_weights=host_weights,
                speculating=sorted(self._speculating),
                copied=[index for index in copied if not self.sub_groups[index].on_gpu],
                states=states,
                seed=seed,
                accumulate=self._policy.accumulates,
                cpus=cpus,
                watchdog_timeout_s=watchdog_timeout_s,
                available_bytes=available_bytes,
            )
        except BaseException:
            self._gpu.close()
            raise

    @property
    def worker_pid(self) -> int | None:
        return self._cpu.worker_pid

    # -- backward ------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def receive(self, gradients: Sequence[Gradient], *, boundary: bool) -> None:
        """Take over gradients that the current stream has computed.

        Args:
            gradients: Gradients of one bucket.
            boundary: Whether this is the accumulation boundary: the step's last micro-batch.
        """
        self._check()
        copies: list[Copy] = []
        after: list[Event] = []
        for gradient in gradients:
            self._register(gradient)
            index, values = gradient.sub_group, gradient.values.flatten()
            if self.sub_groups[index].on_gpu:
                begin, _ = self.sub_groups[index].span(gradient.member)
                self._gpu.add(index, begin, values, first_micro_batch=self._step.micro_batch == 0)
            else:
                copies += self._cpu.stage_gradient(index, gradient.member, values)
                after += self._cpu.new_weights.copied(index)
        if boundary and self._policy.norm_source is NormSource.GPU:
            self._norm.add([gradient for gradient in gradients if not self.sub_groups[gradient.sub_group].on_gpu])
        copied: Event = CompletedEvent()
        if copies:
            transfer = self._transfers.gradients_to_host(copies, after)
            self._meter.current.d2h.append(transfer)
            copied = transfer.done
        for index in dict.fromkeys(gradient.sub_group for gradient in gradients):
            if len(self._step.arrived[index]) == len(self.sub_groups[index].names):
                self._on_complete(index, copied, boundary)

    def end_of_backward(self) -> None:
        """End a micro-batch. Raises OffloadError (``missing-gradient``), with names, if parameters got no gradient."""
        self._check()
        missing = [
            name
            for index, group in enumerate(self.sub_groups)
            for member, name in enumerate(group.names)
            if member not in self._step.arrived.get(index, ())
        ]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise OffloadError(
                f"{len(missing)} trainable parameters got no gradient in step {self.steps_taken + 1}, micro-batch "
                f"{self._step.micro_batch + 1}: {shown}. Freeze parameters on which the loss does not depend (requires_grad_(False)), "
                "list blocks of experts in model.leaf_modules, and use activation checkpointing with use_reentrant=False.",
                code="missing-gradient",
            )
        self._step.arrived.clear()
        self._step.micro_batch += 1

    def _register(self, gradient: Gradient) -> None:
        arrived = self._step.arrived.setdefault(gradient.sub_group, set())
        if gradient.member in arrived:
            name = self.sub_groups[gradient.sub_group].names[gradient.member]
            raise OffloadError(
                f"The gradient of {name} arrived twice in one micro-batch. Call backward once per micro-batch.", code="second-gradient"
            )
        if self._step.micro_batch >= self._accumulation_steps:
            raise OffloadError(
                f"There were more backward passes than the configured {self._accumulation_steps} before a step. "
                "Set train.gradient_accumulation to the number of micro-batches.",
                code="too-many-micro-batches",
            )
        arrived.add(gradient.member)

    def _on_complete(self, index: int, copied: Event, boundary: bool) -> None:
        """Handle a sub-group whose gradients of this micro-batch have all arrived; ``copied`` is the event of their last copy."""
        if self.sub_groups[index].on_gpu:
            return
        policy = self._policy_of(index)
        if boundary:
            self._step.complete[index] = _WholeGradient(copied, policy.gradient_source(self._step.micro_batch))
        match policy.on_complete(boundary=boundary):
            case SubGroupAction.STEP:
                self._send_step(index, 1.0)
            case SubGroupAction.SPECULATE:
                self._send_step(index, 1.0, worker.Operation.SPECULATE)
            case SubGroupAction.ACCUMULATE:
                self._cpu.accumulate(index, self.steps_taken + 1, first_micro_batch=self._step.micro_batch == 0, after=copied)
            case SubGroupAction.HOLD:
                pass

    def _policy_of(self, index: int) -> StepPolicy:
        return self._speculative_policy if index in self._step.speculating else self._policy

    def _send_step(self, index: int, scale: float, operation: worker.Operation = worker.Operation.STEP) -> None:
        group = self._adamw.param_groups[self.sub_groups[index].parameter_group]
        gradient = self._step.complete[index]
        command = worker.Command(
            operation,
            self._cpu.slot[index],
            self.steps_taken + 1,
            gradient=gradient.source,
            scale=scale,
            learning_rate=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            epsilon=group["eps"],
            weight_decay=group["weight_decay"],
        )
        self._step.learning_rates[index] = group["lr"]
        self._cpu.step(index, command, gradient.copied)

    # -- step ----------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> bool:
        """Step all sub-groups. Their new weights may still be on their way: see ``wait_for_weights`` and ``synchronize``.

        Returns:
            Whether the step was taken. If not, a gradient is not finite (``skipped``), and the states are those of the step before.

        Raises:
            NonFiniteGradientError: With clipping, after too many skipped steps in a row, and in the very first step; the states are those
                of the step before. Without clipping, sub-groups have been stepped by then and nothing in memory may be saved.
            OffloadError: Without a complete backward before it (``incomplete-backward``), or if the learning rate changed since
                (``learning-rate-changed``).
        """
        self._check()
        self._check_step()
        self._norm.last()  # has long been on the host
        try:
            factor = self._clip_factor()
        except NonFiniteGradientError as error:
            self._skip(error)
            return False
        self._finish_cpu_steps(factor)
        self._gpu.step(factor)
        self.steps_taken += 1
        self.skipped = None
        if self.clipping:
            self._speculation.record(within=factor == 1.0, speculated=bool(self._step.speculating))
        self._begin_step()
        if not self.lazy_weights:
            begin = self._transfers.mark()
            self._cpu.new_weights.wait_for()
            self._meter.current.step_waits.append((begin, self._transfers.mark()))
        self._meter.end_step()
        return True

    def wait_for_weights(self, sub_groups: Collection[int]) -> None:
        """Make the current stream wait for the new weights of these sub-groups. Blocks until the worker has stepped them."""
        self._cpu.new_weights.wait_for(sub_groups)

    def measuring_wait(self, sub_groups: Collection[int]) -> AbstractContextManager[None]:
        """Return a context in which all of the forward pass's waits before a layer must happen, so that ``stats`` can tell them.

        Args:
            sub_groups: Those whose weights the current stream uses next. Within the context it is made to wait for them; other streams may
                be made to wait for others.
        """
        if self._step.has_begun:  # backward and further micro-batches use the weights that a forward has waited for
            return nullcontext()
        return self._cpu.new_weights.measuring_wait(sub_groups)

    def synchronize(self) -> None:
        """Wait until all weights are those of the last step. Raises OffloadError if the states are not sound."""
        self._check()
        if self._step.has_begun:
            raise OffloadError(
                "The optimizer state is in the middle of a step, between backward and step(), and cannot be saved or loaded.",
                code="middle-of-step",
            )
        self._cpu.new_weights.wait_for()
        self._cpu.wait_for_copies()
        self._norm.last()

    def gradient_norm(self) -> float | None:
        """Return the norm of the last step's gradients over all ranks, before clipping. Raises NonFiniteGradientError."""
        self._check()
        return self._norm.last()

    def stats(self) -> OffloadStats:
        """Return the times of the last step, from the end of the step before it, and what became of all steps so far."""
        counts = self._speculation
        return replace(self._meter.stats(), kept_steps=counts.kept, redone_steps=counts.redone, skipped_steps=counts.skipped)

    def leave_out_waits(self) -> None:
        """Leave waits since the last step (to save or to evaluate) out of the next step's stats."""
        self._meter.leave_out_waits()

    def close(self) -> None:
        """End the worker and release the memory. Safe to call twice."""
        self._closed = True
        self._cpu.close()
        self._gpu.close()

    def _check_step(self) -> None:
        if len(self._step.complete) != len(self._cpu.indices) or self._step.micro_batch == 0:
            raise OffloadError("step() was called without a complete backward before it.", code="incomplete-backward")
        for index, rate in self._step.learning_rates.items():
            if rate != self._adamw.param_groups[self.sub_groups[index].parameter_group]["lr"]:
                raise OffloadError(
                    "The learning rate changed between backward and step. Set it before the step's last backward.",
                    code="learning-rate-changed",
                )

    def _clip_factor(self) -> float:
        """Return this step's clipping factor. Waits for the norm only if the policy needs it. Raises NonFiniteGradientError."""
        step, factor = self.steps_taken + self._speculation.skipped + 1, 1.0
        begin = self._transfers.mark()
        squares = self._norm.all_rank_squares(self._gpu.gradients(), self._squares_of_worker())
        if self._policy.norm_is_read_before_step:
            norm = self._norm.read(squares, step)
            factor = min(1.0, self.clipping / (norm + _CLIPPING_EPSILON)) if self.clipping else 1.0
        self._norm.read_later(squares, step)
        self._meter.current.step_waits.append((begin, self._transfers.mark()))
        return factor

    def _squares_of_worker(self) -> dict[int, float]:
        """Return the sums of squares that only the worker can take, and wait for them."""
        if self._policy.norm_source is NormSource.GPU:
            return {}
        self._cpu.wait_for_squares()
        return self._cpu.squares

    def _finish_cpu_steps(self, factor: float) -> None:
        """Accept what was stepped before the norm was known, or discard it; step what was discarded or held back."""
        discarded: Collection[int] = ()
        if factor == 1.0:
            self._cpu.accept()
        else:
            discarded = self._cpu.discard()
        for index in self._cpu.in_order_of_use:
            if index in discarded or self._policy_of(index).step_time is StepTime.NORM_KNOWN:
                self._send_step(index, factor)

    def _skip(self, error: NonFiniteGradientError) -> None:
        """Return to the states of the step before.

        Raises the error after too many skipped steps in a row, in the very first step, or if the states of the step before are gone.
        """
        self.skipped = error
        self._speculation.record_skip()
        for index in self._cpu.discard():
            self._cpu.restore(index, self.steps_taken, self._step.complete[index].copied)
        self._begin_step()
        self._meter.end_step()
        too_many = self._speculation.skipped_in_a_row > self._max_skipped_steps
        if error.poisoned or too_many or not self.steps_taken:  # weights with which no step has ever succeeded are no good
            raise error

    def _begin_step(self) -> None:
        self._step = _StepInProgress(self._speculating - self._cpu.lent if self._speculation.is_worthwhile else frozenset())
        self._norm.begin_step()

    def _check(self) -> None:
        """Raise what has gone wrong with the states, now or earlier."""
        self._norm.check()
        self._cpu.check()
        if self._closed:
            raise OffloadError("The offload engine is closed and its states are gone.", code="closed")

    # -- states --------------------------------------------------------------------------------------------------------------------

    def copy_states(self) -> dict[int, StatesCopy]:
        """Copy the states of the last step where there is room for it, by sub-group, for writing them while training goes on.

        Release every copy before the next call, in their order: the first ones keep sub-groups from speculating.

        Raises:
            OffloadError: As ``synchronize``; or if copies have not been released (``copies-in-use``).
        """
        self.synchronize()
        if self._copies_in_use:
            raise OffloadError(
                "The states are still being written. Finish or close the `Save` of the last `begin_save` before the next one.",
                code="copies-in-use",
            )
        copies = self._gpu.copies(self._transfers) | self._cpu.copies()
        self._copies_in_use.update(copies)
        self._step.speculating -= self._cpu.lent
        in_order = sorted(copies, key=lambda index: (index not in self._cpu.lent, index))
        return {index: StatesCopy(copies[index], partial(self._release_copy, index)) for index in in_order}

    def _release_copy(self, index: int) -> None:
        self._cpu.release_copy(index)
        self._copies_in_use.discard(index)  # Last: then the next copy may be made.

    def attach(self) -> None:
        """Prepare the calling thread for reading copies. Call it first in every thread but the training thread."""
        self._transfers.attach()

    def master_weights(self, index: int) -> torch.Tensor:
        """Return a sub-group's fp32 weights. Call ``synchronize`` before reading them or writing them in place."""
        return (self._gpu if self.sub_groups[index].on_gpu else self._cpu).master_weights(index)

    def moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sub-group's first and second moment, in fp32: the state itself or, of compact moments, copies."""
        return (self._gpu if self.sub_groups[index].on_gpu else self._cpu).moments(index)

    def set_moments(self, index: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Set a sub-group's moments. Compact ones are rounded to nearest, and what ``moments`` returned is not rounded at all."""
        (self._gpu if self.sub_groups[index].on_gpu else self._cpu).set_moments(index, first, second)

    def set_steps_taken(self, steps: int) -> None:
        """Set the step count of all sub-groups, after loading their states."""
        self.steps_taken = steps
        self._norm.forget_last()
        self._gpu.set_steps_taken(steps)
