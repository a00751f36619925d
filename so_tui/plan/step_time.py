"""Predicts how long the GPU takes for one micro-batch, forward and backward.

Both are matrix products at the rate that the GPU reaches in models, attention at its backend's rate
within documents of their length, plus what moves through the GPU's memory beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from so_tui.model.flops import attention_pairs, bucket_tokens, recomputed_logits
from so_tui.model.profile import WEIGHT_BYTES, StateLayout, offloaded_bytes
from so_tui.model.sharding import speculating, speculation_bytes
from so_tui.plan.placement import Placement
from so_tui.plan.plan import PlannedRates, StepTime
from so_tui.plan.rates import Speed, StepConstants
from so_tui.plan.resources import exchanged_bytes
from so_tui.plan.terms import MemoryTerm, sized
from so_tui.plan.workload import Workload
from so_tui.spec.attention import MASKED_BACKENDS, AttentionBackend
from so_tui.spec.run_spec import RunSpec

# What DeepSpeed's own SuperOffload adds to a step, from its source (0.19.8) and measured on H200
# hosts.
#
# Each gradient crosses the link three times: to the pinned gradient buffer, back to the GPU, and
# in fp32 to the optimizer's own, which is pageable once the Adam worker has received it. Without
# clipping a sub-group is submitted as soon as it is complete, and Adam overlaps with backward;
# with clipping each is stepped after backward, one after the other. Then the training process
# passes over every gradient and master weight on the host, casts the weights there and copies them
# from pageable memory.


UNSCALE_BYTES = 8
"""Host memory traffic per parameter of multiplying the fp32 gradient by the loss scale and the
clipping factor.
"""
SELF_COPY_BYTES = 8
"""The same of copying a master weight onto itself, which it does for each result that it did not
wait for.
"""
WORKER_BYTES = 36
"""The same of its Adam worker: a copy of the fp32 gradient, then AdamW in fp32."""


def exposed_adam_s(layout: StateLayout, adam_bytes_per_s: float, backward_s: float) -> float:
    """Return how long a step without clipping waits for Adam, and then passes over gradients and
    master weights.

    Args:
        layout: What to step: the worker can only begin with the largest sub-group when backward is
            over.
        adam_bytes_per_s: Host memory traffic of the worker, and of the passes.
        backward_s: How long the worker has had sub-groups to step.
    """
    worker = WORKER_BYTES / adam_bytes_per_s
    waits = max(layout.largest_on("cpu") * worker, layout.cpu_numel * worker - backward_s)
    return waits + layout.cpu_numel * (UNSCALE_BYTES + SELF_COPY_BYTES) / adam_bytes_per_s


BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products instead of
two.
"""


class _Pass(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch on the GPU, without waiting for anything."""

    forward_s: float
    backward_s: float
    backward_python_s: float
    """Of backward, the time Python needs to launch it. It is hidden while the GPU computes for
    longer.
    """
    exposed_copies_s: float = 0.0
    """Of both, the time by which copies of what layers keep in host memory make them longer."""


# When the weights that an Adam worker updated are on the GPU again, sub-group by sub-group, and
# what a forward waits for them.


class _Update(NamedTuple):
    """One sub-group's way through the Adam worker. Time 0 is the end of backward."""

    begin: float
    """When a forward first uses it, as a share of the forward."""
    ready_s: float
    """When the worker may take it."""
    adam_s: float
    weights_bytes: int
    """New weights that are copied to the GPU; none where they stay in host memory."""


# Predicts what the optimizer adds to a step: what nothing hides of stepping, and of copying
# gradients and weights.
#
# The exposed time is simulated sub-group by sub-group (``weight_arrivals``).


ADAM_BYTES = 28
"""Host memory traffic of AdamW per parameter: master weight and moments read and written, bf16
gradient read, bf16 weight written; fp32 gradients where they were accumulated, 4 more.
"""
ZEROOFFLOAD_ADAM_BYTES = 34
"""Bytes of host memory that ZeRO-Offload's Adam moves per parameter: master weight and moments read
and written, fp32 gradient read, the master weight read again for the bf16 weight.
"""
ACCUMULATE_BYTES = 10
"""bf16 gradient read, fp32 sum read and written."""


# Predicts how long an optimizer step takes, from the model's FLOPs, the bytes it moves, and the
# rates of the hardware.
#
# step = accumulation x (forward + backward + data) + optimizer time that nothing hides + a little.
# Rates of the hardware are the machine's own where ``so-tui calibrate`` measured them, else
# published for its kind.


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The step of a placed spec on a host of known speed: passes on the GPU, and the optimizer
    during and after them.
    """

    placement: Placement
    speed: Speed
    workload: Workload
    attention: AttentionBackend
    between_hosts_bytes_per_s: float | None
    """How fast a collective enters and leaves each of several hosts; None on one."""
    fetches: bool = True
    """Whether weights in host memory are fetched; if not, passes are as if the GPU had them."""
    adam_cores: int
    """Cores that run CPU Adam for one rank."""
    ranks_per_node: int
    """Ranks that share their node's memory."""
    use: StepConstants

    def step_time(self) -> StepTime:
        """Return the seconds of one optimizer step."""
        once, steps = self.one_pass, self.placement.spec.gradient_accumulation_steps
        return StepTime(
            forward_s=steps * once.forward_s,
            backward_s=steps * once.backward_s + self._gradient_copies_s(),
            exposed_optimizer_s=self._exposed_s(),
            data_s=steps * self.use.data_s + self.use.other_s,
        )

    # The passes of one micro-batch.

    @cached_property
    def all_gather_s(self) -> float:
        """Seconds of one all-gather of all weights; backward all-gathers them again, and reduces as
        much. Each rank, and each host, receives all but its own part.
        """
        placement, between = self.placement, self.between_hosts_bytes_per_s
        ranks = placement.layout.ranks
        rates = [between] if between else []
        if between is None or placement.local_ranks > 1:
            rates.append(self.speed.peer_bytes_per_s)
        return 2 * placement.profile.parameters * (ranks - 1) / ranks / min(rates)

    @cached_property
    def one_pass(self) -> _Pass:
        """Forward with the loss, which forms its gradients there, and backward with what it
        recomputes.

        All-gathers take part of the GPU from the computation they overlap with. Where layers are
        small the GPU waits for Python, and has time for both.
        """
        use, placement, gather_s = self.use, self.placement, self.all_gather_s
        ranks, launches = placement.layout.ranks, use.forward_launches_per_layer
        (layers_s, layers_back_s), fetched_s = self._layers_s(), self.fetched_weights_s
        overhead_s = placement.profile.architecture.layers * self.speed.layer_launch_overhead_of(
            ranks
        )
        gathering = use.all_gather_launches_per_layer if ranks > 1 else 0.0
        # Selective recomputation runs all of a layer's Python again, and skips its products.
        again = 0.0 if placement.spec.model.policy == "none" else launches
        forward = max(
            layers_s + use.all_gather_share * gather_s,
            gather_s + fetched_s,
            (launches + gathering) * overhead_s,
        )
        python = (use.backward_launches_per_layer + again + gathering) * overhead_s
        backward = max(
            layers_back_s + 2 * use.all_gather_share * gather_s,
            2 * gather_s + fetched_s,
            python,
        )
        # What layers keep on the host is copied beside all that, in backward behind weights from
        # there.
        waits = max(0.0, self.kept_copies_s(self.speed.d2h_bytes_per_s) - forward)
        waits_back = max(0.0, self.kept_copies_s(self.speed.h2d_bytes_per_s) + fetched_s - backward)
        return _Pass(
            forward_s=forward + waits + self._loss_s(),
            backward_s=backward + waits_back,
            backward_python_s=python,
            exposed_copies_s=waits + waits_back,
        )

    def _layers_s(self) -> tuple[float, float]:
        """Return the seconds of all layers' forward, and of their backward with what it
        recomputes.
        """
        placement, use, tokens = self.placement, self.use, self._computed_tokens
        profile, flops = placement.profile, placement.profile.flops
        shape, policy = profile.architecture, placement.spec.model.policy
        rate = self.speed.matrix_flops * (
            use.expert_efficiency if shape.experts else use.matrix_efficiency
        )
        products = 2.0 * tokens * (flops.active_parameters - flops.head_parameters) / rate
        elementwise = tokens * shape.layers * profile.elementwise_bytes / self._moved_bytes_per_s
        attention_forward, attention_backward = self._attention_s()
        exchange = self._exchange_s()
        backward = 2 * (products + elementwise) + attention_backward + exchange
        if placement.tiled and not profile.fused:  # tiles compute norms again
            backward += tokens * shape.layers * profile.norm_bytes / self._moved_bytes_per_s
        again = 0.0
        if policy in ("full", "attention"):
            again = 2.0 * tokens * flops.repeated(tiled=placement.tiled) / rate + elementwise
        if policy == "full":
            again += attention_forward
        if policy == "selective":
            again = elementwise
            if shape.experts and not profile.fused:
                width = shape.active_intermediate
                again += 6.0 * tokens * shape.hidden * width * shape.layers / rate
        if policy != "none":
            again += exchange
        return products + elementwise + attention_forward + exchange, backward + again

    def _exchange_s(self) -> float:
        """Return the seconds of trading tokens for heads and back in one pass over all layers,
        where ranks share sequences.

        Attention waits for it, so nothing hides it.
        """
        shape = self.placement.profile.architecture
        ranks = self.placement.spec.train.sequence_parallel
        sent = self._computed_tokens * shape.layers * exchanged_bytes(shape, ranks)
        return sent / self.speed.peer_bytes_per_s

    def kept_copies_s(self, bytes_per_s: float) -> float:
        """Return the seconds of copying in one direction what layers keep in host memory between
        the passes of one micro-batch.
        """
        placement = self.placement
        each = offloaded_bytes(placement.profile.architecture, placement.spec.model)
        return self._computed_tokens * each / bytes_per_s

    @property
    def fetched_weights_s(self) -> float:
        """Seconds of copying this rank's weights in host memory to the GPU, once for each of the
        two passes. Computation hides them.
        """
        return 2 * self.placement.host_weights / self.speed.h2d_bytes_per_s if self.fetches else 0.0

    @cached_property
    def _computed_tokens(self) -> float:
        """Positions of a micro-batch that are computed: backends that take boundaries see little
        padding, others rows of one width.
        """
        positions = self.placement.tokens
        if self.attention in MASKED_BACKENDS:
            return positions * self._row_share
        return min(positions, positions * self.workload.useful_share + bucket_tokens(positions) / 2)

    @property
    def _row_share(self) -> float:
        """Width of a micro-batch's rows, of the sequence length, where attention takes a mask."""
        return self.workload.row_share(self.placement.spec.train.micro_batch)

    def _attention_s(self) -> tuple[float, float]:
        """Return the seconds of attention in all layers' forward and backward.

        Backends that take boundaries attend within documents, masked ones to all pairs of a row. A
        sliding window makes a document as slow as one of twice its length.
        """
        length = self.placement.spec.data.sequence_length
        kinds = self.placement.profile.flops.attention_layers
        parts: list[tuple[float, float]] = []
        """(Length that sets the rate, FLOPs of forward)."""
        if self.attention in MASKED_BACKENDS:
            row = self._row_share * length
            width = sum(layers * width for layers, width, _ in kinds)
            parts.append((row, 4.0 * width * self._computed_tokens * row))
        else:
            document = self.workload.attended_tokens or float(length)
            tokens, whole = self.placement.tokens * self.workload.useful_share, round(document)
            for layers, width, window in kinds:
                reach = document if window is None else min(document, 2.0 * window)
                pairs = attention_pairs(whole, window)
                parts.append((reach, 4.0 * width * layers * pairs * tokens / whole))
        forward_s = backward_s = 0.0
        for reach, forward in parts:
            rate = self.speed.attention_at(self.attention, reach)
            forward_s += forward / rate.forward
            backward_s += BACKWARD_ATTENTION * forward / rate.backward
        return forward_s, backward_s

    def _loss_s(self) -> float:
        profile, use = self.placement.profile, self.use
        shape, trained = profile.architecture, self.placement.tokens * self.workload.trained_share
        again = 2.0 * recomputed_logits(int(trained), shape.vocabulary) * shape.hidden
        # The head's products are dense in any model.
        products = 6.0 * trained * profile.flops.head_parameters + again
        moved = trained * shape.vocabulary * use.loss_bytes_per_logit
        return (
            products / (self.speed.matrix_flops * use.matrix_efficiency)
            + moved / self._moved_bytes_per_s
        )

    @property
    def _moved_bytes_per_s(self) -> float:
        """Rate of elementwise work through GPU memory."""
        speed, use = self.speed, self.use
        return min(
            speed.matrix_flops * use.elementwise_bytes_per_flop,
            speed.hbm_bytes_per_s * use.elementwise_efficiency,
        )

    # The optimizer.

    def rates(self) -> PlannedRates | None:
        """Return the rates of offloading with our engine; None without it."""
        spec, cpu_numel = self.placement.spec, self.placement.layout.cpu_numel
        if not spec.offload.own_engine or not cpu_numel:
            return None
        shares = (self.use.clipped_adam_share, self.use.speculative_adam_share)
        least_share = min(shares) if self._clipped else 1.0
        return PlannedRates(
            adam_bytes_per_s=least_share * self._adam_bytes_per_s,
            d2h_bytes_per_s=self.speed.d2h_bytes_per_s,
            h2d_bytes_per_s=self.speed.h2d_bytes_per_s,
            d2h_bytes=2 * cpu_numel * spec.gradient_accumulation_steps,
            # Weights in host memory are copied within forward and backward, which says nothing of
            # the bus where they take longer.
            h2d_bytes=0 if self.placement.host_weights else 2 * cpu_numel,
        )

    @cached_property
    def _adam_bytes_per_s(self) -> float:
        """Rate of CPU Adam beside the other ranks of its node."""
        return self.speed.adam_bytes_per_s(self.adam_cores, self.ranks_per_node)

    @cached_property
    def _undisturbed_adam_bytes_per_s(self) -> float:
        return self.speed.adam_bytes_per_s(self.adam_cores, 1)

    def _gradient_copies_s(self) -> float:
        """Return what gradients on their way to the host add to backward, over all micro-batches.

        Our engine's copies overlap with backward, and its worker sums gradients beside the next
        micro-batch. DeepSpeed's optimizers pass over gradients on the host while backward waits; in
        further micro-batches they fetch them, add, and write them back; none of that is assumed
        hidden (accumulation with ZeRO-Offload was not measured).
        """
        placement, speed, once = self.placement, self.speed, self.one_pass
        spec, layout = placement.spec, placement.layout
        if not layout.cpu_numel:
            return 0.0
        further = spec.gradient_accumulation_steps - 1
        if spec.offload.own_engine:
            copies = 2 * layout.cpu_numel / speed.d2h_bytes_per_s
            adding = ACCUMULATE_BYTES * layout.cpu_numel / self._adam_bytes_per_s
            return further * max(0.0, copies + adding - once.forward_s - once.backward_s)
        buffer = placement.gradient_bytes * layout.numel
        further_s = further * buffer * (1 / speed.d2h_bytes_per_s + 1 / speed.h2d_bytes_per_s)
        if spec.offload.mode == "zerooffload":
            # Every gradient goes to the gradient partition, and in fp32 to that of its optimizer:
            # two copies over the bus, one after the other. Python waits for them while the GPU
            # computes what was launched before.
            copied = self.use.zerooffload_copies * (buffer + 4 * layout.cpu_numel)
            copies_s = copied / speed.d2h_bytes_per_s
            return max(0.0, once.backward_python_s + copies_s - once.backward_s) + further_s
        return self._deepspeed_copies_s + further_s

    @property
    def _deepspeed_copies_s(self) -> float:
        """How long Python waits for the copies of one backward's gradients in DeepSpeed's
        SuperOffload.
        """
        layout, speed = self.placement.layout, self.speed
        there_and_back = 2 * layout.numel * (1 / speed.d2h_bytes_per_s + 1 / speed.h2d_bytes_per_s)
        in_fp32 = 4 * layout.cpu_numel / speed.pageable_d2h_bytes_per_s
        return self.use.deepspeed_copies * (there_and_back + in_fp32)

    def _exposed_s(self) -> float:
        """Return the seconds from the end of the last backward kernel until nothing waits for
        weights any more.
        """
        placement, use, rate = self.placement, self.use, self._adam_bytes_per_s
        spec, layout, numel = placement.spec, placement.layout, placement.layout.cpu_numel
        on_gpu = use.gpu_step_bytes_per_parameter * layout.gpu_numel / self.speed.hbm_bytes_per_s
        if not numel:
            tensors = sum(len(group.names) for group in layout.sub_groups)
            return on_gpu + use.gpu_step_tensor_s * tensors
        if spec.offload.own_engine:
            return self._own_exposed_s(on_gpu)
        undisturbed = self._undisturbed_adam_bytes_per_s
        if spec.offload.mode == "zerooffload":
            # Its kernel slows down where ranks share a node's memory; its passes over gradients and
            # weights are slow by themselves.
            adam_s = numel * (ZEROOFFLOAD_ADAM_BYTES / rate + UNSCALE_BYTES / undisturbed)
        elif self._clipped:
            adam_s = numel * (UNSCALE_BYTES + use.deepspeed_clipped_adam_bytes) / rate
        else:
            backward_s = self.one_pass.backward_s + self._deepspeed_copies_s
            adam_s = exposed_adam_s(layout, rate, backward_s)
        # Master weights are cast on the host and copied from pageable memory.
        if (cast_rate := self.speed.cast_h2d_bytes_per_s) is not None:
            return on_gpu + adam_s + 2 * numel / cast_rate
        other_bytes = use.zerooffload_step_bytes - ZEROOFFLOAD_ADAM_BYTES - UNSCALE_BYTES
        return on_gpu + adam_s + numel * other_bytes / undisturbed

    def _own_exposed_s(self, on_gpu_s: float) -> float:
        """Return how long our engine's step is exposed. The GPU steps its own sub-groups while the
        worker steps the others, and the forward after it waits for weights that are still to be
        updated or copied.
        """
        norm_s, forward_s = self._norm_s(), self.one_pass.forward_s
        updates = list(self._updates(norm_s))
        begins_s = max(on_gpu_s + norm_s, self._early_stepped_s(updates, norm_s))
        found = self._arrivals(updates)
        return begins_s + max(0.0, *(at - begins_s - begin * forward_s for begin, at in found))

    def _arrivals(self, updates: Iterable[_Update]) -> list[tuple[float, float]]:
        """Return (when a forward first uses it, seconds at which its new weights are on the GPU) of
        each sub-group.

        The worker takes the ready sub-group that a forward pass uses first.
        """
        latency_s, bytes_per_s = self.use.weight_copy_latency_s, self.speed.h2d_bytes_per_s
        coming = sorted(updates, key=attrgetter("ready_s"), reverse=True)
        ready: list[tuple[float, int, _Update]] = []
        worker = copies = float("-inf")
        found = []
        while coming or ready:
            if not ready:
                worker = max(worker, coming[-1].ready_s)
            while coming and coming[-1].ready_s <= worker:
                heappush(ready, (coming[-1].begin, len(coming), coming.pop()))
            begin, _, (_, _, adam_s, weights_bytes) = heappop(ready)
            worker += adam_s
            copies = max(copies, worker + latency_s) + weights_bytes / bytes_per_s
            found.append((begin, copies))
        return found

    @property
    def _clipped(self) -> bool:
        return self.placement.spec.train.gradient_clipping > 0

    @property
    def _accumulated(self) -> bool:
        return self.placement.spec.gradient_accumulation_steps > 1

    @cached_property
    def _held_back(self) -> frozenset[int]:
        """Sub-groups that wait for the gradient norm."""
        if not self._clipped:
            return frozenset()
        groups = {group.index for group in self.placement.layout.sub_groups}
        return frozenset(groups.difference(self.placement.speculating))

    def _norm_s(self) -> float:
        """Return when the gradient norm is known, unless the worker steps sub-groups whose
        gradients it alone sees.
        """
        if not self._clipped:
            return 0.0
        summing_s = 0.0
        if self._accumulated:
            on_cpu = self.placement.layout.cpu_groups
            summed = (group.numel for group in on_cpu if group.index in self._held_back)
            summing_s = ACCUMULATE_BYTES * next(summed, 0) / self._adam_bytes_per_s
        return self.use.norm_s + summing_s

    def _updates(self, norm_s: float) -> Iterator[_Update]:
        """Yield the way of each offloaded sub-group through the worker."""
        placement, use, rate = self.placement, self.use, self._adam_bytes_per_s
        spans = placement.compute_spans
        step_bytes = ADAM_BYTES + (4 if self._accumulated else 0)
        # A forward beside it takes some of its rate, unless ranks that share the memory leave it
        # less than that.
        beside_forward = min(use.clipped_adam_share * self._undisturbed_adam_bytes_per_s, rate)
        beside_backward = use.speculative_adam_share * rate if self._clipped else rate
        for group in placement.layout.cpu_groups:
            begin = spans[group.index][0]
            if group.index in self._held_back:
                ready_s, bytes_per_s = norm_s, beside_forward
            else:
                copied_s = 2 * group.numel / self.speed.d2h_bytes_per_s
                ready_s, bytes_per_s = -begin * self.one_pass.backward_s + copied_s, beside_backward
            returned = 0 if placement.host_weights else 2 * group.numel
            yield _Update(begin, ready_s, step_bytes * group.numel / bytes_per_s, returned)

    def _early_stepped_s(self, updates: Sequence[_Update], norm_s: float) -> float:
        """Return when the worker has stepped what does not wait for the norm of accumulated
        gradients.

        Only the worker sees whole gradients, so their norm is known when it has stepped the last
        one.
        """
        if not self._accumulated:
            return 0.0
        early = [update for update in updates if update.ready_s < norm_s or not self._clipped]
        return max((at for _, at in self._arrivals(early)), default=0.0)


# How many sub-groups can be stepped before the gradient norm is known. Each needs a second set of
# states in host memory.
#
# The host's memory goes to the states first, then to what a run needs beside them; speculation
# gets what is left. It changes no result.


_LONG_WAIT = 0.1
"""Share of a step that waits for the optimizer, from which fewer second states are tried."""
_SHARES = (0.75, 0.5, 0.25)
"""Of the memory that there is for them."""


class SecondStates(Struct, frozen=True):
    """The sub-groups of one rank that have a second set of states."""

    sub_groups: tuple[int, ...]
    budget_bytes: int
    """What they may take, and what they were chosen for: with the same budget, the engine chooses
    the same.
    """
    term: MemoryTerm


def second_states_bytes(spec: RunSpec) -> float:
    """Return the bytes per parameter of a second set of states."""
    return speculation_bytes(
        WEIGHT_BYTES, spec.offload.states, host_weights=spec.offload.keeps_weights_on_host
    )


def can_speculate(spec: RunSpec) -> bool:
    """Return whether the spec has a gradient norm to wait for, an engine that need not wait for it,
    and leave to do so.
    """
    return (
        spec.offload.own_engine
        and spec.train.gradient_clipping > 0
        and spec.offload.speculation != "off"
    )


def second_states(placement: Placement, room: Callable[[], int]) -> SecondStates | None:
    """Return which sub-groups speculate; None if none does.

    Args:
        placement: The states.
        room: Returns the bytes of host memory that each rank may still take. Asked only where the
            spec leaves that to the plan.
    """
    spec, spans = placement.spec, placement.compute_spans
    if not can_speculate(spec) or not placement.layout.cpu_numel:
        return None
    most = [int(spec.offload.speculation_gib * 2**30)] if spec.offload.speculation_gib else []
    if spec.offload.speculation == "auto":
        most.append(max(0, room()))
    each = second_states_bytes(spec)
    budget = min([*most, math.ceil(each * placement.layout.cpu_numel)])
    # In the order in which a forward pass first uses them.
    groups = sorted(placement.layout.cpu_groups, key=lambda group: spans[group.index][0])
    positions = speculating([group.numel for group in groups], int(budget / each))
    found = [groups[position] for position in positions]
    if not found:
        return None
    indices = tuple(sorted(group.index for group in found))
    numel, note = sum(group.numel for group in found), " (a second set of states and weights)"
    return SecondStates(indices, budget, sized("second-states", "node", "exact", each, numel, note))


def choose(
    placement: Placement,
    room: Callable[[], int],
    step_of: Callable[[SecondStates | None], StepTime | None],
) -> tuple[SecondStates | None, StepTime | None, bool]:
    """Return the second states with which a step is the fastest, where the spec leaves that to the
    plan; the step with them, where the choice needed to know; and whether there was memory for
    them, but they would make the step no faster.

    Where Adam has more to do than backward hides, fewer are faster: what backward cannot hide is
    stepped in place, at a higher rate.

    Args:
        placement: The states.
        room: As for ``second_states``.
        step_of: Returns the predicted step with these second states; None where speeds are not
            known.
    """
    second = second_states(placement, room)
    if second is None or placement.spec.offload.speculation != "auto":
        return second, None, False
    held_back, step = step_of(None), step_of(second)
    if held_back is None or step is None:
        return second, None, False
    tried: list[tuple[SecondStates, StepTime]] = [(second, step)]
    if step.exposed_optimizer_s > _LONG_WAIT * step.total_s:
        for share in _SHARES:
            fewer = second_states(placement, partial(int, share * second.budget_bytes))
            if fewer and (found := step_of(fewer)):
                tried.append((fewer, found))
    best, step = min(tried, key=lambda found: found[1].total_s)
    if step.total_s >= held_back.total_s:
        return None, held_back, True
    return best, step, False
