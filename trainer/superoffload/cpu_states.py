"""The sub-groups whose states are in host memory: their shared arrays, the commands for their Adam
worker, and its results.

One staging buffer per sub-group carries the gradient to the host and the new weights back. It may
be written by:

    the gradient's copy   after the last step's weights have been copied from it, or the worker has
                          accumulated the last micro-batch
    the worker            when the gradient has been copied
    (then the new weights are copied to the GPU)

Where the weights are in host memory the worker writes new ones there, and neither this buffer nor
the second one below returns any.

A sub-group that speculates has two sets of states, of which one is current, and a second buffer for
new weights. A speculative step reads the current set and the staging buffer, and writes the other
set and the second buffer. To accept it is to make the other set current. To discard it is to step
in place, as if it had never been: nothing that this reads or writes was touched.

While a checkpoint is written behind training, it is written from copies, which the worker makes
before it steps the sub-groups again. They are in sets of their own or, where there is none, in the
set that is not current. Such a sub-group does not speculate until it is written.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from so_tui.model.sharding import StatesFormat
from superoffload import kernel
from superoffload.errors import NonFiniteGradientError, OffloadError
from superoffload.gpu_states import Copies, SubGroup, Tensors
from superoffload.settings import HostRoom, Settings
from superoffload.shared_states import HostWeights, SharedStates
from superoffload.steps import Speculation, StepPolicy, StepTime
from superoffload.transfers import (
    CompletedEvent,
    Copy,
    Event,
    LayerWait,
    Meter,
    Stream,
    Transfer,
    Transfers,
)
from superoffload.worker import (
    Command,
    GradientSource,
    MemorySize,
    Moments,
    Operation,
    Result,
    Segment,
    StatesSet,
)
from superoffload.worker_client import WorkerClient

# New weights on their way from the Adam worker to the layers that use them: which have arrived,
# and who has waited for them.


class _NewWeights:
    """The new weights of one rank's CPU sub-groups.

    The worker client's thread adds what has arrived, the training thread does all else.

    Args:
        transfers: Makes streams wait.
        meter: Is told of waits.
        wait: Blocks until a function that it is given returns true, which only a result of the
            worker can bring about.
    """

    def __init__(
        self, transfers: Transfers, meter: Meter, wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._transfers, self._meter, self._wait = transfers, meter, wait
        self.arrived: dict[int, Transfer | None] = {}
        """By sub-group of which the worker has made new weights: their copy to the GPU; None where
        they stay in host memory.
        """
        self._unawaited: set[int] = set()
        """Sub-groups for whose new weights the computing stream has not waited yet."""
        self._unused: set[int] = set()
        """Sub-groups whose new weights no layer has used yet."""
        self._computing: Stream = None
        """The stream that computes forward, while a wait is measured."""
        self._blocked: Event | None = None
        """When the host had last waited for the worker, in that stream's time."""

    def expect(self, index: int) -> None:
        """Note that a sub-group will have other weights than those that arrived last."""
        self.arrived.pop(index, None)
        self._unawaited.add(index)
        self._unused.add(index)

    def copied(self, index: int) -> list[Event]:
        """Return the event after which a sub-group's new weights have been copied to the GPU; none
        where they are not copied.
        """
        transfer = self.arrived.get(index)
        return [transfer.end] if transfer else []

    def wait_for(self, sub_groups: Iterable[int] | None = None) -> None:
        """Make the current stream wait for the new weights of these sub-groups, or of all. Blocks
        until the worker has made them.
        """
        waiting = sorted(
            self._unawaited if sub_groups is None else self._unawaited.intersection(sub_groups)
        )
        late = [index for index in waiting if index not in self.arrived]
        for index in waiting:
            self._wait(lambda index=index: index in self.arrived)  # type: ignore[misc]
            if transfer := self.arrived[index]:
                self._transfers.wait_event(transfer.end)
        self._unawaited.difference_update(waiting)
        if late:
            self._blocked = self._transfers.mark(self._computing)

    @contextmanager
    def measuring_wait(self, sub_groups: Iterable[int]) -> Iterator[None]:
        """Measure how long the current stream has nothing to compute within the context, because of
        new weights.

        They are those of ``sub_groups``, which it uses next, and all that the host waits for: it
        queues nothing meanwhile.
        """
        used = self._unused.intersection(sub_groups)
        if not used and not self._unawaited:  # else marks would cost time in every layer
            yield
            return
        self._computing, self._blocked = self._transfers.stream(), None
        begin = self._transfers.mark()
        yield
        if used or self._blocked is not None:
            updated = [transfer.end for index in used if (transfer := self.arrived.get(index))]
            if self._blocked is not None:
                updated.append(self._blocked)
            self._meter.current.layer_waits.append(
                LayerWait(begin, self._transfers.mark(), tuple(updated))
            )
        self._unused -= used
        self._computing = None


_FORMATS: dict[StatesFormat, Moments] = {
    "fp32": Moments.FP32,
    "bf16-moments": Moments.BF16,
    "int8-moments": Moments.INT8,
}


@dataclass(frozen=True)
class _WholeGradient:
    """A sub-group's gradient of a whole step."""

    copied: Event
    """After it, the last micro-batch's gradient is in the staging buffer."""
    source: GradientSource


@dataclass(eq=False)
class CpuStates:
    """The CPU sub-groups' states, and the worker that steps them. Without CPU sub-groups there is
    neither memory nor a worker, and nothing to wait for.

    A step begins with its first gradient and ends with ``finish`` or ``undo``.

    Raises:
        OffloadError: If there is no kernel, not enough memory, or no worker. Nothing is left behind
            then.
    """

    sub_groups: Sequence[SubGroup]
    """All sub-groups of the rank."""
    adamw: torch.optim.AdamW
    """Gives learning rate, betas, epsilon and weight decay."""
    settings: Settings
    room: HostRoom
    transfers: Transfers
    meter: Meter
    device: torch.device
    """What the model computes on."""
    host_weights: HostWeights | None
    """Where the weights are, unless they are on the GPU."""
    policy: StepPolicy
    """That of sub-groups that do not speculate."""

    def __post_init__(self) -> None:
        self._indices = sorted(
            (index for index, group in enumerate(self.sub_groups) if not group.on_gpu),
            key=lambda index: self.sub_groups[index].first_use,
        )
        """In the order of their use, which differs from that of the sub-groups: the norms' group is
        last in the list and used by the first layer.
        """
        self._speculative = replace(self.policy, step_time=StepTime.SPECULATIVE)
        """The policy of sub-groups that speculate."""
        self.speculation = Speculation()
        self.speculating = self.room.second
        """Sub-groups that are stepped before the norm is known, in this step."""
        self.squares: dict[int, float] = {}
        """Sums of squares of the gradients that the worker has accumulated or stepped with, as far
        as results have arrived.
        """
        self._gradients: dict[int, _WholeGradient] = {}
        """Those of sub-groups that were complete at the accumulation boundary."""
        self._learning_rates: dict[int, float] = {}
        """The learning rates of sub-groups that the worker already steps."""
        self._moments = _FORMATS[self.settings.states]
        self._current = dict.fromkeys(self._indices, 0)
        """Which of its sets of states a sub-group's last accepted step is in."""
        self._undecided: set[int] = set()
        """Sub-groups with a speculative step that was neither accepted nor discarded."""
        self._pending: dict[int, set[int]] = {operation: set() for operation in Operation}
        """By operation: sub-groups for which the worker has not done it yet. A speculative step is
        dropped when it is discarded.
        """
        self._deciding = threading.Lock()
        """Held while new weights are handled, and while speculative steps are discarded."""
        self.lent: set[int] = set()
        """Sub-groups that must not speculate: a copy that may still be read is in their other set.
        """
        self.new_weights = _NewWeights(self.transfers, self.meter, self._wait)
        # None without CPU sub-groups: nothing uses either then.
        self._states: SharedStates = None  # type: ignore[assignment]
        self._client: WorkerClient = None  # type: ignore[assignment]
        if self._indices:
            try:
                self._start()
            except BaseException:
                self.close()
                raise

    @property
    def worker_pid(self) -> int | None:
        return self._client.process.pid if self._client else None

    def check(self) -> None:
        """Raise what went wrong with the worker, if anything did."""
        if self._client:
            self._client.check()

    def stage_gradient(self, index: int, member: int, values: Tensor) -> list[Copy]:
        """Return the copies that bring a gradient into the staging buffer. They must wait for
        ``new_weights.copied``.
        """
        # Rarely: the command was sent before a whole forward pass.
        self._wait(lambda: index not in self._pending[Operation.ACCUMULATE])
        staging = self._states.staging(index)
        begin, end = self.sub_groups[index].span(member)
        after = begin + values.numel()
        copies = [(staging[begin:after], values.to(staging.dtype))]
        if after < end:  # the last rank's padding still holds weights
            copies.append((staging[after:end], values.new_zeros(end - after, dtype=staging.dtype)))
        return copies

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
            self._gradients[index] = _WholeGradient(copied, policy.gradient_source(micro_batch))
        operation = policy.on_complete(boundary=boundary)
        if operation is Operation.ACCUMULATE:
            # The first micro-batch overwrites the sum of the previous step.
            first = int(micro_batch == 0)
            self._send(Command(operation, index, step, first_micro_batch=first), copied)
        elif operation is not None:
            self._step(operation, index, step)

    @property
    def has_all_gradients(self) -> bool:
        """Whether every sub-group was complete at the accumulation boundary."""
        return len(self._gradients) == len(self._indices)

    def check_learning_rates(self) -> None:
        """Raise OffloadError (``learning-rate-changed``) if a sub-group was stepped with another
        learning rate than it has now.
        """
        for index, rate in self._learning_rates.items():
            if rate != float(self._parameter_group(index)["lr"]):
                raise OffloadError(
                    "The learning rate changed between backward and step. Set it before the "
                    "step's last backward.",
                    code="learning-rate-changed",
                )

    def finish(self, step: int, factor: float) -> None:
        """Accept what was stepped before the norm was known, or discard it; step what was discarded
        or held back.

        Args:
            step: The step's number.
            factor: That of clipping; 1 if the norm is within the limit.
        """
        within = factor == 1.0
        discarded: Collection[int] = ()
        if within:
            for index in self._undecided:
                self._current[index] = 1 - self._current[index]
            self._undecided.clear()
        else:
            discarded = self._discard()
        for index in self._indices:
            if index in discarded or self._policy_of(index).step_time is StepTime.NORM_KNOWN:
                self._step(Operation.STEP, index, step, factor)
        self.speculation.record(within=within, speculated=bool(self.speculating))
        self._begin_step()

    def undo(self, last_step: int) -> None:
        """Return to the weights of ``last_step``, the last that was taken, where a sub-group was
        stepped before the norm was known.
        """
        for index in self._discard():
            # The staging buffer returns them: no gradient may be on its way there.
            copied = self._gradients[index].copied
            self._update(Command(Operation.RESTORE, index, last_step), copied)
        self._begin_step()

    def wait_for_squares(self) -> None:
        """Block until the worker has stepped with, or accumulated, the step's whole gradient of
        every sub-group.
        """
        self._wait(
            lambda: (
                not self._pending[Operation.ACCUMULATE] and len(self.squares) == len(self._indices)
            )
        )

    def copies(self) -> Copies:
        """Have the worker copy the states of all sub-groups that have room for it, before it steps
        them again. Those whose copy is in their second set do not speculate while they are
        ``lent``.
        """
        found: Copies = {}
        for index, current in self._current.items():
            if index in self.room.copied:
                into = StatesSet.COPY
            elif index in self.room.second:
                into = StatesSet(1 - current)
                self.lent.add(index)
            else:
                continue
            self._send(Command(Operation.COPY, index, states=current, into=into), CompletedEvent())
            found[index] = partial(self._copied_states, index, into)
        self.speculating -= self.lent
        return found

    def wait_for_copies(self) -> None:
        """Block until the worker has made all copies, so that the states may be overwritten."""
        self._wait(lambda: not self._pending[Operation.COPY])

    def _copied_states(self, index: int, which: int) -> Tensors:
        self._client.wait(lambda: index not in self._pending[Operation.COPY])
        return self._states.master_weights(index, which), *self._states.moments(index, which)

    def master_weights(self, index: int) -> Tensor:
        return self._states.master_weights(index, self._current[index])

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the first and second moment, in fp32: the state itself, or copies of compact
        moments.
        """
        return self._states.moments(index, self._current[index])

    def set_moments(self, index: int, first: Tensor, second: Tensor) -> None:
        """Set both moments. Raises OffloadError (``impossible-moments``) for a NaN or a negative
        second moment where they are compact.
        """
        # The minimum of values with a NaN is NaN.
        if self._moments is not Moments.FP32 and (first.min().isnan() or not second.min() >= 0):
            raise OffloadError(
                f"The moments of {self.sub_groups[index].names[0]}, or of parameters that are "
                "stepped with it, are not numbers, or the second moments are negative, which "
                "AdamW never makes. Compact moments cannot hold them; use another checkpoint.",
                code="impossible-moments",
            )
        self._states.set_moments(index, self._current[index], first, second)

    def close(self) -> None:
        """End the worker and release the memory. Safe to call twice."""
        if self._client:
            self._client.close()
        if self.device.type == "cuda" and self._indices:
            torch.cuda.synchronize(
                self.device
            )  # no copy may be in flight when its pages are unpinned
        if self._states:
            self._states.close()
        if self.host_weights:
            self.host_weights.close()

    def _start(self) -> None:
        library = kernel.library()
        dtype = self.sub_groups[0].weights.dtype
        size = MemorySize(
            tuple(
                () if group.on_gpu else _segments(group, self.settings.seed)
                for group in self.sub_groups
            ),
            dtype.itemsize,
            self.policy.accumulates,
            tuple(self.room.second),
            self._moments,
            self.room.copied,
            self.host_weights is not None,
        )
        self._states = SharedStates(size, dtype, self.settings.available_bytes, library)
        self._client = WorkerClient(
            self._states,
            self.host_weights,
            self.settings,
            library,
            self.transfers.attach,
            self._on_result,
        )
        self._initialize_all()  # so that the worker's many threads are the first to touch the pages
        if self.device.type == "cuda":
            self._states.pin()
            if self.host_weights:
                self.host_weights.pin()
        if not self.host_weights:
            for index in self._indices:
                self._states.staging(index).copy_(self.sub_groups[index].weights)
            self._initialize_all()
        self.copies()  # as above: the first copy is then as fast as the others
        self.wait_for_copies()
        self.lent.clear()
        self.speculating = self.room.second

    def _initialize_all(self) -> None:
        for index in self._indices:
            self._send(Command(Operation.INITIALIZE, index), CompletedEvent())
        self._wait(lambda: not self._pending[Operation.INITIALIZE])

    def _begin_step(self) -> None:
        self._gradients, self._learning_rates = {}, {}
        self.speculating = frozenset()
        if self.speculation.is_worthwhile:
            self.speculating = self.room.second - self.lent

    def _policy_of(self, index: int) -> StepPolicy:
        return self._speculative if index in self.speculating else self.policy

    def _parameter_group(self, index: int) -> dict[str, Any]:
        return self.adamw.param_groups[self.sub_groups[index].parameter_group]

    def _discard(self) -> set[int]:
        """Give up the speculative steps, whether or not the worker has begun them, and return their
        sub-groups.

        Their weights on the GPU may be those of the discarded step: step the sub-groups again, or
        restore them.
        """
        if self._client:
            self._client.withdraw(Operation.SPECULATE)
        with self._deciding:
            self._pending[Operation.SPECULATE].clear()
        discarded, self._undecided = self._undecided, set()
        return discarded

    def _step(self, operation: Operation, index: int, step: int, scale: float = 1.0) -> None:
        """Have the worker step a sub-group with its whole gradient."""
        group, gradient = self._parameter_group(index), self._gradients[index]
        rate = float(
            group["lr"]
        )  # now: it may be a tensor that a scheduler writes to before the command leaves
        self._learning_rates[index] = rate
        command = Command(
            operation,
            index,
            step,
            gradient=gradient.source,
            scale=scale,
            learning_rate=rate,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            epsilon=group["eps"],
            weight_decay=group["weight_decay"],
        )
        self._update(command, gradient.copied)

    def _update(self, command: Command, after: Event) -> None:
        """Have the worker make new weights from the current states: in place, or out of place if
        the command is to speculate.
        """
        index = command.sub_group
        self.new_weights.expect(index)
        self.squares.pop(index, None)
        if command.operation == Operation.SPECULATE:
            self._undecided.add(index)
        self._send(command._replace(states=self._current[index]), after)

    def _send(self, command: Command, after: Event) -> None:
        """Send a command when it is ready: sums of gradients first, then the sub-group that the
        next forward needs first.
        """
        updates = command.operation not in (Operation.INITIALIZE, Operation.ACCUMULATE)
        first_use = self.sub_groups[command.sub_group].first_use
        self._pending[command.operation].add(command.sub_group)
        self._client.submit(command, after, 1 + first_use if updates else 0)

    def _on_result(self, command: Command, result: Result) -> None:
        """Handle a result, in the worker client's thread."""
        operation, index = command.operation, command.sub_group
        pending = self._pending[operation]
        if operation in (Operation.INITIALIZE, Operation.COPY):
            pending.discard(index)
            return
        group, measured = self.sub_groups[index], self.meter.current
        measured.adam_busy_s += result.seconds
        measured.adam_bytes += command.bytes_moved(
            group.weights.numel(), group.weights.dtype.itemsize, self._moments
        )
        if operation == Operation.ACCUMULATE:
            self.squares[index] = result.sum_of_squares
            pending.discard(index)
            return
        if operation != Operation.SPECULATE and not math.isfinite(result.sum_of_squares):
            raise NonFiniteGradientError(
                group.names, step=command.step, sub_group=index, poisoned=True
            )
        with self._deciding:
            if operation == Operation.SPECULATE and index not in pending:  # discarded
                return
            pending.discard(index)
            transfer = None
            if not self.host_weights:
                source = self._states.staging(index)
                if operation == Operation.SPECULATE:
                    source = self._states.new_weights(index)
                transfer = self.transfers.weights_to_gpu(group.weights, source)
                measured.h2d.append(transfer)
            self.squares[index] = result.sum_of_squares
            self.new_weights.arrived[index] = transfer

    def _wait(self, ready: Callable[[], bool]) -> None:
        if ready():
            return
        begin = time.perf_counter()
        self._client.wait(ready)
        self.meter.current.host_wait_s += time.perf_counter() - begin


def _segments(group: SubGroup, seed: int) -> tuple[Segment, ...]:
    """Return the parts of a sub-group; a parameter's random bits depend on its name and the
    seed.
    """
    return tuple(
        Segment(end - begin, place, zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
        for name, place, (begin, end) in zip(
            group.names, group.places, map(group.span, range(len(group.names))), strict=True
        )
    )
