"""AdamW for one rank, worked out by its GPU and its CPU together while backward and forward run.

The weights (bf16) are on the GPU, cut into sub-groups. The first sub-groups keep their optimizer states on the GPU and are stepped there;
the states of the others lie in host memory shared with an Adam worker, and one exchange array per sub-group carries the gradient down
and the new weights back, 2 bytes a parameter each way:

    backward   gradient -> exchange, on a stream of its own                           as soon as it is reduced
    worker     AdamW on the sub-group; the new weights replace the gradient           as soon as the sub-group is complete *
    link       exchange -> weights, on another stream                                 as soon as the worker is done
    forward    waits, layer by layer, for the weights it is about to use              ``land``

* Gradient clipping needs the norm of all gradients first. Then the worker is held until backward is over, and steps the sub-groups in
the order in which the next forward will want them: what is lost at the end of backward is won back under forward. The result is exactly
that of clipped AdamW. (Stepping ahead and rolling back would need a second copy of the states or an inexact inverse.)

Accumulation: with more than one micro-step, the worker adds the gradients up in fp32 on the host. That costs 4 bytes of host memory a
parameter and nothing on the GPU, where memory is what offloading is short of; the 10 bytes of host traffic per parameter and micro-step
hide behind that micro-step. The last micro-step's gradient is added inside the Adam pass.

The sum of squares of the gradients is taken on the GPU as they are reduced, or by the worker where it alone knows the sum.

This module knows nothing of DeepSpeed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from so_tui_trainer.offload import kernel, worker
from so_tui_trainer.offload.arena import Arena
from so_tui_trainer.offload.errors import NonFiniteGradientError, OffloadError
from so_tui_trainer.offload.link import WorkerLink
from so_tui_trainer.offload.stats import OffloadStats
from so_tui_trainer.offload.transfers import Copy, Done, Event, Mark, Transfer, transfers_for


@dataclass(frozen=True)
class SubGroup:
    """Parameters that are stepped together: this rank's share of them, flat."""

    weights: torch.Tensor
    parameter_group: int
    """Index into the optimizer's parameter groups, whose learning rate and weight decay apply."""
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    """Where each parameter begins."""
    on_gpu: bool
    first_use: int = 0
    """When a forward pass first wants its weights: the place of its earliest parameter in the model's order."""


@dataclass(frozen=True)
class Gradient:
    """The reduced gradient of one parameter: this rank's share, without padding, in memory that is not used for anything else later."""

    sub_group: int
    member: int
    values: torch.Tensor


@dataclass
class _Backward:
    """What has come in during the current step."""

    micro_step: int = 0
    arrived: dict[int, set[int]] = field(default_factory=dict)
    """Members of each sub-group with a gradient in this micro-step."""
    copied: dict[int, Event] = field(default_factory=dict)
    """Sub-groups that are complete at the boundary: when their gradient is where it belongs."""


@dataclass
class _Interval:
    """Measurements from the end of one step to the end of the next."""

    landing: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Waits for weights, in forward."""
    stepping: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Waits for the norm, in ``step``."""
    host_wait_s: float = 0.0
    adam_busy_s: float = 0.0
    to_host: list[Transfer] = field(default_factory=list)
    to_gpu: list[Transfer] = field(default_factory=list)


class SuperOffload:
    """The optimizer of one rank. All methods belong to the training thread.

    ``adamw`` steps what is on the GPU, and its parameter groups say learning rate, betas, epsilon and weight decay for all.
    ``all_reduce`` adds a tensor up over the ranks, in place. ``silence_limit_s``: how long the worker may compute without progress.
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
        silence_limit_s: float = 30.0,
    ) -> None:
        self.sub_groups = tuple(sub_groups)
        self.lazy_landing = True
        """False: ``step`` waits for all weights, as other optimizers do (for comparison)."""
        self._adamw = adamw
        self._accumulation = accumulation
        self._clipping = clipping
        self._all_reduce = all_reduce
        self._device = self.sub_groups[0].weights.device
        self._transfers = transfers_for(self._device)
        self.steps_taken = 0
        self._backward = _Backward()
        self._interval, self._last_interval = _Interval(), _Interval()
        self._gpu = [index for index, group in enumerate(self.sub_groups) if group.on_gpu]
        self._cpu = [index for index, group in enumerate(self.sub_groups) if not group.on_gpu]
        self._held_order = sorted(self._cpu, key=lambda index: self.sub_groups[index].first_use)
        """In which order the worker gets what was held back: norms, say, are few, last in the list, and wanted by the very first layer."""
        self._slot = {index: slot for slot, index in enumerate(self._cpu)}
        """Sub-group -> its place in the arena."""
        self._masters = {index: self._gpu_master(index) for index in self._gpu}
        self._gradients = {index: torch.zeros_like(master) for index, master in self._masters.items()}
        self._squares = torch.zeros(len(self.sub_groups), dtype=torch.float64, device=self._device)
        self._norm: tuple[torch.Tensor, Event] | None = None
        self._worker_squares: dict[int, float] = {}
        self._accumulating: set[int] = set()
        """Sub-groups whose exchange the worker is still reading."""
        self._learning_rates: dict[int, float] = {}
        """With which sub-groups were stepped during this backward."""
        self._pending: set[int] = set()
        """Sub-groups whose new weights the computing stream has not waited for yet."""
        self._landed: dict[int, Event] = {}
        self._fault: NonFiniteGradientError | None = None
        self._link: WorkerLink | None = None
        if self._cpu:
            self._start_worker(cpus, silence_limit_s)

    @property
    def worker_pid(self) -> int | None:
        return self._link.process.pid if self._link else None

    @property
    def host_bytes(self) -> int:
        """Shared memory of this rank."""
        return self._arena.bytes if self._link else 0

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
            begin, end = self._span(index, gradient.member)
            if self.sub_groups[index].on_gpu:
                self._add_on_gpu(self._gradients[index].narrow(0, begin, values.numel()), values)
            else:
                self._wait_for_exchange(index)
                exchange = self._arena.exchange(self._slot[index])
                copies.append((exchange.narrow(0, begin, values.numel()), values.to(exchange.dtype)))
                if begin + values.numel() < end:  # the last rank's padding still holds weights
                    copies.append(
                        (exchange[begin + values.numel() : end], values.new_zeros(end - begin - values.numel(), dtype=exchange.dtype))
                    )
                if index in self._landed:
                    after.append(self._landed[index])
        if boundary and self._squares_on_gpu:
            self._add_squares(gradients)
        copied: Event = Done()
        if copies:
            transfer = self._transfers.gradients_to_host(copies, after)
            self._interval.to_host.append(transfer)
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

    def _add_on_gpu(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if self._backward.micro_step == 0:
            target.copy_(values)
        else:
            target.add_(values)

    def _wait_for_exchange(self, index: int) -> None:
        """Before the next micro-step's gradient overwrites the last one, which a whole forward ago the worker was told to add."""
        if index in self._accumulating:
            self._wait(lambda: index not in self._accumulating)

    @property
    def _squares_on_gpu(self) -> bool:
        """Whether the GPU sees whole gradients: not when the worker adds them up."""
        return self._accumulation == 1

    def _add_squares(self, gradients: Sequence[Gradient]) -> None:
        for index in dict.fromkeys(gradient.sub_group for gradient in gradients if not self.sub_groups[gradient.sub_group].on_gpu):
            values = [gradient.values for gradient in gradients if gradient.sub_group == index and gradient.values.numel()]
            if values:
                norms = torch.stack(torch._foreach_norm(values, 2, dtype=torch.float64))
                self._squares[index] += norms.square().sum()

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
            self._accumulating.add(index)
            first = int(self._backward.micro_step == 0)
            self._send(worker.Command(worker.Operation.ACCUMULATE, self._slot[index], self.steps_taken + 1, first=first), copied)

    # -- step ----------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Steps everything. The weights are in place when ``land`` or ``settle`` say so.

        Raises NonFiniteGradientError. Without clipping sub-groups are stepped by then: nothing in memory may be saved.
        """
        self._check()
        if len(self._backward.copied) != len(self._cpu) or self._backward.micro_step == 0:
            raise OffloadError("step() without a complete backward before it.")
        for index, rate in self._learning_rates.items():
            if rate != self._adamw.param_groups[self.sub_groups[index].parameter_group]["lr"]:
                raise OffloadError("The learning rate changed between backward and step: set it before the step's last backward.")
        self._check_last_norm()  # long known by now
        begin = self._transfers.mark()
        squares = self._all_squares()
        self._all_reduce(squares)
        factor = 1.0
        if self._clipping or not self._squares_on_gpu:
            values = squares.tolist()
            self._reject_non_finite(values, self.steps_taken + 1, poisoned=not self._clipping)
            norm = math.sqrt(sum(values))
            factor = min(1.0, self._clipping / (norm + 1e-6)) if self._clipping else 1.0
        self._norm = self._transfers.fetch(squares)
        self._interval.stepping.append((begin, self._transfers.mark()))
        if self._clipping:
            for index in self._held_order:
                self._send_step(index, factor, self._backward.copied[index])
        self._step_gpu(factor)
        self._finish()

    def land(self, sub_groups: Collection[int]) -> None:
        """Lets the current stream wait for the new weights of these sub-groups; blocks until the worker is done with them."""
        if self._pending and not self._pending.isdisjoint(sub_groups):
            self._land(self._pending.intersection(sub_groups))

    def settle(self) -> None:
        """Waits until all weights are those of the last step, and the state is known to be sound. Raises what is wrong with it."""
        self._check()
        if self._learning_rates:
            raise OffloadError("The state in memory is in the middle of a step, between backward and step(): it cannot be saved.")
        self._land(self._pending)
        self._check_last_norm()

    def gradient_norm(self) -> float | None:
        """Global norm of the last step's gradients, before clipping. Raises NonFiniteGradientError."""
        self._check()
        values = self._check_last_norm()
        return None if values is None else math.sqrt(sum(values))

    def stats(self) -> OffloadStats:
        """From the end of the step before the last to the end of the last one."""
        last, seconds = self._last_interval, self._transfers.seconds
        landing = sum(seconds(*wait) for wait in last.landing)
        return OffloadStats(
            adam_busy_s=last.adam_busy_s,
            exposed_wait_s=landing + sum(seconds(*wait) for wait in last.stepping),
            exposed_in_forward_s=landing,
            host_wait_s=last.host_wait_s,
            to_host_bytes=sum(transfer.bytes for transfer in last.to_host),
            to_host_s=sum(seconds(transfer.begin, transfer.end) for transfer in last.to_host),
            to_gpu_bytes=sum(transfer.bytes for transfer in last.to_gpu),
            to_gpu_s=sum(seconds(transfer.begin, transfer.end) for transfer in last.to_gpu),
        )

    def close(self) -> None:
        """Ends the worker and gives the memory back. Safe to call twice."""
        if self._link:
            self._link.close()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # no copy may be under way when its pages are unlocked
            self._arena.close()

    # -- states --------------------------------------------------------------------------------------------------------------------

    def master(self, index: int) -> torch.Tensor:
        """fp32 weights, for reading and for writing in place; after ``settle`` only."""
        return self._masters[index].detach() if index in self._masters else self._arena.master(self._slot[index])

    def moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment, likewise."""
        if index not in self._masters:
            return self._arena.first_moment(self._slot[index]), self._arena.second_moment(self._slot[index])
        state = self._adamw.state[self._masters[index]]
        if not state:
            on_device = self._adamw.defaults.get("fused")
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._device if on_device else "cpu")
            state["exp_avg"] = torch.zeros_like(self._masters[index])
            state["exp_avg_sq"] = torch.zeros_like(self._masters[index])
        return state["exp_avg"], state["exp_avg_sq"]

    def set_steps_taken(self, steps: int) -> None:
        """Part of loading a state: all sub-groups have taken this many steps."""
        self.steps_taken = steps
        self._norm = None
        for index in self._gpu:
            self.moments(index)
            self._adamw.state[self._masters[index]]["step"].fill_(steps)

    # -- inside --------------------------------------------------------------------------------------------------------------------

    def _gpu_master(self, index: int) -> torch.Tensor:
        return self.sub_groups[index].weights.detach().to(torch.float32, copy=True).requires_grad_()

    def _start_worker(self, cpus: Sequence[int], silence_limit_s: float) -> None:
        numels = [self.sub_groups[index].weights.numel() for index in self._cpu]
        dtype = self.sub_groups[0].weights.dtype
        self._arena = Arena(numels, dtype, accumulate=self._accumulation > 1, page_lock=self._device.type == "cuda")
        self._link = WorkerLink(self._arena, cpus, kernel.library(), self._on_result, silence_limit_s)
        self._begin_all()  # the worker's many threads are the first to touch the pages
        self._arena.lock_pages()
        for index in self._cpu:
            self._arena.exchange(self._slot[index]).copy_(self.sub_groups[index].weights)
        self._begin_all()

    def _begin_all(self) -> None:
        self._beginning = set(self._cpu)
        for slot in self._slot.values():
            self._send(worker.Command(worker.Operation.BEGIN, slot), Done())
        self._wait(lambda: not self._beginning)

    def _on_result(self, result: worker.Result) -> None:
        """In the link's thread."""
        index = self._cpu[result.sub_group]
        if result.operation == worker.Operation.BEGIN:
            self._beginning.discard(index)
            return
        self._interval.adam_busy_s += result.seconds
        self._worker_squares[index] = result.sum_of_squares
        if result.operation == worker.Operation.ACCUMULATE:
            self._accumulating.discard(index)
            return
        if not math.isfinite(result.sum_of_squares):
            raise self._non_finite(result.step, index, poisoned=True)
        group = self.sub_groups[index]
        transfer = self._transfers.weights_to_gpu(group.weights, self._arena.exchange(result.sub_group))
        self._interval.to_gpu.append(transfer)
        self._landed[index] = transfer.done

    def _send_step(self, index: int, scale: float, after: Event) -> None:
        group = self._adamw.param_groups[self.sub_groups[index].parameter_group]
        # Held back, the worker has added up all micro-steps; otherwise all but the last.
        held = self._clipping > 0
        command = worker.Command(
            worker.Operation.STEP,
            self._slot[index],
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
        self._learning_rates[index] = group["lr"]
        self._landed.pop(index, None)
        self._worker_squares.pop(index, None)
        self._pending.add(index)
        self._send(command, after)

    def _all_squares(self) -> torch.Tensor:
        """Sum of squares of this rank's gradients, one per sub-group."""
        squares = self._squares.clone()
        for index in self._gpu:
            squares[index] = torch.linalg.vector_norm(self._gradients[index], dtype=torch.float64).square()
        if not self._squares_on_gpu and self._cpu:
            if self._clipping:
                self._wait(lambda: not self._accumulating)
            else:
                self._wait(lambda: len(self._worker_squares) == len(self._cpu) and len(self._landed) == len(self._cpu))
            for index in self._cpu:
                squares[index] = self._worker_squares[index]
        return squares

    def _step_gpu(self, factor: float) -> None:
        if not self._gpu:
            return
        for group in self._adamw.param_groups:
            group["params"] = []
        for index in self._gpu:
            if factor != 1.0:
                self._gradients[index].mul_(factor)
            self._masters[index].grad = self._gradients[index]
            self._adamw.param_groups[self.sub_groups[index].parameter_group]["params"].append(self._masters[index])
        self._adamw.step()
        for group in self._adamw.param_groups:
            group["params"] = []
        for index in self._gpu:
            self.sub_groups[index].weights.copy_(self._masters[index])

    def _finish(self) -> None:
        self.steps_taken += 1
        self._backward = _Backward()
        self._learning_rates.clear()
        self._squares.zero_()
        if not self.lazy_landing:
            self._land(self._pending)
        self._last_interval, self._interval = self._interval, _Interval()

    def _land(self, sub_groups: Iterable[int]) -> None:
        waiting = sorted(sub_groups)
        if not waiting:
            return
        begin = self._transfers.mark()
        for index in waiting:
            self._wait(lambda index=index: index in self._landed)  # type: ignore[misc]
            self._transfers.join(self._landed[index])
        self._pending.difference_update(waiting)
        self._interval.landing.append((begin, self._transfers.mark()))

    def _check_last_norm(self) -> list[float] | None:
        """The sums of squares of the last step, read late so that nothing had to wait for them."""
        if self._norm is None:
            return None
        values, event = self._norm
        event.synchronize()
        squares: list[float] = values.tolist()
        self._reject_non_finite(squares, self.steps_taken, poisoned=not self._clipping)
        return squares

    def _reject_non_finite(self, squares: Sequence[float], step: int, *, poisoned: bool) -> None:
        for index, value in enumerate(squares):
            if not math.isfinite(value):
                self._fault = self._non_finite(step, index, poisoned=poisoned)
                raise self._fault

    def _non_finite(self, step: int, index: int, *, poisoned: bool) -> NonFiniteGradientError:
        names = self.sub_groups[index].names
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

    def _check(self) -> None:
        """Raises what has gone wrong with the state, now or earlier."""
        if self._fault is not None and self._fault.poisoned:
            raise self._fault
        if self._link:
            self._link.check()

    def _send(self, command: worker.Command, after: Event) -> None:
        assert self._link is not None
        self._link.submit(command, after)

    def _wait(self, ready: Callable[[], bool]) -> None:
        assert self._link is not None
        begin = time.perf_counter()
        self._link.wait(ready)
        self._interval.host_wait_s += time.perf_counter() - begin

    def _span(self, index: int, member: int) -> tuple[int, int]:
        offsets = (*self.sub_groups[index].offsets, self.sub_groups[index].weights.numel())
        return offsets[member], offsets[member + 1]
