"""How long an optimizer step will take, from the model's FLOPs, what it moves, and the rates of the hardware.

step = accumulation x (forward + backward + data) + what of the optimizer does not hide + a little. Forward and backward are matrix products
at the rate the GPU reaches in models, plus what moves through its memory beside them. The optimizer's exposed time is played through
sub-group by sub-group. Rates of the hardware are the machine's own where ``so-tui calibrate`` measured them, else published for its kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from so_tui.model.activations import elementwise_bytes, fused_kernels, policy_of
from so_tui.model.architecture import Architecture
from so_tui.model.flops import Flops
from so_tui.model.layout import Span, StateLayout, compute_spans
from so_tui.model.loss import recomputed_logits
from so_tui.plan.constants import Speed, StepConstants, constants
from so_tui.plan.memory import gradient_buffer_bytes
from so_tui.plan.terms import own_engine
from so_tui.plan.types import StepTime, Workload
from so_tui.spec.types import RunSpec

ADAM_BYTES = 28
"""Host memory traffic of AdamW per parameter: master and moments read and written, bf16 gradient read, bf16 weight written; fp32 gradients
where they were accumulated, 4 more."""
ZEROOFFLOAD_ADAM_BYTES = 34
"""The same of ZeRO-Offload: master and moments read and written, fp32 gradient read, the master read again for the bf16 weight."""
ACCUMULATE_BYTES = 10
"""bf16 gradient read, fp32 sum read and written."""


class Pass(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-step on the GPU, without waiting for anything."""

    forward_s: float
    backward_s: float
    backward_python_s: float
    """Of backward, what Python needs to launch it. Beside a GPU that computes for longer it costs nothing."""


def step_time(
    spec: RunSpec,
    layout: StateLayout,
    shape: Architecture,
    flops: Flops,
    speed: Speed,
    *,
    adam_cores: int,
    ranks_per_node: int,
    workload: Workload | None = None,
) -> StepTime:
    """Seconds of one optimizer step of a spec whose mode is decided.

    ``adam_cores`` run CPU Adam for one rank, and ``ranks_per_node`` share their node's memory. Without a ``workload`` sequences count as
    full, as one document, and as trained on whole.
    """
    use = constants().step
    once = compute_pass(spec, shape, flops, speed, use, workload or Workload(), layout.ranks, _gather_s(layout, speed))
    forward, backward = once.forward_s, once.backward_s
    host_rate = speed.adam_bytes_per_s(adam_cores, ranks_per_node)
    alone = speed.adam_bytes_per_s(adam_cores, 1)
    gradient_accumulation_steps = spec.gradient_accumulation_steps
    return StepTime(
        forward_s=gradient_accumulation_steps * forward,
        backward_s=gradient_accumulation_steps * backward + _backward_extra_s(spec, layout, speed, use, host_rate, once),
        exposed_optimizer_s=_exposed_s(spec, layout, speed, use, host_rate, alone, forward, backward),
        data_s=gradient_accumulation_steps * use.data_s + use.other_s,
    )


def compute_pass(
    spec: RunSpec, shape: Architecture, flops: Flops, speed: Speed, use: StepConstants, workload: Workload, ranks: int, gather_s: float
) -> Pass:
    """Forward with the loss, which forms its gradients there, and backward with what it recomputes. ``gather_s``: what it takes to gather
    the weights once from the other of ``ranks``. Backward gathers, and reduces as much.

    What gathers takes its share of the GPU from what computes. Where layers are small the GPU waits for Python, and has time for both.
    """
    tokens = spec.train.micro_batch * spec.data.sequence_length
    document = workload.attended_tokens or spec.data.sequence_length
    rate = speed.matrix_flops * (use.expert_efficiency if shape.experts else use.matrix_efficiency)
    moved = speed.hbm_bytes_per_s * use.elementwise_efficiency
    attention = flops.attention_forward([round(document)]) * tokens / round(document)
    products = (2.0 * tokens * (flops.active_parameters - flops.head_parameters) + attention) / rate
    elementwise = tokens * shape.layers * elementwise_bytes(shape, fused=fused_kernels(spec.model)) / moved
    trained = tokens * workload.trained_share
    again = 2.0 * recomputed_logits(int(trained), shape.vocabulary) * shape.hidden
    # The head's products are dense ones in any model.
    head_rate = speed.matrix_flops * use.matrix_efficiency
    loss = (6.0 * trained * flops.head_parameters + again) / head_rate + trained * shape.vocabulary * use.loss_bytes_per_logit / moved
    unkept = shape.experts and not fused_kernels(spec.model)
    expert_products = 6.0 * tokens * shape.hidden * shape.active_intermediate * shape.layers / rate if unkept else 0.0
    policy = policy_of(spec.model)
    repeated = {"full": products + elementwise, "selective": elementwise + expert_products, "none": 0.0}[policy]
    small_layers_s = shape.layers * speed.layer_launch_overhead_of(ranks)
    gathering = use.all_gather_launches_per_layer if ranks > 1 else 0.0
    once = products + elementwise
    # Selective recomputing goes through all of a layer's Python too, and skips its products.
    again_layers = 0.0 if policy == "none" else use.forward_launches_per_layer
    forward = max(once + use.all_gather_share * gather_s, gather_s, (use.forward_launches_per_layer + gathering) * small_layers_s)
    python = (use.backward_launches_per_layer + again_layers + gathering) * small_layers_s
    backward = max(2 * once + repeated + 2 * use.all_gather_share * gather_s, 2 * gather_s, python)
    return Pass(forward_s=forward + loss, backward_s=backward, backward_python_s=python)


def _gather_s(layout: StateLayout, speed: Speed) -> float:
    """One ZeRO-3 pass over the weights between the GPUs."""
    return 2 * layout.parameters * (layout.ranks - 1) / layout.ranks / speed.peer_bytes_per_s


def _backward_extra_s(spec: RunSpec, layout: StateLayout, speed: Speed, use: StepConstants, host_rate: float, once: Pass) -> float:
    """What gradients on their way to the host take from backward, all micro-steps together.

    Our engine's copies run beside it, and its worker adds up beside the next micro-step. DeepSpeed's optimizers pass over gradients on the
    host while backward waits, and in further micro-steps fetch them, add, and put them back, of which nothing is taken to be hidden (no
    accumulation of ZeRO-Offload was measured).
    """
    if spec.offload.mode == "gpu" or not layout.cpu_numel:
        return 0.0
    further = spec.gradient_accumulation_steps - 1
    if own_engine(spec):
        copies = 2 * layout.cpu_numel / speed.d2h_bytes_per_s
        adding = ACCUMULATE_BYTES * layout.cpu_numel / host_rate
        return further * max(0.0, copies + adding - once.forward_s - once.backward_s)
    buffer = gradient_buffer_bytes(spec) * layout.numel
    further_s = further * buffer * (1 / speed.d2h_bytes_per_s + 1 / speed.h2d_bytes_per_s)
    if spec.offload.mode == "zerooffload":
        # Every gradient goes to the gradient partition, and in fp32 to that of its optimizer: two copies over the bus, one after the other.
        # Python waits for them, and the GPU meanwhile computes what it was given before.
        copies_s = use.zerooffload_copies * (buffer + 4 * layout.cpu_numel) / speed.d2h_bytes_per_s
        return max(0.0, once.backward_python_s + copies_s - once.backward_s) + further_s
    return use.deepspeed_backward_bytes * layout.cpu_numel / host_rate + further_s


def _exposed_s(
    spec: RunSpec,
    layout: StateLayout,
    speed: Speed,
    use: StepConstants,
    host_rate: float,
    alone: float,
    forward_s: float,
    backward_s: float,
) -> float:
    """From the end of the last backward kernel until nothing waits for weights any more.

    ``host_rate``: what CPU Adam moves with the other ranks of its node beside it; ``alone``: without.
    """
    on_gpu = use.gpu_step_bytes_per_parameter * layout.gpu_numel / speed.hbm_bytes_per_s
    if not layout.cpu_numel:
        return on_gpu + use.gpu_step_tensor_s * sum(len(group.names) for group in layout.sub_groups)
    clipped = spec.train.gradient_clipping > 0
    if spec.offload.mode == "zerooffload":
        # What its kernel moves is slower where ranks share a node's memory; its passes over gradients are slow by themselves.
        return on_gpu + layout.cpu_numel * (
            ZEROOFFLOAD_ADAM_BYTES / host_rate + (use.zerooffload_step_bytes - ZEROOFFLOAD_ADAM_BYTES) / alone
        )
    if not own_engine(spec):
        step_bytes = use.deepspeed_clipped_step_bytes if clipped else use.deepspeed_step_bytes
        return on_gpu + step_bytes * layout.cpu_numel / host_rate
    accumulated = spec.gradient_accumulation_steps > 1
    # A forward beside it takes some of its rate, unless ranks that share the memory leave it less than that.
    beside = min(use.clipped_adam_share * alone, host_rate) if clipped else host_rate
    adam_rate = beside / (ADAM_BYTES + (4 if accumulated else 0))
    spans = compute_spans(spec, layout.ranks)
    groups = [(spans[group.index], group.numel) for group in layout.sub_groups if group.device == "cpu"]
    start = use.norm_s + (ACCUMULATE_BYTES * groups[0][1] / host_rate if accumulated else 0.0)
    # The GPU steps what is its own while the worker steps the rest.
    begin = on_gpu + (start if clipped else 0.0)
    return begin + weight_wait_s(
        groups, adam_rate, speed, use.weight_copy_latency_s, begin, forward_s, backward_s, start if clipped else None
    )


def weight_wait_s(
    groups: Sequence[tuple[Span, int]],
    adam_rate: float,
    speed: Speed,
    weight_copy_latency_s: float,
    begin_s: float,
    forward_s: float,
    backward_s: float,
    start_s: float | None,
) -> float:
    """How long the forward after a step waits for weights that the Adam worker has yet to step or the link to carry.

    ``groups``: (when a forward uses it, parameters) of each sub-group on the CPU; ``adam_rate`` in parameters per second. Time 0 is the end
    of backward, ``begin_s`` when the forward begins. With ``start_s`` (clipping) the worker begins then, with what the forward wants first;
    without, it takes each sub-group when backward has finished it.
    """
    if start_s is None:
        queue = [
            (-begin * backward_s + 2 * numel / speed.d2h_bytes_per_s, begin, numel)
            for (begin, _), numel in sorted(groups, key=lambda group: -group[0][0])
        ]
    else:
        queue = [(start_s, begin, numel) for (begin, _), numel in sorted(groups)]
    worker = link = float("-inf")
    landed = []
    for ready, begin, numel in queue:
        worker = max(worker, ready) + numel / adam_rate
        link = max(link, worker + weight_copy_latency_s) + 2 * numel / speed.h2d_bytes_per_s
        landed.append((begin, link))
    waited = 0.0
    for begin, at in sorted(landed):
        waited = max(waited, at - begin_s - begin * forward_s)
    return max(0.0, waited)
