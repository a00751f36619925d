"""What was measured on this machine: its rates (``so-tui calibrate``), and how far predictions were off (``plan --probe``).

One JSON file per machine in the XDG state folder, named after host, GPU and CPU. A machine of the same kind (a node of a cluster) uses
the figures of one that was measured, and the plan says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from so_tui.folders import state_home
from so_tui.machine.types import Machine
from so_tui.model.profile import profile_of
from so_tui.plan import state_files
from so_tui.plan.constants import JSON_NAMES, AttentionRates, Calibrated, Speed, published_speed
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.plan.types import StepTime
from so_tui.plan.workload import Workload
from so_tui.spec.attention import AttentionBackend
from so_tui.spec.sections.model import ModelSpec
from so_tui.spec.sections.offload import Mode
from so_tui.structs import prepare

SCHEMA = 1

STEP_PARTS = 2
"""Version of how a step is divided. In 1, waits for weights that the GPU's work hid were counted as the optimizer's."""

Positive = Annotated[float, Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]


class Rates(Struct, frozen=True, kw_only=True, rename=JSON_NAMES):
    """What ``so-tui calibrate`` measured; None where the machine lacks it, or it was not measured."""

    measured: str
    """Date, ISO 8601."""
    seconds: float
    """How long measuring took."""
    matrix_flops: Positive | None = None
    hbm_bytes_per_s: Positive | None = None
    d2h_bytes_per_s: Positive | None = None
    h2d_bytes_per_s: Positive | None = None
    pageable_d2h_bytes_per_s: Positive | None = None
    pageable_h2d_bytes_per_s: Positive | None = None
    cast_h2d_bytes_per_s: Positive | None = None
    """bf16 weights from fp32 ones in pageable memory, cast on the host, as DeepSpeed returns them."""
    both_ways_bytes_per_s: tuple[Positive, Positive] | None = None
    """d2h and h2d while both run at the same time."""
    peer_bytes_per_s: Positive | None = None
    layer_launch_overhead_s: Positive | None = None
    """Forward and backward of a layer too small for a GPU: Python, hooks and launches."""
    layer_launch_overhead_by_ranks: tuple[tuple[Count, Positive], ...] = ()
    """(ranks, the same where that many synchronise after every 32 of them, about once in a layer of a model)."""
    adam: tuple[tuple[Count, Positive], ...] = ()
    """(cores, bytes of host memory traffic per second)."""
    adam_remote: tuple[tuple[Count, Positive], ...] = ()
    """(NUMA node, the same on all cores of the first GPU's node while the states lie in that node's memory). Plans keep states near."""
    adam_together: tuple[tuple[Count, Positive], ...] = ()
    """(ranks, bytes of host memory traffic per second of each) with that many Adam workers on the first GPU's node."""
    attention: tuple[tuple[AttentionBackend, AttentionRates], ...] = ()
    """FLOP/s of the attention backends that the first GPU can use."""
    node_bytes_per_s: tuple[tuple[Count, Positive], ...] = ()
    """(NUMA node, highest bandwidth of its memory that any number of its cores reached)."""


class Figures(Struct, frozen=True, kw_only=True):
    """Figures of one setting, predicted or measured."""

    step_s: NotNegative
    forward_s: NotNegative
    backward_s: NotNegative
    exposed_optimizer_s: NotNegative
    gpu_reserved_bytes: int
    gpu_device_bytes: int
    host_bytes: int
    """Of the run's processes while it trains."""
    host_load_bytes: int = 0
    """Most before the first step; 0 where it was not measured."""


class Probe(Struct, frozen=True, kw_only=True):
    """A few real steps of one setting on this machine, and what was predicted for them without any probe."""

    measured: str
    model: str
    """``model_key`` of the model."""
    mode: Mode
    ranks: int
    settings: str
    """What decides its steps, for people: ``superoffload 0.90, micro-batch 4 x 4,096, full``."""
    workload: Workload
    predicted: Figures
    actual: Figures
    constants: str = ""
    """``digest`` of the constants behind ``predicted``."""
    step_parts: int = 1
    """``STEP_PARTS`` of what measured it."""
    host_weights: bool = False
    """Whether weights were in host memory, so that both passes fetched them."""


class Calibration(Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    hostname: str
    gpu_name: str
    cpu_name: str
    cores: int
    rates: Rates | None = None
    probes: tuple[Probe, ...] = ()


prepare(Calibration)

_DEEPSPEEDS = {"pageable_d2h_bytes_per_s", "cast_h2d_bytes_per_s"}
"""Rates that only predictions of DeepSpeed's own optimizers use. Older calibrations lack them."""


def model_key(model: ModelSpec) -> str:
    """Return the name of a model's shape, whatever its weights. Raises InputError as ``profile_of``."""
    return profile_of(model).key


def empty(machine: Machine) -> Calibration:
    """Return the calibration of a machine that was not measured yet."""
    gpu = machine.gpus[0].name if machine.gpus else ""
    return Calibration(hostname=machine.hostname, gpu_name=gpu, cpu_name=machine.cpu_name, cores=len(machine.online_cpus))


def folder() -> Path:
    return state_home() / "calibration"


def path_of(machine: Machine) -> Path:
    """Return the file of this machine, whether it exists or not."""
    mine = empty(machine)
    kind = hashlib.sha256(f"{mine.gpu_name}\0{mine.cpu_name}\0{mine.cores}".encode()).hexdigest()[:8]
    return folder() / f"{re.sub(r'[^A-Za-z0-9.-]', '_', mine.hostname)}-{kind}.json"


def calibration_of(machine: Machine) -> Calibration | None:
    """Return what was measured on this machine, else on another of its kind; None when nothing was. An unreadable file counts as none."""
    own = path_of(machine)
    if (found := state_files.read(own, Calibration)) is not None:
        return found
    mine = empty(machine)
    same_kind = (state_files.read(path, Calibration) for path in sorted(folder().glob(f"*-{own.stem[-8:]}.json")))
    alike = (mine.gpu_name, mine.cpu_name, mine.cores)
    return next((other for other in same_kind if other and (other.gpu_name, other.cpu_name, other.cores) == alike), None)


def store(machine: Machine, *, rates: Rates | None = None, probe: Probe | None = None) -> Path:
    """Add to this machine's file; a probe replaces the one of the same model, mode, ranks and settings. Raises OSError."""
    path = path_of(machine)
    known = state_files.read(path, Calibration) or empty(machine)
    if rates is not None:
        known = replace(known, rates=rates)
    if probe is not None:
        same = (probe.model, probe.mode, probe.ranks, probe.settings)
        others = tuple(old for old in known.probes if (old.model, old.mode, old.ranks, old.settings) != same)
        known = replace(known, probes=(*others, probe))
    return state_files.write(path, known)


def speed_of(machine: Machine, gpu_name: str, known: Calibration | None) -> Speed | None:
    """Return the machine's own rates, completed by those published for its GPU; None where that leaves any of them unknown.

    A machine without GPUs has no prediction: how fast its cores train is not calibrated.
    """
    published = published_speed(gpu_name)
    rates = known.rates if known else None
    if known is None or rates is None:
        return published
    slowest = min((rate for _, rate in rates.node_bytes_per_s), default=None)
    measured: dict[str, Any] = {
        "matrix_flops": rates.matrix_flops,
        "hbm_bytes_per_s": rates.hbm_bytes_per_s,
        "d2h_bytes_per_s": rates.d2h_bytes_per_s,
        "h2d_bytes_per_s": rates.h2d_bytes_per_s,
        "pageable_d2h_bytes_per_s": rates.pageable_d2h_bytes_per_s,
        "cast_h2d_bytes_per_s": rates.cast_h2d_bytes_per_s,
        "peer_bytes_per_s": rates.peer_bytes_per_s,
        "layer_launch_overhead_s": rates.layer_launch_overhead_s,
        "layer_launch_overhead_by_ranks": rates.layer_launch_overhead_by_ranks,
        "adam": rates.adam or None,
        "adam_together": rates.adam_together,
        "attention": dict(rates.attention),
        "node_bytes_per_s": slowest,
    }
    own = {name: value for name, value in measured.items() if value is not None}
    missing = measured.keys() - own.keys() - ({"peer_bytes_per_s"} if len(machine.gpus) < 2 else set()) - _DEEPSPEEDS
    calibrated = Calibrated(date=rates.measured, host="" if known.hostname == machine.hostname else known.hostname)
    if published is None:
        if missing:
            return None
        # One GPU has no peer; where more machines like it are imagined, memory alone counts.
        assumed = {"peer_bytes_per_s": own["h2d_bytes_per_s"], "pageable_d2h_bytes_per_s": own["d2h_bytes_per_s"]}
        return Speed(**assumed | own, calibrated=calibrated)
    rest = {name: getattr(published, name) for name in Speed.__struct_fields__} | {"source": published.source if missing else ""}
    return Speed(**rest | own | {"calibrated": calibrated})


def correcting(mode: Mode, ranks: int, probes: Sequence[Probe], *, host_weights: bool = False) -> list[Probe]:
    """Return the probes by which a plan is corrected: with as many ranks if there are any, and of them those of its mode if there are.

    A plan with weights in host memory is corrected by probes of such runs if there are any. They correct no other plan: their passes may
    have waited for the bus.
    """
    fetching = [probe for probe in probes if probe.host_weights] if host_weights else []
    usable = fetching or [probe for probe in probes if not probe.host_weights]
    near = [probe for probe in usable if probe.ranks == ranks] or usable
    return [probe for probe in near if probe.mode == mode] or near


def corrected_step(step: StepTime, mode: Mode, near: Sequence[Probe]) -> StepTime:
    """Return a predicted step corrected by probes of the same model, as ``correcting`` returns them.

    Forward and backward are the GPU's work in any mode, so that a probe of another mode corrects them too. The exposed optimizer is the
    mode's own.
    """
    same = [probe for probe in near if probe.mode == mode]
    backward = _ratio([(probe.actual.backward_s, probe.predicted.backward_s) for probe in near])
    forward = _ratio([(probe.actual.forward_s, probe.predicted.forward_s) for probe in near])
    return replace(
        step,
        forward_s=step.forward_s * forward,
        backward_s=step.backward_s * backward,
        exposed_optimizer_s=_corrected_exposed_s(step.exposed_optimizer_s, mode, same),
    )


def _corrected_exposed_s(exposed_s: float, mode: Mode, probes: Sequence[Probe]) -> float:
    """Return the exposed optimizer corrected by probes of the same mode.

    What SuperOffload exposes is what is left of Adam when other work has hidden the rest, so that a small error of Adam can multiply it.
    There it is scaled too, but not changed by more seconds than the probe was off.
    """
    corrected = []
    for actual, predicted in ((probe.actual.exposed_optimizer_s, probe.predicted.exposed_optimizer_s) for probe in probes):
        if actual <= 0 or predicted <= 0:
            continue
        scaled, most = exposed_s * actual / predicted, abs(actual - predicted)
        corrected.append(max(exposed_s - most, min(exposed_s + most, scaled)) if mode == "superoffload" else scaled)
    return median(corrected) if corrected else exposed_s


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return measured over predicted (median); 1 where there is nothing to compare."""
    ratios = [actual / predicted for actual, predicted in pairs if actual > 0 and predicted > 0]
    return median(ratios) if ratios else 1.0


def corrected_terms(terms: Sequence[MemoryTerm], mode: Mode, ranks: int, probes: Sequence[Probe]) -> tuple[MemoryTerm, ...]:
    """Return GPU memory terms corrected by probes of the same model, as ``correcting`` returns them.

    What the allocator reserved beyond the prediction becomes a term, and what it reserved less is taken off its slack. The share of the
    driver and NCCL is as measured. Where no probe was of this mode, all that carries over is what every probed mode took beyond its
    prediction: that is most likely of parts that they share, such as activations.
    """
    near = [probe for probe in probes if probe.ranks == ranks and probe.actual.gpu_reserved_bytes]
    same = [probe for probe in near if probe.mode == mode]
    if not same:
        shared = min((max(map(_excess, alike)) for alike in _by_mode(near).values()), default=0)
        formula = f"by a probe of this model here, with {' and '.join(_by_mode(near))}"
        return (*terms, *([MemoryTerm(TermKind.PROBE_EXCESS, "gpu", shared, "estimate", formula)] if shared > 0 else []))
    more = max(map(_excess, same))
    outside = max(
        (probe.actual.gpu_device_bytes - probe.actual.gpu_reserved_bytes for probe in same if probe.actual.gpu_device_bytes), default=0
    )
    found = [_corrected(each, more, outside) for each in terms]
    if more > 0:
        found.append(MemoryTerm(TermKind.PROBE_EXCESS, "gpu", more, "calibrated", "by a probe of this model here"))
    return tuple(found)


def _excess(probe: Probe) -> int:
    """Return what the allocator reserved beyond the prediction."""
    return probe.actual.gpu_reserved_bytes - probe.predicted.gpu_reserved_bytes


def _by_mode(probes: Sequence[Probe]) -> dict[Mode, list[Probe]]:
    return {mode: [probe for probe in probes if probe.mode == mode] for mode in dict.fromkeys(probe.mode for probe in probes)}


def _corrected(found: MemoryTerm, more: int, outside: int) -> MemoryTerm:
    if found.kind is TermKind.ALLOCATOR_SLACK and more < 0:
        return replace(found, bytes=max(0, found.bytes + more), formula=f"{found.formula}, less by a probe")
    if found.kind is TermKind.CUDA_CONTEXT and outside:
        return replace(found, bytes=outside, formula="driver, kernels, NCCL, by a probe")
    if found.kind is TermKind.NCCL_BUFFERS and outside:
        return replace(found, bytes=0, formula="counted with the context")
    return found
