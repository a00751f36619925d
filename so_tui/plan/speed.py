"""How long an optimizer step will take, from the model's FLOPs and a few constants of the hardware.

step = accumulation x (forward + backward) + copies + what of Adam does not hide behind the last backward. The constants are per kind of
GPU, published or measured on other machines of that kind, and say which; an unknown GPU has no prediction.
"""

from __future__ import annotations

import re

from msgspec import Struct

from so_tui.plan.architecture import Architecture
from so_tui.plan.flops import Flops, hw_flops, peak_flops
from so_tui.plan.layout import StateLayout
from so_tui.plan.memory import gradient_buffer_bytes, own_engine
from so_tui.plan.types import StepTime
from so_tui.spec.types import RunSpec


class Speed(Struct, frozen=True, kw_only=True):
    """Constants of one kind of machine, per GPU unless they say otherwise."""

    matmul_flops: float
    """FLOP/s that forward and backward of a dense model reach, recompute counted."""
    expert_flops: float
    """The same for mixture-of-experts models."""
    link_bytes_per_s: float
    """GPU memory to host memory, each way."""
    peer_bytes_per_s: float
    """One GPU to the others, each way."""
    hbm_bytes_per_s: float
    adam_per_core: float
    """Parameters that one core updates in a second."""
    adam_per_node: float
    """The most that a NUMA node's memory lets all its cores update in a second."""
    source: str


_DENSE_SHARE = 0.38
_EXPERT_SHARE = 0.25
_MEASURED = "matrix rate measured with a 4B model on an H200"
_KINDS: tuple[tuple[str, float, float, float, float, float, str], ...] = (
    # pattern, link, peers, HBM, Adam per core, Adam per node, source
    ("GH200", 300e9, 150e9, 4.0e12, 0.2e9, 8e9, f"{_MEASURED}; C2C and Grace CPU-Adam rates as published"),
    ("GB[23]00", 300e9, 600e9, 7.0e12, 0.2e9, 8e9, f"{_MEASURED}; C2C and Grace CPU-Adam rates as published"),
    ("B[23]00", 55e9, 600e9, 7.0e12, 0.31e9, 9e9, f"{_MEASURED}; copy and CPU-Adam rates of an H200 host"),
    ("H[12]00 NVL|H100 PCIe", 55e9, 50e9, 2.0e12, 0.31e9, 9e9, f"{_MEASURED}; copy and CPU-Adam rates of an H200 host"),
    ("H[128]00", 55e9, 300e9, 3.4e12, 0.31e9, 9e9, "measured on an H200 host with 16 cores and PCIe 5"),
    ("A[18]00", 25e9, 200e9, 1.5e12, 0.31e9, 9e9, f"{_MEASURED}; copy rate of PCIe 4 as published"),
)

# DeepSpeed's optimizers pass over host memory more often than Adam alone. Exposed seconds as multiples of Adam's own time, from steps of a
# 4B model on an H200 host: 6.1 s and 4.7 s with and without clipping, 4.45 s with ZeRO-Offload, 1.66 s with no offload; Adam took 0.9 s on
# 13 cores (0.73 s on the 16 that ZeRO-Offload has), the copies 0.26 s.
_DEEPSPEED_CLIPPED = 4.6
_DEEPSPEED_UNCLIPPED = 3.1
_ZERO_OFFLOAD = 3.4

# Python, hooks and kernel launches of one layer: the floor for models too small to keep a GPU busy.
_FORWARD_FLOOR_S = 0.002
_BACKWARD_FLOOR_S = 0.005
_DATA_S = 0.01


def speed_of(gpu_name: str) -> Speed | None:
    """Default constants for a GPU by its product name; None when nothing is known of it."""
    peak = peak_flops(gpu_name)
    for pattern, link, peers, hbm, per_core, per_node, source in _KINDS:
        if peak is not None and re.search(rf"\b(?:{pattern})\b", gpu_name, re.IGNORECASE):
            return Speed(
                matmul_flops=_DENSE_SHARE * peak,
                expert_flops=_EXPERT_SHARE * peak,
                link_bytes_per_s=link,
                peer_bytes_per_s=peers,
                hbm_bytes_per_s=hbm,
                adam_per_core=per_core,
                adam_per_node=per_node,
                source=source,
            )
    return None


def step_time(
    spec: RunSpec, layout: StateLayout, shape: Architecture, flops: Flops, speed: Speed, *, adam_cores: int, ranks_per_node: int
) -> StepTime:
    """Seconds of one optimizer step of a spec whose mode is decided.

    ``adam_cores`` run CPU Adam for one rank, and ``ranks_per_node`` share their node's memory. Sequences count as full and as one document.
    """
    rate = speed.expert_flops if shape.experts else speed.matmul_flops
    sequences, length = spec.train.micro_batch, spec.data.sequence_length
    documents = [length] * sequences
    once = hw_flops(flops, sequences * length, documents, checkpointing=False) / 3 / rate
    passes_back = 3 if spec.model.repeats_whole_layers else 2
    gather = _gather_s(layout, speed)
    forward = max(once, shape.layers * _FORWARD_FLOOR_S) + gather
    backward = max(passes_back * once, shape.layers * _BACKWARD_FLOOR_S) + 2 * gather
    micro_steps = spec.micro_steps
    copies = _copies_s(spec, layout, speed)
    adam = layout.cpu_numel / min(adam_cores * speed.adam_per_core, speed.adam_per_node / ranks_per_node)
    return StepTime(
        forward_s=micro_steps * forward,
        backward_s=micro_steps * backward + copies,
        exposed_optimizer_s=_exposed_s(spec, layout, speed, adam, forward, backward),
        data_s=micro_steps * _DATA_S,
    )


def _gather_s(layout: StateLayout, speed: Speed) -> float:
    """The part of one ZeRO-3 pass over the weights that prefetching does not hide, about a quarter."""
    others = (layout.ranks - 1) / layout.ranks
    return 0.25 * 2 * layout.parameters * others / speed.peer_bytes_per_s


def _copies_s(spec: RunSpec, layout: StateLayout, speed: Speed) -> float:
    """Gradients on their way to the host, at the step and in every further micro-step: what they take from backward's memory bandwidth.

    Our engine sends bf16 gradients and its worker adds them up; DeepSpeed converts to fp32, and fetches, adds to and puts back.
    """
    if spec.offload.mode == "gpu":
        return 0.0
    further = spec.micro_steps - 1
    if own_engine(spec):
        return 2 * layout.cpu_numel * (1 + further) / speed.link_bytes_per_s
    return (4 * layout.cpu_numel + 2 * gradient_buffer_bytes(spec) * layout.numel * further) / speed.link_bytes_per_s


def _exposed_s(spec: RunSpec, layout: StateLayout, speed: Speed, adam_s: float, forward_s: float, last_backward_s: float) -> float:
    """From the end of the last backward kernel until nothing waits for weights any more."""
    on_gpu = 28 * layout.gpu_numel / speed.hbm_bytes_per_s
    if not layout.cpu_numel:
        return on_gpu
    clipped = spec.train.gradient_clipping > 0
    if spec.offload.mode == "zerooffload":
        return on_gpu + _ZERO_OFFLOAD * adam_s
    if not own_engine(spec):
        return on_gpu + (_DEEPSPEED_CLIPPED if clipped else _DEEPSPEED_UNCLIPPED) * adam_s
    # The sub-group whose gradient comes last is the one the next forward wants first: its Adam and its way back are exposed in any case.
    last = min(layout.largest_sub_group, layout.cpu_numel)
    tail = adam_s * last / layout.cpu_numel + 2 * last / speed.link_bytes_per_s
    # Clipping needs the norm of all gradients, so Adam begins when backward is over and hides behind the next forward instead.
    hidden = forward_s if clipped else last_backward_s
    return on_gpu + tail + max(0.0, adam_s - hidden)
