"""Figures that no formula gives: measured or published, stored as data with where each comes from.

``constants.json`` is their one file. ``benchmarks/planner.py --fit`` rewrites its ``memory`` and
``step`` from measured runs; ``so-tui calibrate`` replaces ``machines`` by a machine's own figures.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from math import log
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from so_tui.machine.types import Network
from so_tui.plan.workload import Workload
from so_tui.trust.decoding import prepare

PATH = Path(__file__).with_name("constants.json")


class _MemoryConstants(Struct, frozen=True, kw_only=True):
    """Bytes and shares that no formula gives."""

    provenance: str
    fitted: bool
    """Whether the figures were fitted to many settings, rather than taken from few."""
    cuda_context_bytes: int
    """Per GPU, outside torch's allocator: what the driver holds before anything runs, the process's
    context, kernels, libraries.
    """
    offload_context_bytes: int
    """In addition with SuperOffload, whose host memory is mapped for the GPU."""
    second_context_bytes: int
    """A bare context of one more process."""
    nccl_bytes: int
    """NCCL's buffers where several GPUs take part."""
    cuda_process_bytes: int
    """Host memory of a training process beside its tensors: Python, torch, CUDA libraries, data."""
    shared_libraries_bytes: int
    """Of that, the libraries, which all ranks of a host share."""
    nccl_host_bytes: int
    """In addition for each rank where two GPUs take part."""
    nccl_peer_host_bytes: int
    """In addition for each GPU beyond two."""
    after_loading_bytes: int
    """What one of several processes on a host allocates only after the weights were loaded."""
    cpu_process_bytes: int
    launcher_bytes: int
    """DeepSpeed's runner and launcher and our supervisor, once a host."""
    own_worker_bytes: int
    deepspeed_worker_bytes: int
    block_share: float
    """What one block's recomputation and backward hold, as a multiple of the formula's figure."""
    stream_pool_share: float
    """With several GPUs: what the allocator holds for all-gathers beyond the gathered parameters,
    as a multiple of them.
    """
    slack_share: float
    """What the allocator cannot use, as a share of what is allocated and freed within a layer."""


_STEP_JSON_NAMES = {
    "forward_launches_per_layer": "forward_small_layers",
    "backward_launches_per_layer": "backward_small_layers",
    "all_gather_launches_per_layer": "gather_small_layers",
    "all_gather_share": "gather_share",
    "weight_copy_latency_s": "landing_s",
}


class StepConstants(Struct, frozen=True, kw_only=True, rename=_STEP_JSON_NAMES):
    """How the trainer uses the hardware. Seconds, shares of the hardware's own rates, and bytes of
    host memory traffic per parameter.
    """

    provenance: str
    fitted: bool
    matrix_efficiency: float
    """Rate in a model's forward and backward over the rate of bare matrix products."""
    expert_efficiency: float
    """The same in mixture-of-experts models."""
    elementwise_bytes_per_flop: float
    """Rate of norms, activations and residuals over that of bare matrix products: they wait for
    instructions more than for memory, so GPUs that differ in their memory alone take as long.
    """
    elementwise_efficiency: float
    """Their highest rate over that of a bare copy."""
    loss_bytes_per_logit: float
    """GPU memory traffic of the loss."""
    forward_launches_per_layer: float
    """Python, hooks and kernel launches of one layer, as a multiple of
    ``Speed.layer_launch_overhead_s``: the floor for models too small to keep a GPU busy.
    """
    backward_launches_per_layer: float
    data_s: float
    """Per micro-batch."""
    other_s: float
    """Per optimizer step: records, control, schedule."""
    all_gather_launches_per_layer: float
    """The same for all-gathering a layer from several ranks and releasing it, in each direction."""
    all_gather_share: float
    """What ZeRO-3's all-gathers of the weights add to the computation they overlap with, as a share
    of their own time, over NVLink.
    """
    gpu_step_bytes_per_parameter: float
    """GPU memory traffic of an optimizer step on the GPU, with ZeRO-3's norms and casts."""
    gpu_step_tensor_s: float
    """Seconds that ZeRO-3 takes for each tensor there, whatever its size, where nothing is
    offloaded.
    """
    clipped_adam_share: float
    """CPU Adam's rate where clipping moves all of it beside the forward that waits for its weights,
    over its undisturbed rate.
    """
    speculative_adam_share: float
    """CPU Adam's rate beside backward where it steps out of place, before the norm is known, over
    its rate in place.
    """
    norm_s: float
    """From the end of backward until the gradient norm is known and acted upon."""
    weight_copy_latency_s: float
    """From the end of a sub-group's Adam until the copy of its weights begins."""
    zerooffload_copies: float
    """How long Python waits for ZeRO-Offload's copies of gradients to the host, as a share of their
    time on the bus.
    """
    zerooffload_step_bytes: float
    """Host memory traffic of ZeRO-Offload's step per parameter, including its kernel's, where
    ``cast_h2d_bytes_per_s`` is not known.
    """
    deepspeed_copies: float
    """How long Python waits for the copies of gradients in DeepSpeed's SuperOffload, as a share of
    their time on the link.
    """
    deepspeed_clipped_adam_bytes: float
    """Host memory traffic per parameter that takes as long as one sub-group's Adam in DeepSpeed's
    SuperOffload with clipping, both ways between its processes included.
    """


Positive = Annotated[float, Meta(gt=0, le=1e30)]


class AttentionRate(Struct, frozen=True, array_like=True):
    """How fast a backend attends within documents of one length: causal, without a window.

    FLOP/s, or shares of ``Speed.matrix_flops``; backward counts 2.5 times the FLOPs of forward,
    with the scores that it computes again.
    """

    document: Annotated[int, Meta(gt=0, le=1 << 30)]
    """Tokens."""
    forward: Positive
    backward: Positive


AttentionRates = tuple[AttentionRate, ...]
"""Of one backend, ascending in length."""


class _AttentionConstants(Struct, frozen=True, kw_only=True):
    """Rates of attention by backend, as shares of the rate of bare matrix products."""

    provenance: str
    rates: dict[str, AttentionRates]


def _rate_at(rates: AttentionRates, document: float) -> AttentionRate:
    """Interpolate between rates, linearly in the logarithm of the length; flat before the first and
    after the last.
    """
    longer = bisect_right(rates, document, key=attrgetter("document"))
    if longer in (0, len(rates)):
        return rates[max(0, longer - 1)]
    below, above = rates[longer - 1 : longer + 1]
    share = log(document / below.document) / log(above.document / below.document)
    return AttentionRate(
        document=round(document),
        forward=below.forward + share * (above.forward - below.forward),
        backward=below.backward + share * (above.backward - below.backward),
    )


JSON_NAMES = {
    "d2h_bytes_per_s": "down_bytes_per_s",
    "h2d_bytes_per_s": "up_bytes_per_s",
    "layer_launch_overhead_s": "small_layer_s",
    "layer_launch_overhead_by_ranks": "small_layer_together",
}
"""Names of hardware rates in files, which stay readable across versions."""


class Calibrated(Struct, frozen=True, kw_only=True):
    """Rates that ``so-tui calibrate`` measured."""

    date: str
    """ISO 8601."""
    host: str = ""
    """The machine of the same kind that was measured; empty where it is this one."""


Points = tuple[tuple[int, float], ...]
"""(number of cores or ranks, what was measured with that many), ascending."""


class SpeedSource(Struct, frozen=True, kw_only=True):
    """What a prediction of time rests on."""

    calibrated: Calibrated | None = None
    published: str = ""
    """Source of the published rates that were used: all, or those that were not measured."""
    workload: Workload | None = None
    """None where nothing is known of the data: whole sequences, every token trained."""
    probed: bool = False
    """Whether a probe of the same model corrected the prediction."""
    probed_modes: tuple[str, ...] = ()
    """Offload modes of the probes that did. Of another mode than the plan's, they say nothing of
    its optimizer.
    """
    probed_weights: Literal["", "gpu", "host"] = ""
    """Where those probes kept the weights, if the plan keeps them in the other memory: they say
    nothing of fetching them.
    """
    probed_passes: bool = True
    """Whether those probes say anything of forward and backward. Where both waited for weights,
    they do not of a plan without fetching.
    """


class Speed(Struct, frozen=True, kw_only=True, rename=JSON_NAMES):
    """Rates of one machine, or one kind of machine; per GPU unless they say otherwise."""

    matrix_flops: float
    """FLOP/s of bare bf16 matrix products of a model's shapes."""
    hbm_bytes_per_s: float
    """Bytes read and written in a copy within the GPU's memory."""
    d2h_bytes_per_s: float
    """GPU memory to pinned host memory."""
    h2d_bytes_per_s: float
    pageable_d2h_bytes_per_s: float
    """GPU memory to host memory that is not pinned. DeepSpeed's SuperOffload copies fp32 gradients
    so; nothing of ours does.
    """
    peer_bytes_per_s: float
    """One GPU to the others, each way."""
    layer_launch_overhead_s: float
    """Host time of a small layer's forward and backward: Python, hooks and kernel launches."""
    adam: Points
    """(cores, bytes of host memory traffic per second) of the CPU Adam kernel, ascending; flat
    after the last.
    """
    node_bytes_per_s: float
    """Highest bandwidth of a NUMA node's memory, whatever the number of cores."""
    cast_h2d_bytes_per_s: float | None = None
    """Bytes of bf16 weights that reach the GPU when fp32 ones in pageable memory are cast on the
    host and copied, as DeepSpeed does. None where only ``zerooffload_step_bytes`` says what that
    costs.
    """
    adam_together: Points = ()
    """(ranks, rate of each rank's Adam) where that many share a node, its cores and its memory;
    ascending.
    """
    layer_launch_overhead_by_ranks: Points = ()
    """(ranks, ``layer_launch_overhead_s`` where that many synchronise about once a layer),
    ascending: all wait for the slowest.
    """
    attention: dict[str, AttentionRates] = {}
    """FLOP/s of the attention backends that were measured on this machine."""
    source: str = ""
    """Where the published figures come from, for people; empty where none is used."""
    calibrated: Calibrated | None = None
    """Set where figures were measured on this machine or one of its kind."""

    def attention_at(self, backend: str, document: float) -> AttentionRate:
        """Return a backend's FLOP/s within documents of a length: measured here, else as elsewhere
        in proportion to matrix products.
        """
        if measured := self.attention.get(backend):
            return _rate_at(measured, document)
        shares = _rate_at(constants().attention.rates[backend], document)
        return AttentionRate(
            document=shares.document,
            forward=shares.forward * self.matrix_flops,
            backward=shares.backward * self.matrix_flops,
        )

    def layer_launch_overhead_of(self, ranks: int) -> float:
        """Return the host time of a small layer where ``ranks`` all-gather weights. More ranks than
        were measured take no less time.
        """
        by_ranks = self.layer_launch_overhead_by_ranks
        measured = [seconds for count, seconds in by_ranks if count <= ranks]
        return max([self.layer_launch_overhead_s, *measured])

    def adam_bytes_per_s(self, cores: int, ranks_per_node: int) -> float:
        """Return the rate of Adam on ``cores`` cores with ``ranks_per_node`` of them running at the
        same time on one node.

        Together they move no more than one Adam on as many cores, and less where that was measured.
        """
        measured = [rate for ranks, rate in self.adam_together if ranks <= ranks_per_node]
        if ranks_per_node not in dict(self.adam_together):
            measured.append(_interpolated(self.adam, cores * ranks_per_node) / ranks_per_node)
        return min(
            _interpolated(self.adam, cores), self.node_bytes_per_s / ranks_per_node, *measured
        )


class _Kind(Speed, frozen=True, kw_only=True, rename=JSON_NAMES):
    """Figures of a kind of machine, found by its GPU's product name."""

    pattern: str


class Constants(Struct, frozen=True, kw_only=True):
    schema: int
    memory: _MemoryConstants
    step: StepConstants
    attention: _AttentionConstants
    machines: tuple[_Kind, ...]


prepare(Constants)


_CONTENT = PATH.read_bytes()
SHIPPED = msgspec.json.decode(_CONTENT, type=Constants)  # noqa: TID251 -- a file of the package
DIGEST = hashlib.sha256(_CONTENT).hexdigest()[:12]
"""Name of the constants that came with the program, recorded with whatever was predicted from
them.
"""


def constants() -> Constants:
    """Return the constants that came with the program; fitting puts others in their place."""
    return SHIPPED


def published_speed(gpu_name: str) -> Speed | None:
    """Return the rates of a GPU by its product name (``NVIDIA GH200 480GB``); None when nothing is
    known of it.
    """
    found = (
        kind
        for kind in constants().machines
        if re.search(rf"\b(?:{kind.pattern})\b", gpu_name, re.IGNORECASE)
    )
    return next(found, None)


def _interpolated(points: Points, cores: int) -> float:
    """Interpolate between the points: through zero before the first, flat after the last."""
    before_cores, before_rate = 0, 0.0
    for at, rate in points:
        if cores <= at:
            return before_rate + (rate - before_rate) * (cores - before_cores) / (at - before_cores)
        before_cores, before_rate = at, rate
    return before_rate


# How far predicted steps are off. Figures of measurements: ``benchmarks/planner_errors.py``
# derives them, and a test holds them to it.


WITHIN = 0.8
"""Share of the measured steps that were within the error of their prediction."""
CALIBRATED = 0.12
"""Error of a step that is predicted with the rates of its machine, as a share of the prediction."""
PUBLISHED = 0.15
"""The same with rates that are published for the GPU."""
ALIKE = 0.04
"""Settings of one run whose predicted speeds differ by less count as equally fast: half of the
ratios between measured settings of a model on one machine were off by more. It is less than the
error of a step, since whatever all settings share cancels out.
"""
SURE = 0.10
"""Share from which on a planned difference is worth a price. Where 10 to 20 % were planned, the
setting that was planned to be faster was faster in nine of ten pairs; where 4 to 10 % were, in
three of four.
"""
CHECKED_GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
"""On which steps were measured beside their plans."""


class StepError(Struct, frozen=True, kw_only=True):
    """How far a predicted step can be expected to be off."""

    share: float
    """Of the prediction: four of five measured steps were within it (``WITHIN``)."""
    alike: float = ALIKE
    """Settings whose predicted speeds differ by less than this share count as equally fast."""
    checked: bool
    """Whether plans were held to measurements on GPUs of this kind, on one host. Elsewhere the
    error may be larger.
    """


def step_error(speed: Speed, gpu_name: str, hosts: int) -> StepError:
    """Return the error of a step that is predicted with these rates for so many hosts with this
    GPU.
    """
    kind = published_speed(gpu_name)
    return StepError(
        share=CALIBRATED if speed.calibrated else PUBLISHED,
        checked=hosts == 1 and kind is not None and kind in map(published_speed, CHECKED_GPUS),
    )


def about_as_fast(rate: float, other: float) -> bool:
    """Return whether the predicted speeds of two settings of one run differ by less than their
    ratio may be off.
    """
    return abs(rate - other) <= ALIKE * max(rate, other)


def clearly_faster(rate: float, other: float) -> bool:
    """Return whether the first of two predicted speeds is higher by more than that."""
    return rate > other and not about_as_fast(rate, other)


def surely_faster(rate: float, other: float) -> bool:
    """Return whether the first of two predicted speeds is higher by so much that it may be worth a
    price.
    """
    return rate >= (1 + SURE) * other


# The network between the hosts of a run: how fast ZeRO-3's collectives can be that every host
# takes part in.
#
# Such a collective passes through all ranks as in a ring: each byte enters and leaves every host
# once, and every rank once. The slower of the two links, between hosts and within one, sets its
# rate.


LINE_RATE_SHARE = 0.9
"""What collectives of many megabytes reach of the adapters' line rate. Not measured: published
figures are between 0.8 and 0.95.
"""
ASSUMED_GBIT_PER_S = 200
"""Of each GPU where nothing is known of the network: what Alps, Isambard-AI, JUPITER and DeltaAI
have, and half of what Vista has.
"""
_BYTES_PER_GBIT = 1e9 / 8


def assumed_network(gpus: int) -> Network:
    """Return the network that is assumed for a host with this many GPUs."""
    return Network(gbit_per_s=float(ASSUMED_GBIT_PER_S * max(1, gpus)), source="")


def between_hosts_bytes_per_s(network: Network, share: float) -> float:
    """Return how fast a collective enters and leaves each host.

    Args:
        network: Of each host.
        share: Of the host's GPUs that take part. Adapters belong to GPUs, so the others' stay
            unused.
    """
    reached = 1.0 if network.measured else LINE_RATE_SHARE
    return network.gbit_per_s * _BYTES_PER_GBIT * reached * share


def measured_network(bytes_per_s: float, share: float, source: str) -> Network:
    """Return the network of a host whose collectives were measured; the inverse of
    ``between_hosts_bytes_per_s``.
    """
    return Network(
        gbit_per_s=float(f"{bytes_per_s / _BYTES_PER_GBIT / share:.3g}"),
        source=source,
        measured=True,
    )


def network_rate_text(network: Network) -> str:
    """Return ``200 Gb/s (measured by ...)``."""
    return f"{network.gbit_per_s:g} Gb/s ({network.source or 'assumed: 200 for each GPU'})"
