"""Predicts how long an optimizer step takes, from the model's FLOPs, the bytes it moves, and the rates of the hardware.

step = accumulation x (forward + backward + data) + optimizer time that nothing hides + a little. Forward and backward are matrix products
at the rate that the GPU reaches in models, plus what moves through its memory beside them. The optimizer's exposed time is simulated
sub-group by sub-group. Rates of the hardware are the machine's own where ``so-tui calibrate`` measured them, else published for its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import Struct

from so_tui.model.activations import policy_of
from so_tui.model.layout import Span
from so_tui.plan.constants import Speed, StepConstants, constants
from so_tui.plan.placement import Placement, own_engine
from so_tui.plan.types import StepTime
from so_tui.plan.workload import Workload

ADAM_BYTES = 28
"""Host memory traffic of AdamW per parameter: master weight and moments read and written, bf16 gradient read, bf16 weight written; fp32
gradients where they were accumulated, 4 more."""
ZEROOFFLOAD_ADAM_BYTES = 34
"""The same of ZeRO-Offload: master weight and moments read and written, fp32 gradient read, the master weight read again for the bf16
weight."""
ACCUMULATE_BYTES = 10
"""bf16 gradient read, fp32 sum read and written."""


class Pass(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch on the GPU, without waiting for anything."""

    forward_s: float
    backward_s: float
    backward_python_s: float
    """Of backward, the time Python needs to launch it. It is hidden while the GPU computes for longer."""


class UpdateRates(Struct, frozen=True, kw_only=True):
    """How fast sub-groups are updated on the host and return to the GPU."""

    adam_parameters_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    copy_latency_s: float = 0.0
    """From the end of a sub-group's Adam until the copy of its weights begins."""


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

    @cached_property
    def all_gather_s(self) -> float:
        """Seconds of one all-gather of all weights; backward all-gathers them again, and reduces as much."""
        layout = self.placement.layout
        return 2 * layout.parameters * (layout.ranks - 1) / layout.ranks / self.speed.peer_bytes_per_s

    @cached_property
    def one_pass(self) -> Pass:
        """Forward with the loss, which forms its gradients there, and backward with what it recomputes.

        All-gathers take part of the GPU from the computation they overlap with. Where layers are small the GPU waits for Python, and has
        time for both.
        """
        use, layers, gather_s = self.use, self.placement.profile.architecture.layers, self.all_gather_s
        once, repeated = self._layers_s()
        overhead_s = layers * self.speed.layer_launch_overhead_of(self.placement.layout.ranks)
        gathering = use.all_gather_launches_per_layer if self.placement.layout.ranks > 1 else 0.0
        # Selective recomputation runs all of a layer's Python again, and skips its products.
        again = 0.0 if policy_of(self.placement.spec.model) == "none" else use.forward_launches_per_layer
        forward_python_s = (use.forward_launches_per_layer + gathering) * overhead_s
        forward = max(once + use.all_gather_share * gather_s, gather_s, forward_python_s)
        python = (use.backward_launches_per_layer + again + gathering) * overhead_s
        backward = max(2 * once + repeated + 2 * use.all_gather_share * gather_s, 2 * gather_s, python)
        return Pass(forward_s=forward + self._loss_s(), backward_s=backward, backward_python_s=python)

    def _layers_s(self) -> tuple[float, float]:
        """Return the seconds of all layers' forward, and of what backward recomputes of it."""
        placement, use = self.placement, self.use
        profile, shape, tokens = placement.profile, placement.profile.architecture, placement.tokens
        rate = self.speed.matrix_flops * (use.expert_efficiency if shape.experts else use.matrix_efficiency)
        document = round(self.workload.attended_tokens or placement.spec.data.sequence_length)
        attention = profile.flops.attention_forward([document]) * tokens / document
        products = (2.0 * tokens * (profile.flops.active_parameters - profile.flops.head_parameters) + attention) / rate
        elementwise = tokens * shape.layers * profile.elementwise_bytes / self._moved_bytes_per_s
        unfused_experts = shape.experts and not profile.fused
        expert_products = 6.0 * tokens * shape.hidden * shape.active_intermediate * shape.layers / rate if unfused_experts else 0.0
        repeated = {"full": products + elementwise, "selective": elementwise + expert_products, "none": 0.0}
        return products + elementwise, repeated[policy_of(placement.spec.model)]

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
        return self.speed.hbm_bytes_per_s * self.use.elementwise_efficiency

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
        return self.use.deepspeed_backward_bytes * layout.cpu_numel / self._adam_bytes_per_s + further_s

    def _exposed_s(self) -> float:
        """Return the seconds from the end of the last backward kernel until nothing waits for weights any more."""
        placement, use, rate = self.placement, self.use, self._adam_bytes_per_s
        spec, layout = placement.spec, placement.layout
        on_gpu = use.gpu_step_bytes_per_parameter * layout.gpu_numel / self.speed.hbm_bytes_per_s
        if not layout.cpu_numel:
            return on_gpu + use.gpu_step_tensor_s * sum(len(group.names) for group in layout.sub_groups)
        if spec.offload.mode == "zerooffload":
            # Its kernel slows down where ranks share a node's memory; its passes over gradients are slow by themselves.
            other_bytes = use.zerooffload_step_bytes - ZEROOFFLOAD_ADAM_BYTES
            return on_gpu + layout.cpu_numel * (ZEROOFFLOAD_ADAM_BYTES / rate + other_bytes / self._undisturbed_adam_bytes_per_s)
        if not own_engine(spec):
            clipped = spec.train.gradient_clipping > 0
            step_bytes = use.deepspeed_clipped_step_bytes if clipped else use.deepspeed_step_bytes
            return on_gpu + step_bytes * layout.cpu_numel / rate
        return self._own_exposed_s(on_gpu)

    def _own_exposed_s(self, on_gpu_s: float) -> float:
        placement, use, rate, once = self.placement, self.use, self._adam_bytes_per_s, self.one_pass
        spec, layout = placement.spec, placement.layout
        clipped, accumulated = spec.train.gradient_clipping > 0, spec.gradient_accumulation_steps > 1
        # A forward beside it takes some of its rate, unless ranks that share the memory leave it less than that.
        beside = min(use.clipped_adam_share * self._undisturbed_adam_bytes_per_s, rate) if clipped else rate
        spans = placement.profile.compute_spans(layout.ranks, spec.offload.sub_group_size)
        groups = [(spans[group.index], group.numel) for group in layout.sub_groups if group.device == "cpu"]
        start = use.norm_s + (ACCUMULATE_BYTES * groups[0][1] / rate if accumulated else 0.0)
        # The GPU steps its own sub-groups while the worker steps the others.
        begin = on_gpu_s + (start if clipped else 0.0)
        return begin + weight_wait_s(
            groups,
            UpdateRates(
                adam_parameters_per_s=beside / (ADAM_BYTES + (4 if accumulated else 0)),
                d2h_bytes_per_s=self.speed.d2h_bytes_per_s,
                h2d_bytes_per_s=self.speed.h2d_bytes_per_s,
                copy_latency_s=use.weight_copy_latency_s,
            ),
            once,
            forward_begins_s=begin,
            adam_starts_s=start if clipped else None,
        )


def weight_wait_s(
    groups: Sequence[tuple[Span, int]], rates: UpdateRates, once: Pass, *, forward_begins_s: float, adam_starts_s: float | None
) -> float:
    """Return how long the forward after a step waits for weights that are still to be updated or copied. Time 0 is the end of backward.

    Args:
        groups: (when a forward uses it, parameters) of each sub-group on the CPU.
        rates: Of the Adam worker and of the copies.
        once: Lengths of forward and backward.
        forward_begins_s: When the next forward begins.
        adam_starts_s: When the worker may begin (clipping), with the sub-groups that forward uses first. None without clipping: then it
            takes each sub-group when backward has finished it.
    """
    if adam_starts_s is None:
        queue = [
            (-begin * once.backward_s + 2 * numel / rates.d2h_bytes_per_s, begin, numel)
            for (begin, _), numel in sorted(groups, key=lambda group: -group[0][0])
        ]
    else:
        queue = [(adam_starts_s, begin, numel) for (begin, _), numel in sorted(groups)]
    worker = copies = float("-inf")
    arrivals = []
    for ready, begin, numel in queue:
        worker = max(worker, ready) + numel / rates.adam_parameters_per_s
        copies = max(copies, worker + rates.copy_latency_s) + 2 * numel / rates.h2d_bytes_per_s
        arrivals.append((begin, copies))
    waited = 0.0
    for begin, at in sorted(arrivals):
        waited = max(waited, at - forward_begins_s - begin * once.forward_s)
    return max(0.0, waited)
