"""Predicts how long an optimizer step takes, from the model's FLOPs, the bytes it moves, and the rates of the hardware.

step = accumulation x (forward + backward + data) + optimizer time that nothing hides + a little. Forward and backward are matrix products
at the rate that the GPU reaches in models, attention at its backend's rate within documents of their length, plus what moves through the
GPU's memory beside them. The optimizer's exposed time is simulated sub-group by sub-group (``weight_arrivals``). Rates of the hardware are
the machine's own where ``so-tui calibrate`` measured them, else published for its kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from so_tui.model.activations import offloaded_bytes, policy_of
from so_tui.model.flops import attention_pairs
from so_tui.model.padding import bucket_tokens
from so_tui.plan import deepspeed_step
from so_tui.plan.constants import Speed, StepConstants, constants
from so_tui.plan.deepspeed_step import UNSCALE_BYTES, OffloadedStates
from so_tui.plan.placement import Placement, own_engine
from so_tui.plan.sequence_parallel import exchanged_bytes
from so_tui.plan.types import PlannedRates, StepTime
from so_tui.plan.weight_arrivals import Update, arrivals, weight_wait_s
from so_tui.plan.workload import Workload
from so_tui.spec.attention import MASKED_BACKENDS, AttentionBackend

ADAM_BYTES = 28
"""Host memory traffic of AdamW per parameter: master weight and moments read and written, bf16 gradient read, bf16 weight written; fp32
gradients where they were accumulated, 4 more."""
ZEROOFFLOAD_ADAM_BYTES = 34
"""The same of ZeRO-Offload: master weight and moments read and written, fp32 gradient read, the master weight read again for the bf16
weight."""
ACCUMULATE_BYTES = 10
"""bf16 gradient read, fp32 sum read and written."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products instead of two."""


class _Layers(NamedTuple):
    """Seconds of all layers' forward pass, of their backward pass, and of what that recomputes."""

    forward: float
    backward: float
    repeated: float


class Pass(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch on the GPU, without waiting for anything."""

    forward_s: float
    backward_s: float
    backward_python_s: float
    """Of backward, the time Python needs to launch it. It is hidden while the GPU computes for longer."""
    exposed_copies_s: float = 0.0
    """Of both, the time by which copies of what layers keep in host memory make them longer."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The step of a placed spec on hardware of known speed."""

    placement: Placement
    speed: Speed
    adam_cores: int
    """Cores that run CPU Adam for one rank."""
    ranks_per_node: int
    """Ranks that share their node's memory."""
    workload: Workload = field(default_factory=Workload)
    attention: AttentionBackend = "torch-flash"
    between_hosts_bytes_per_s: float | None = None
    """How fast a collective enters and leaves each of several hosts; None on one."""
    use: StepConstants = field(default_factory=lambda: constants().step)

    def step_time(self) -> StepTime:
        """Return the seconds of one optimizer step."""
        steps = self.placement.spec.gradient_accumulation_steps
        return StepTime(
            forward_s=steps * self.one_pass.forward_s,
            backward_s=steps * self.one_pass.backward_s + self._gradient_copies_s(),
            exposed_optimizer_s=self._exposed_s(),
            data_s=steps * self.use.data_s + self.use.other_s,
        )

    def rates(self) -> PlannedRates | None:
        """Return the rates of offloading with our engine; None without it."""
        spec, cpu_numel = self.placement.spec, self.placement.layout.cpu_numel
        if not own_engine(spec) or not cpu_numel:
            return None
        least_share = min(self.use.clipped_adam_share, self.use.speculative_adam_share) if spec.train.gradient_clipping > 0 else 1.0
        return PlannedRates(
            adam_bytes_per_s=least_share * self._adam_bytes_per_s,
            d2h_bytes_per_s=self.speed.d2h_bytes_per_s,
            h2d_bytes_per_s=self.speed.h2d_bytes_per_s,
            d2h_bytes=2 * cpu_numel * spec.gradient_accumulation_steps,
            # Weights in host memory are copied within forward and backward, which says nothing of the bus where they take longer.
            h2d_bytes=0 if self.placement.host_weights else 2 * cpu_numel,
        )

    @cached_property
    def all_gather_s(self) -> float:
        """Seconds of one all-gather of all weights; backward all-gathers them again, and reduces as much."""
        rates = [self.between_hosts_bytes_per_s] if self.between_hosts_bytes_per_s else []
        if self.between_hosts_bytes_per_s is None or self.placement.local_ranks > 1:
            rates.append(self.speed.peer_bytes_per_s)
        return self.gathered_bytes / min(rates)

    @property
    def gathered_bytes(self) -> float:
        """Bytes that each rank, and each host, receives in one all-gather of all weights."""
        layout = self.placement.layout
        return 2 * layout.parameters * (layout.ranks - 1) / layout.ranks

    @cached_property
    def one_pass(self) -> Pass:
        """Forward with the loss, which forms its gradients there, and backward with what it recomputes.

        All-gathers take part of the GPU from the computation they overlap with. Where layers are small the GPU waits for Python, and has
        time for both.
        """
        use, layers, gather_s = self.use, self.placement.profile.architecture.layers, self.all_gather_s
        layers_s = self._layers_s()
        overhead_s = layers * self.speed.layer_launch_overhead_of(self.placement.layout.ranks)
        gathering = use.all_gather_launches_per_layer if self.placement.layout.ranks > 1 else 0.0
        # Selective recomputation runs all of a layer's Python again, and skips its products.
        again = 0.0 if policy_of(self.placement.spec.model) == "none" else use.forward_launches_per_layer
        forward_python_s = (use.forward_launches_per_layer + gathering) * overhead_s
        fetched_s = self.fetched_weights_s
        forward = max(layers_s.forward + use.all_gather_share * gather_s, gather_s + fetched_s, forward_python_s)
        python = (use.backward_launches_per_layer + again + gathering) * overhead_s
        backward = max(layers_s.backward + layers_s.repeated + 2 * use.all_gather_share * gather_s, 2 * gather_s + fetched_s, python)
        # What layers keep on the host is copied beside all that, in backward behind weights from there.
        waits = max(0.0, self.kept_copies_s(self.speed.d2h_bytes_per_s) - forward)
        waits_back = max(0.0, self.kept_copies_s(self.speed.h2d_bytes_per_s) + fetched_s - backward)
        return Pass(
            forward_s=forward + waits + self._loss_s(),
            backward_s=backward + waits_back,
            backward_python_s=python,
            exposed_copies_s=waits + waits_back,
        )

    def _layers_s(self) -> _Layers:
        """Return the seconds of all layers' forward, their backward, and what it recomputes."""
        placement, use = self.placement, self.use
        profile, shape, tokens = placement.profile, placement.profile.architecture, self._computed_tokens
        rate = self.speed.matrix_flops * (use.expert_efficiency if shape.experts else use.matrix_efficiency)
        products = 2.0 * tokens * (profile.flops.active_parameters - profile.flops.head_parameters) / rate
        elementwise = tokens * shape.layers * profile.elementwise_bytes / self._moved_bytes_per_s
        attention_forward, attention_backward = self._attention_s()
        unfused_experts = shape.experts and not profile.fused
        expert_products = 6.0 * tokens * shape.hidden * shape.active_intermediate * shape.layers / rate if unfused_experts else 0.0
        repeated = {
            "full": products + elementwise + attention_forward,
            "attention": products + elementwise,
            "selective": elementwise + expert_products,
            "none": 0.0,
        }
        # Backward of a tile computes the block's last product, whose result it does not need.
        last_product = 2.0 * tokens * shape.hidden * shape.intermediate * shape.layers / rate if placement.tiled else 0.0
        exchange = self._exchange_s()
        policy = policy_of(placement.spec.model)
        return _Layers(
            forward=products + elementwise + attention_forward + exchange,
            backward=2 * (products + elementwise) + attention_backward + exchange + last_product,
            repeated=repeated[policy] + (exchange if policy != "none" else 0.0),
        )

    def _exchange_s(self) -> float:
        """Return the seconds of trading tokens for heads and back in one pass over all layers, where ranks share sequences.

        Attention waits for it, so nothing hides it.
        """
        shape, ranks = self.placement.profile.architecture, self.placement.spec.train.sequence_parallel
        if ranks == 1:
            return 0.0
        return self._computed_tokens * shape.layers * exchanged_bytes(shape, ranks) / self.speed.peer_bytes_per_s

    def kept_copies_s(self, bytes_per_s: float) -> float:
        """Return the seconds of copying in one direction what layers keep in host memory between the passes of one micro-batch."""
        placement = self.placement
        return self._computed_tokens * offloaded_bytes(placement.profile.architecture, placement.spec.model) / bytes_per_s

    @property
    def fetched_weights_s(self) -> float:
        """Seconds of copying this rank's weights in host memory to the GPU, once for each of the two passes. Computation hides them."""
        return 2 * self.placement.host_weights / self.speed.h2d_bytes_per_s

    @cached_property
    def _computed_tokens(self) -> float:
        """Positions of a micro-batch that are computed: backends that take boundaries see little padding, others rows of one width."""
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

        Backends that take boundaries attend within documents, masked ones to all pairs of a row. A sliding window makes a document
        as slow as one of twice its length.
        """
        flops, length = self.placement.profile.flops, self.placement.spec.data.sequence_length
        if self.attention in MASKED_BACKENDS:
            row = self._row_share * length
            rate = self.speed.attention_at(self.attention, row)
            width = sum(layers * width for layers, width, _ in flops.attention_layers)
            forward = 4.0 * width * self._computed_tokens * row
            return forward / rate.forward, BACKWARD_ATTENTION * forward / rate.backward
        document = self.workload.attended_tokens or float(length)
        tokens = self.placement.tokens * self.workload.useful_share
        forward_s = backward_s = 0.0
        for layers, width, window in flops.attention_layers:
            rate = self.speed.attention_at(self.attention, document if window is None else min(document, 2.0 * window))
            forward = 4.0 * width * layers * attention_pairs(round(document), window) * tokens / round(document)
            forward_s += forward / rate.forward
            backward_s += BACKWARD_ATTENTION * forward / rate.backward
        return forward_s, backward_s

    def _loss_s(self) -> float:
        profile, use = self.placement.profile, self.use
        shape, trained = profile.architecture, self.placement.tokens * self.workload.trained_share
        again = 2.0 * profile.recomputed_logits(int(trained)) * shape.hidden
        # The head's products are dense in any model.
        products = (6.0 * trained * profile.flops.head_parameters + again) / (self.speed.matrix_flops * use.matrix_efficiency)
        return products + trained * shape.vocabulary * use.loss_bytes_per_logit / self._moved_bytes_per_s

    @property
    def _moved_bytes_per_s(self) -> float:
        """Rate of elementwise work through GPU memory."""
        speed, use = self.speed, self.use
        return min(speed.matrix_flops * use.elementwise_bytes_per_flop, speed.hbm_bytes_per_s * use.elementwise_efficiency)

    @cached_property
    def _adam_bytes_per_s(self) -> float:
        """Rate of CPU Adam beside the other ranks of its node."""
        return self.speed.adam_bytes_per_s(self.adam_cores, self.ranks_per_node)

    @cached_property
    def _undisturbed_adam_bytes_per_s(self) -> float:
        return self.speed.adam_bytes_per_s(self.adam_cores, 1)

    def _gradient_copies_s(self) -> float:
        """Return what gradients on their way to the host add to backward, over all micro-batches.

        Our engine's copies overlap with backward, and its worker sums gradients beside the next micro-batch. DeepSpeed's optimizers pass
        over gradients on the host while backward waits; in further micro-batches they fetch them, add, and write them back; none of that
        is assumed hidden (accumulation with ZeRO-Offload was not measured).
        """
        placement, speed, once = self.placement, self.speed, self.one_pass
        spec, layout = placement.spec, placement.layout
        if spec.offload.mode == "gpu" or not layout.cpu_numel:
            return 0.0
        further = spec.gradient_accumulation_steps - 1
        if own_engine(spec):
            copies = 2 * layout.cpu_numel / speed.d2h_bytes_per_s
            adding = ACCUMULATE_BYTES * layout.cpu_numel / self._adam_bytes_per_s
            return further * max(0.0, copies + adding - once.forward_s - once.backward_s)
        buffer = placement.gradient_bytes * layout.numel
        further_s = further * buffer * (1 / speed.d2h_bytes_per_s + 1 / speed.h2d_bytes_per_s)
        if spec.offload.mode == "zerooffload":
            # Every gradient goes to the gradient partition, and in fp32 to that of its optimizer: two copies over the bus, one after the
            # other. Python waits for them while the GPU computes what was launched before.
            copies_s = self.use.zerooffload_copies * (buffer + 4 * layout.cpu_numel) / speed.d2h_bytes_per_s
            return max(0.0, once.backward_python_s + copies_s - once.backward_s) + further_s
        return self.use.deepspeed_copies * deepspeed_step.gradient_copies_s(self._offloaded, speed) + further_s

    def _exposed_s(self) -> float:
        """Return the seconds from the end of the last backward kernel until nothing waits for weights any more."""
        placement, use, rate = self.placement, self.use, self._adam_bytes_per_s
        spec, layout = placement.spec, placement.layout
        on_gpu = use.gpu_step_bytes_per_parameter * layout.gpu_numel / self.speed.hbm_bytes_per_s
        if not layout.cpu_numel:
            return on_gpu + use.gpu_step_tensor_s * sum(len(group.names) for group in layout.sub_groups)
        if spec.offload.mode == "zerooffload":
            # Its kernel slows down where ranks share a node's memory; its passes over gradients and weights are slow by themselves.
            adam_s = layout.cpu_numel * (ZEROOFFLOAD_ADAM_BYTES / rate + UNSCALE_BYTES / self._undisturbed_adam_bytes_per_s)
            return on_gpu + adam_s + self._cast_weights_s()
        if not own_engine(spec):
            return on_gpu + self._deepspeed_adam_s() + self._cast_weights_s()
        return self._own_exposed_s(on_gpu)

    @property
    def _offloaded(self) -> OffloadedStates:
        layout = self.placement.layout
        largest = max((group.numel for group in layout.sub_groups if group.device == "cpu"), default=0)
        return OffloadedStates(parameters=layout.numel, on_cpu=layout.cpu_numel, last_sub_group=largest)

    def _cast_weights_s(self) -> float:
        """Return how long DeepSpeed's optimizers take to cast master weights on the host and copy them from pageable memory."""
        parameters, rate = self.placement.layout.cpu_numel, self.speed.cast_h2d_bytes_per_s
        if rate is not None:
            return 2 * parameters / rate
        other_bytes = self.use.zerooffload_step_bytes - ZEROOFFLOAD_ADAM_BYTES - UNSCALE_BYTES
        return parameters * other_bytes / self._undisturbed_adam_bytes_per_s

    def _deepspeed_adam_s(self) -> float:
        states, rate = self._offloaded, self._adam_bytes_per_s
        if self.placement.spec.train.gradient_clipping > 0:
            return deepspeed_step.clipped_adam_s(states, rate, self.use.deepspeed_clipped_adam_bytes)
        backward_s = self.one_pass.backward_s + self.use.deepspeed_copies * deepspeed_step.gradient_copies_s(states, self.speed)
        return deepspeed_step.exposed_adam_s(states, rate, backward_s)

    def _own_exposed_s(self, on_gpu_s: float) -> float:
        placement, use, rate, once = self.placement, self.use, self._adam_bytes_per_s, self.one_pass
        spec, layout = placement.spec, placement.layout
        clipped, accumulated = spec.train.gradient_clipping > 0, spec.gradient_accumulation_steps > 1
        spans = placement.profile.compute_spans(layout.ranks, spec.offload.sub_group_size)
        step_bytes = ADAM_BYTES + (4 if accumulated else 0)
        held_back = {group.index for group in layout.sub_groups if clipped and group.index not in placement.speculating}
        # A forward beside it takes some of its rate, unless ranks that share the memory leave it less than that.
        beside_forward = min(use.clipped_adam_share * self._undisturbed_adam_bytes_per_s, rate)
        beside_backward = use.speculative_adam_share * rate if clipped else rate
        on_cpu = [group for group in layout.sub_groups if group.device == "cpu"]
        summed = [group.numel for group in on_cpu if group.index in held_back] if accumulated else []
        norm_s = (use.norm_s + (ACCUMULATE_BYTES * summed[0] / rate if summed else 0.0)) if clipped else 0.0
        updates = []
        for group in on_cpu:
            begin, waits = spans[group.index][0], group.index in held_back
            copied_s = -begin * once.backward_s + 2 * group.numel / self.speed.d2h_bytes_per_s
            bytes_per_s = beside_forward if waits else beside_backward
            returned = 0 if placement.host_weights else 2 * group.numel
            updates.append(Update(begin, norm_s if waits else copied_s, step_bytes * group.numel / bytes_per_s, returned))
        # The GPU steps its own sub-groups while the worker steps the others.
        begins_s = on_gpu_s + norm_s
        if accumulated and len(held_back) < len(layout.sub_groups):
            # Only the worker sees whole gradients, so their norm is known when it has stepped the last one.
            early = [update for update in updates if update.ready_s < norm_s or not clipped]
            begins_s = max(
                begins_s, max((at for _, at in arrivals(early, self.speed.h2d_bytes_per_s, use.weight_copy_latency_s)), default=0.0)
            )
        return begins_s + weight_wait_s(updates, self.speed.h2d_bytes_per_s, use.weight_copy_latency_s, once.forward_s, begins_s)
