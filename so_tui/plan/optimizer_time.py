"""Predicts what the optimizer adds to a step: what nothing hides of stepping, and of copying gradients and weights.

The exposed time is simulated sub-group by sub-group (``weight_arrivals``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from so_tui.plan import deepspeed_step
from so_tui.plan.constants import Speed, StepConstants
from so_tui.plan.deepspeed_step import UNSCALE_BYTES, OffloadedStates
from so_tui.plan.gpu_pass import Pass
from so_tui.plan.placement import Placement, own_engine
from so_tui.plan.types import PlannedRates
from so_tui.plan.weight_arrivals import Update, arrivals, weight_wait_s

ADAM_BYTES = 28
"""Host memory traffic of AdamW per parameter: master weight and moments read and written, bf16 gradient read, bf16 weight written; fp32
gradients where they were accumulated, 4 more."""
ZEROOFFLOAD_ADAM_BYTES = 34
"""The same of ZeRO-Offload: master weight and moments read and written, fp32 gradient read, the master weight read again for the bf16
weight."""
ACCUMULATE_BYTES = 10
"""bf16 gradient read, fp32 sum read and written."""


@dataclass(frozen=True, kw_only=True)
class OptimizerModel:
    """The optimizer of a placed spec on a host of known speed."""

    placement: Placement
    speed: Speed
    one_pass: Pass
    """Beside which its copies and its steps go on."""
    adam_cores: int
    """Cores that run CPU Adam for one rank."""
    ranks_per_node: int
    """Ranks that share their node's memory."""
    use: StepConstants

    def rates(self) -> PlannedRates | None:
        """Return the rates of offloading with our engine; None without it."""
        spec, cpu_numel = self.placement.spec, self.placement.layout.cpu_numel
        if not own_engine(spec) or not cpu_numel:
            return None
        least_share = (
            min(self.use.clipped_adam_share, self.use.speculative_adam_share)
            if spec.train.gradient_clipping > 0
            else 1.0
        )
        return PlannedRates(
            adam_bytes_per_s=least_share * self._adam_bytes_per_s,
            d2h_bytes_per_s=self.speed.d2h_bytes_per_s,
            h2d_bytes_per_s=self.speed.h2d_bytes_per_s,
            d2h_bytes=2 * cpu_numel * spec.gradient_accumulation_steps,
            # Weights in host memory are copied within forward and backward, which says nothing of the bus where they take longer.
            h2d_bytes=0 if self.placement.host_weights else 2 * cpu_numel,
        )

    @cached_property
    def _adam_bytes_per_s(self) -> float:
        """Rate of CPU Adam beside the other ranks of its node."""
        return self.speed.adam_bytes_per_s(self.adam_cores, self.ranks_per_node)

    @cached_property
    def _undisturbed_adam_bytes_per_s(self) -> float:
        return self.speed.adam_bytes_per_s(self.adam_cores, 1)

    def gradient_copies_s(self) -> float:
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
            copies_s = (
                self.use.zerooffload_copies
                * (buffer + 4 * layout.cpu_numel)
                / speed.d2h_bytes_per_s
            )
            return max(0.0, once.backward_python_s + copies_s - once.backward_s) + further_s
        return (
            self.use.deepspeed_copies * deepspeed_step.gradient_copies_s(self._offloaded, speed)
            + further_s
        )

    def exposed_s(self) -> float:
        """Return the seconds from the end of the last backward kernel until nothing waits for weights any more."""
        placement, use, rate = self.placement, self.use, self._adam_bytes_per_s
        spec, layout = placement.spec, placement.layout
        on_gpu = use.gpu_step_bytes_per_parameter * layout.gpu_numel / self.speed.hbm_bytes_per_s
        if not layout.cpu_numel:
            return on_gpu + use.gpu_step_tensor_s * sum(
                len(group.names) for group in layout.sub_groups
            )
        if spec.offload.mode == "zerooffload":
            # Its kernel slows down where ranks share a node's memory; its passes over gradients and weights are slow by themselves.
            adam_s = layout.cpu_numel * (
                ZEROOFFLOAD_ADAM_BYTES / rate + UNSCALE_BYTES / self._undisturbed_adam_bytes_per_s
            )
            return on_gpu + adam_s + self._cast_weights_s()
        if not own_engine(spec):
            return on_gpu + self._deepspeed_adam_s() + self._cast_weights_s()
        return self._own_exposed_s(on_gpu)

    @property
    def _offloaded(self) -> OffloadedStates:
        layout = self.placement.layout
        largest = max(
            (group.numel for group in layout.sub_groups if group.device == "cpu"), default=0
        )
        return OffloadedStates(
            parameters=layout.numel, on_cpu=layout.cpu_numel, last_sub_group=largest
        )

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
            return deepspeed_step.clipped_adam_s(
                states, rate, self.use.deepspeed_clipped_adam_bytes
            )
        backward_s = (
            self.one_pass.backward_s
            + self.use.deepspeed_copies * deepspeed_step.gradient_copies_s(states, self.speed)
        )
        return deepspeed_step.exposed_adam_s(states, rate, backward_s)

    def _own_exposed_s(self, on_gpu_s: float) -> float:
        placement, use, rate, once = self.placement, self.use, self._adam_bytes_per_s, self.one_pass
        spec, layout = placement.spec, placement.layout
        clipped, accumulated = (
            spec.train.gradient_clipping > 0,
            spec.gradient_accumulation_steps > 1,
        )
        spans = placement.profile.compute_spans(layout.ranks, spec.offload.sub_group_size)
        step_bytes = ADAM_BYTES + (4 if accumulated else 0)
        held_back = {
            group.index
            for group in layout.sub_groups
            if clipped and group.index not in placement.speculating
        }
        # A forward beside it takes some of its rate, unless ranks that share the memory leave it less than that.
        beside_forward = min(use.clipped_adam_share * self._undisturbed_adam_bytes_per_s, rate)
        beside_backward = use.speculative_adam_share * rate if clipped else rate
        on_cpu = [group for group in layout.sub_groups if group.device == "cpu"]
        summed = (
            [group.numel for group in on_cpu if group.index in held_back] if accumulated else []
        )
        norm_s = (
            (use.norm_s + (ACCUMULATE_BYTES * summed[0] / rate if summed else 0.0))
            if clipped
            else 0.0
        )
        updates = []
        for group in on_cpu:
            begin, waits = spans[group.index][0], group.index in held_back
            copied_s = -begin * once.backward_s + 2 * group.numel / self.speed.d2h_bytes_per_s
            bytes_per_s = beside_forward if waits else beside_backward
            returned = 0 if placement.host_weights else 2 * group.numel
            updates.append(
                Update(
                    begin,
                    norm_s if waits else copied_s,
                    step_bytes * group.numel / bytes_per_s,
                    returned,
                )
            )
        # The GPU steps its own sub-groups while the worker steps the others.
        begins_s = on_gpu_s + norm_s
        if accumulated and len(held_back) < len(layout.sub_groups):
            # Only the worker sees whole gradients, so their norm is known when it has stepped the last one.
            early = [update for update in updates if update.ready_s < norm_s or not clipped]
            begins_s = max(
                begins_s,
                max(
                    (
                        at
                        for _, at in arrivals(
                            early, self.speed.h2d_bytes_per_s, use.weight_copy_latency_s
                        )
                    ),
                    default=0.0,
                ),
            )
        return begins_s + weight_wait_s(
            updates, self.speed.h2d_bytes_per_s, use.weight_copy_latency_s, once.forward_s, begins_s
        )
