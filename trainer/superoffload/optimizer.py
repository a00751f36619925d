"""AdamW for one rank, worked out by its GPU and its CPU together while backward and forward run.

The weights (bf16) are on the GPU, cut into sub-groups. The first sub-groups keep their optimizer states on the GPU and are stepped there;
the states of the others lie in host memory shared with an Adam worker, and one exchange array per sub-group carries the gradient down
and the new weights back, 2 bytes a parameter each way:

    backward   gradient -> exchange, on a stream of its own                           as soon as it is reduced
    worker     AdamW on the sub-group; the new weights replace the gradient           as soon as the sub-group is complete *
    link       exchange -> weights, on another stream                                 as soon as the worker is done
    forward    waits, layer by layer, for the weights it is about to use              ``wait_for_weights``

* Gradient clipping needs the norm of all gradients first. Then the worker is held until backward is over, and steps the sub-groups in
the order in which the next forward will want them: what is lost at the end of backward is won back under forward. The result is exactly
that of clipped AdamW. (Stepping ahead and rolling back would need a second copy of the states or an inexact inverse.)

Accumulation: with more than one micro-step, the worker adds the gradients up in fp32 on the host. That costs 4 bytes of host memory a
parameter and nothing on the GPU, where memory is what offloading is short of; the 10 bytes of host traffic per parameter and micro-step
hide behind that micro-step. The last micro-step's gradient is added inside the Adam pass.

The sum of squares of the gradients is taken on the GPU as they are reduced, or by the worker where it alone knows the sum.

Nothing here knows of DeepSpeed. What lies where: ``cpu_states``, ``gpu_states``; what is read of the gradients: ``norm``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from superoffload import worker
from superoffload.cpu_states import CpuStates
from superoffload.errors import NonFiniteGradientError, OffloadError
from superoffload.gpu_states import GpuStates
from superoffload.meter import Meter, OffloadStats
from superoffload.norm import GradientNorm
from superoffload.sub_groups import Gradient, SubGroup, check_types
from superoffload.transfers import Copy, Done, Event, transfers_for


@dataclass
class _Backward:
    """What has come in during the current step."""

    micro_step: int = 0
    arrived: dict[int, set[int]] = field(default_factory=dict)
    """Members of each sub-group with a gradient in this micro-step."""
    copied: dict[int, Event] = field(default_factory=dict)
    """Sub-groups that are complete at the boundary: when their gradient is where it belongs."""
    learning_rates: dict[int, float] = field(default_factory=dict)
    """With which sub-groups were stepped already."""

    @property
    def under_way(self) -> bool:
        return bool(self.micro_step or self.arrived)


class SuperOffload:
    """The optimizer of one rank. All methods belong to the training thread.

    ``adamw`` steps what is on the GPU, and its parameter groups say learning rate, betas, epsilon and weight decay for all.
    ``accumulation``: micro-steps per step. ``clipping``: largest norm of a step's gradients, 0 for none. ``cpus``: the worker's own.
    ``all_reduce`` adds a tensor up over the ranks, in place. ``watchdog_timeout_s``: how long the worker may compute without progress.

    Raises OffloadError when it cannot be started; nothing is left behind then.
    """

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        adamw: torch.optim.AdamW,
        *,
        accumulation: int,
        clipping: float,
        cpus: Sequence[int],
        all_reduce: Callable[[torch.Tensor], None],
        watchdog_timeout_s: float = 30.0,
    ) -> None:
        check_types(sub_groups)
        self.sub_groups = tuple(sub_groups)
        self.steps_taken = 0
        self.lazy_weights = True
        """False: ``step`` waits for all weights, as other optimizers do (for comparison)."""
        self._adamw = adamw
        self._accumulation = accumulation
        self._clipping = clipping
        self._backward = _Backward()
        self._closed = False
        self._transfers = transfers_for(self.sub_groups[0].weights.device)
        self._meter = Meter(self._transfers)
        self._norm = GradientNorm(self.sub_groups, self._transfers, all_reduce, poisons=not clipping)
        self._gpu = GpuStates(self.sub_groups, adamw)
        self._cpu = CpuStates(
            self.sub_groups, self._transfers, self._meter, accumulate=accumulation > 1, cpus=cpus, watchdog_timeout_s=watchdog_timeout_s
        )

    @property
    def worker_pid(self) -> int | None:
        return self._cpu.worker_pid

    # -- backward ------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def receive(self, gradients: Sequence[Gradient], *, boundary: bool) -> None:
        """Takes gradients that the current stream has computed. ``boundary``: this is the step's last micro-step."""
        self._check()
        copies: list[Copy] = []
        after: list[Event] = []
        for gradient in gradients:
            self._register(gradient)
            index, values = gradient.sub_group, gradient.values.flatten()
            if self.sub_groups[index].on_gpu:
                begin, _ = self.sub_groups[index].span(gradient.member)
                self._gpu.add(index, begin, values, first=self._backward.micro_step == 0)
            else:
                copies += self._cpu.place(index, gradient.member, values)
                after += self._cpu.readers(index)
        if boundary and self._squares_on_gpu:
            self._norm.add([gradient for gradient in gradients if not self.sub_groups[gradient.sub_group].on_gpu])
        copied: Event = Done()
        if copies:
            transfer = self._transfers.gradients_to_host(copies, after)
            self._meter.current.to_host.append(transfer)
            copied = transfer.done
        for index in dict.fromkeys(gradient.sub_group for gradient in gradients):
            if len(self._backward.arrived[index]) == len(self.sub_groups[index].names):
                self._complete(index, copied, boundary)

    def end_of_backward(self) -> None:
        """Every backward ends here. Raises OffloadError, with names, when parameters got no gradient."""
        self._check()
        missing = [
            name
            for index, group in enumerate(self.sub_groups)
            for member, name in enumerate(group.names)
            if member not in self._backward.arrived.get(index, ())
        ]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise OffloadError(
                f"{len(missing)} trainable parameters got no gradient in step {self.steps_taken + 1}, micro-step "
                f"{self._backward.micro_step + 1}: {shown}. Freeze what the loss does not depend on (requires_grad_(False)), list "
                "blocks of experts in model.leaf_modules, and use activation checkpointing with use_reentrant=False."
            )
        self._backward.arrived.clear()
        self._backward.micro_step += 1

    def _register(self, gradient: Gradient) -> None:
        arrived = self._backward.arrived.setdefault(gradient.sub_group, set())
        if gradient.member in arrived:
            name = self.sub_groups[gradient.sub_group].names[gradient.member]
            raise OffloadError(f"The gradient of {name} came twice in one micro-step. Call backward once per micro-step.")
        if self._backward.micro_step >= self._accumulation:
            raise OffloadError(
                f"More than the configured {self._accumulation} backward passes before a step. Set train.gradient_accumulation to "
                "the number of micro-steps."
            )
        arrived.add(gradient.member)

    @property
    def _squares_on_gpu(self) -> bool:
        """Whether the GPU sees whole gradients: not when the worker adds them up."""
        return self._accumulation == 1

    def _complete(self, index: int, copied: Event, boundary: bool) -> None:
        """All gradients of this sub-group are on their way."""
        if self.sub_groups[index].on_gpu:
            return
        if boundary:
            self._backward.copied[index] = copied
            if not self._clipping:
                self._send_step(index, 1.0, copied)
                return
        if self._accumulation > 1:
            self._cpu.accumulate(index, self.steps_taken + 1, first=self._backward.micro_step == 0, after=copied)

    def _send_step(self, index: int, scale: float, after: Event) -> None:
        group = self._adamw.param_groups[self.sub_groups[index].parameter_group]
        # Held back, the worker has added up all micro-steps; otherwise all but the last.
        held = self._clipping > 0
        command = worker.Command(
            worker.Operation.STEP,
            self._cpu.slot[index],
            self.steps_taken + 1,
            take_exchange=int(self._accumulation == 1 or not held),
            take_accumulated=int(self._accumulation > 1 and (held or self._backward.micro_step > 0)),
            scale=scale,
            learning_rate=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            epsilon=group["eps"],
            weight_decay=group["weight_decay"],
        )
        self._backward.learning_rates[index] = group["lr"]
        self._cpu.step(index, command, after)

    # -- step ----------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Steps everything. The weights are in place when ``wait_for_weights`` or ``synchronize`` say so.

        Raises NonFiniteGradientError. Without clipping sub-groups are stepped by then: nothing in memory may be saved. With clipping
        the gradients are dropped, and all is as it was before them.
        """
        self._check()
        if len(self._backward.copied) != len(self._cpu.indices) or self._backward.micro_step == 0:
            raise OffloadError("step() without a complete backward before it.")
        for index, rate in self._backward.learning_rates.items():
            if rate != self._adamw.param_groups[self.sub_groups[index].parameter_group]["lr"]:
                raise OffloadError("The learning rate changed between backward and step: set it before the step's last backward.")
        self._norm.last()  # long known by now
        try:
            factor = self._clip_factor()
        except NonFiniteGradientError:
            self._begin_step()
            raise
        if self._clipping:
            for index in self._cpu.in_order_of_use:
                self._send_step(index, factor, self._backward.copied[index])
        self._gpu.step(factor)
        self.steps_taken += 1
        self._begin_step()
        if not self.lazy_weights:
            self._cpu.wait_for_weights()
        self._meter.end_step()

    def wait_for_weights(self, sub_groups: Collection[int]) -> None:
        """Lets the current stream wait for the new weights of these sub-groups; blocks until the worker is done with them."""
        self._cpu.wait_for_weights(sub_groups)

    def synchronize(self) -> None:
        """Waits until all weights are those of the last step, and the state is known to be sound. Raises what is wrong with it."""
        self._check()
        if self._backward.under_way:
            raise OffloadError("The state in memory is in the middle of a step, between backward and step(): it cannot be saved.")
        self._cpu.wait_for_weights()
        self._norm.last()

    def gradient_norm(self) -> float | None:
        """Global norm of the last step's gradients, before clipping. Raises NonFiniteGradientError."""
        self._check()
        return self._norm.last()

    def stats(self) -> OffloadStats:
        """From the end of the step before the last to the end of the last one."""
        return self._meter.stats()

    def leave_out_waits(self) -> None:
        """Keep what was waited for since the last step (to save or to evaluate) out of the next step's figures."""
        self._meter.leave_out_waits()

    def close(self) -> None:
        """Ends the worker and gives the memory back. Safe to call twice."""
        self._closed = True
        self._cpu.close()

    def _clip_factor(self) -> float:
        """Of this step. Waits for the norm only if it depends on it. Raises NonFiniteGradientError."""
        step, factor = self.steps_taken + 1, 1.0
        begin = self._transfers.mark()
        squares = self._norm.total(self._gpu.gradients(), self._squares_of_worker())
        if self._clipping or not self._squares_on_gpu:
            norm = self._norm.read(squares, step)
            factor = min(1.0, self._clipping / (norm + 1e-6)) if self._clipping else 1.0
        self._norm.keep(squares, step)
        self._meter.current.stepping.append((begin, self._transfers.mark()))
        return factor

    def _squares_of_worker(self) -> dict[int, float]:
        """What the worker alone knows. Waits for it."""
        if self._squares_on_gpu:
            return {}
        if self._clipping:
            self._cpu.wait_for_accumulation()
        else:
            self._cpu.wait_for_steps()
        return self._cpu.squares

    def _begin_step(self) -> None:
        self._backward = _Backward()
        self._norm.begin_step()

    def _check(self) -> None:
        """Raises what has gone wrong with the state, now or earlier."""
        self._norm.check()
        self._cpu.check()
        if self._closed:
            raise OffloadError("The offload engine is closed, and its states are gone.")

    # -- states --------------------------------------------------------------------------------------------------------------------

    def master(self, index: int) -> torch.Tensor:
        """fp32 weights, for reading and for writing in place; after ``synchronize`` only."""
        return (self._gpu if self.sub_groups[index].on_gpu else self._cpu).master(index)

    def moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment, likewise."""
        return (self._gpu if self.sub_groups[index].on_gpu else self._cpu).moments(index)

    def set_steps_taken(self, steps: int) -> None:
        """Part of loading a state: all sub-groups have taken this many steps."""
        self.steps_taken = steps
        self._norm.forget()
        self._gpu.set_steps_taken(steps)
