"""How far predictions were off by probes of the same model, taken into account: of a step, part by
part, and of GPU memory.

Alternatives that share a part of the step share its correction, so that they can be compared.
Forward and backward are the GPU's work in any mode, and whether it fetches weights or has them. How
long fetching takes is corrected by probes that waited for it, and the exposed optimizer by those of
the same mode.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from so_tui.folders import state_home
from so_tui.machine.types import Machine
from so_tui.plan import workload as state_files
from so_tui.plan.plan import StepTime
from so_tui.plan.rates import (
    JSON_NAMES,
    AttentionRates,
    Calibrated,
    Positive,
    Speed,
    published_speed,
)
from so_tui.plan.terms import MemoryTerm, term
from so_tui.plan.workload import Workload
from so_tui.spec.attention import AttentionBackend
from so_tui.spec.run_spec import Mode
from so_tui.trust.decoding import prepare

# What was measured on this machine: its rates (``so-tui calibrate``), and how far predictions were
# off (``plan --probe``).
#
# One JSON file per machine in the XDG state folder, named after host, GPU and CPU. A machine of
# the same kind (a node of a cluster) uses the figures of one that was measured, and the plan says
# so.


SCHEMA = 1

STEP_PARTS = 2
"""Version of how a step is divided. In 1, waits for weights that the GPU's work hid were counted as
the optimizer's.
"""

NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
_Points = tuple[tuple[Count, Positive], ...]


class Rates(Struct, frozen=True, kw_only=True, rename=JSON_NAMES):
    """What ``so-tui calibrate`` measured; None where the machine lacks it, or it was not
    measured.
    """

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
    """bf16 weights from fp32 ones in pageable memory, cast on the host, as DeepSpeed returns
    them.
    """
    peer_bytes_per_s: Positive | None = None
    layer_launch_overhead_s: Positive | None = None
    """Forward and backward of a layer too small for a GPU: Python, hooks and launches."""
    layer_launch_overhead_by_ranks: _Points = ()
    """(ranks, the same where that many synchronise after every 32 of them, about once in a layer of
    a model).
    """
    adam: _Points = ()
    """(cores, bytes of host memory traffic per second)."""
    adam_together: _Points = ()
    """(ranks, bytes of host memory traffic per second of each) with that many Adam workers on the
    first GPU's node.
    """
    attention: tuple[tuple[AttentionBackend, AttentionRates], ...] = ()
    """FLOP/s of the attention backends that the first GPU can use."""
    node_bytes_per_s: _Points = ()
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


class Passes(Struct, frozen=True, kw_only=True):
    """Seconds of a step's passes."""

    forward_s: NotNegative
    backward_s: NotNegative


class Probe(Struct, frozen=True, kw_only=True):
    """A few real steps of one setting on this machine, and what was predicted for them without any
    probe.
    """

    measured: str
    model: str
    """``ModelProfile.key`` of the model."""
    mode: Mode
    ranks: int
    settings: str
    """What decides its steps, for people: ``superoffload 0.90, micro-batch 4 x 4,096, full``."""
    workload: Workload
    predicted: Figures
    actual: Figures
    constants: str = ""
    """``DIGEST`` of the constants behind ``predicted``."""
    step_parts: int = 1
    """``STEP_PARTS`` of what measured it."""
    host_weights: bool = False
    """Whether weights were in host memory, so that both passes fetched them."""
    computing: Passes | None = None
    """What was predicted of these passes as if the GPU had the weights; None where it did, and in
    older probes.
    """


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


def _empty(machine: Machine) -> Calibration:
    """Return the calibration of a machine that was not measured yet."""
    return Calibration(
        hostname=machine.hostname,
        gpu_name=machine.gpus[0].name if machine.gpus else "",
        cpu_name=machine.cpu_name,
        cores=len(machine.online_cpus),
    )


def _path_of(machine: Machine) -> Path:
    """Return the file of this machine, whether it exists or not."""
    mine = _empty(machine)
    kind = hashlib.sha256(f"{mine.gpu_name}\0{mine.cpu_name}\0{mine.cores}".encode()).hexdigest()
    name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', mine.hostname)}-{kind[:8]}.json"
    return state_home() / "calibration" / name


def calibration_of(machine: Machine) -> Calibration | None:
    """Return what was measured on this machine, else on another of its kind; None when nothing was.
    An unreadable file counts as none.
    """
    own, mine = _path_of(machine), _empty(machine)
    for path in (own, *sorted(own.parent.glob(f"*-{own.stem[-8:]}.json"))):
        found = state_files.read_state_file(path, Calibration)
        if found and (
            path == own
            or (found.gpu_name, found.cpu_name, found.cores)
            == (mine.gpu_name, mine.cpu_name, mine.cores)
        ):
            return found
    return None


def store(machine: Machine, *, rates: Rates | None = None, probe: Probe | None = None) -> Path:
    """Add to this machine's file; a probe replaces the one of the same model, mode, ranks and
    settings. Raises OSError.
    """
    path = _path_of(machine)
    known = state_files.read_state_file(path, Calibration) or _empty(machine)
    if rates is not None:
        known = replace(known, rates=rates)
    if probe is not None:
        same = (probe.model, probe.mode, probe.ranks, probe.settings)
        others = tuple(
            old for old in known.probes if (old.model, old.mode, old.ranks, old.settings) != same
        )
        known = replace(known, probes=(*others, probe))
    return state_files.write_state_file(path, known)


def speed_of(machine: Machine, gpu_name: str, known: Calibration | None) -> Speed | None:
    """Return the machine's own rates, completed by those published for its GPU; None where that
    leaves any of them unknown.

    A machine without GPUs has no prediction: how fast its cores train is not calibrated.
    """
    published = published_speed(gpu_name)
    if known is None or (rates := known.rates) is None:
        return published
    measured: dict[str, Any] = {
        name: getattr(rates, name) for name in Speed.__struct_fields__ if hasattr(rates, name)
    }
    measured |= {
        "adam": rates.adam or None,
        "attention": dict(rates.attention),
        "node_bytes_per_s": min((rate for _, rate in rates.node_bytes_per_s), default=None),
    }
    own = {name: value for name, value in measured.items() if value is not None}
    missing = measured.keys() - own.keys() - _DEEPSPEEDS
    if len(machine.gpus) < 2:
        missing -= {"peer_bytes_per_s"}
    host = "" if known.hostname == machine.hostname else known.hostname
    own["calibrated"] = Calibrated(date=rates.measured, host=host)
    if published is not None:
        rest = {name: getattr(published, name) for name in Speed.__struct_fields__}
        return Speed(**rest | {"source": published.source if missing else ""} | own)
    if missing:
        return None
    # One GPU has no peer; where more machines like it are imagined, memory alone counts.
    assumed = {
        "peer_bytes_per_s": own["h2d_bytes_per_s"],
        "pageable_d2h_bytes_per_s": own["d2h_bytes_per_s"],
    }
    return Speed(**assumed | own)


PassName = Literal["forward_s", "backward_s"]
_NAMES: tuple[PassName, ...] = ("forward_s", "backward_s")
_WAITS = 1.001
"""Predicted seconds of a pass that fetches weights, over those without fetching, from which on it
waits for them: more than rounding.
"""


class Fetching(NamedTuple):
    """What is predicted of a step whose passes fetch weights from host memory."""

    computing: Passes
    """As if the GPU had the weights."""
    copies_s: float
    """Of each pass's copies, over all micro-batches."""


def correcting(
    mode: Mode, ranks: int, probes: Sequence[Probe], *, host_weights: bool
) -> list[Probe]:
    """Return the probes by which a plan is corrected: those that kept weights where it does, else
    the others.

    Of them those with as many ranks if there are any, and of these those of its mode if there are.
    """
    own = [probe for probe in probes if probe.host_weights == host_weights]
    return _nearest(mode, ranks, own or probes)


def _nearest(mode: Mode, ranks: int, probes: Sequence[Probe]) -> list[Probe]:
    near = [probe for probe in probes if probe.ranks == ranks] or list(probes)
    return [probe for probe in near if probe.mode == mode] or near


def corrected_step(
    step: StepTime,
    mode: Mode,
    ranks: int,
    probes: Sequence[Probe],
    fetching: Fetching | None = None,
) -> StepTime:
    """Return a predicted step corrected by probes of the same model.

    Args:
        step: As predicted.
        mode: The plan's offload mode.
        ranks: The plan's ranks.
        probes: Of any mode and number of ranks.
        fetching: Where the plan keeps weights in host memory, what is predicted of that.
    """
    having, fetched = (
        _nearest(mode, ranks, [probe for probe in probes if probe.host_weights == where])
        for where in (False, True)
    )
    if fetching:
        forward_s, backward_s = (
            _fetching_pass_s(name, step, fetching, having, fetched) for name in _NAMES
        )
    else:
        forward_s, backward_s = (
            getattr(step, name) * (_error(name, having) if having else _shared_error(fetched))
            for name in _NAMES
        )
    near = correcting(mode, ranks, probes, host_weights=fetching is not None)
    exposed_s = _corrected_exposed_s(step.exposed_optimizer_s, mode, near)
    return replace(step, forward_s=forward_s, backward_s=backward_s, exposed_optimizer_s=exposed_s)


def _fetching_pass_s(
    name: PassName,
    step: StepTime,
    fetching: Fetching,
    having: Sequence[Probe],
    fetched: Sequence[Probe],
) -> float:
    """Return the corrected seconds of a pass that fetches weights: it takes as long as computing,
    or as fetching if that takes longer.

    Args:
        name: The pass.
        step: As predicted.
        fetching: What is predicted of fetching.
        having: Probes whose GPUs had the weights, which correct what is computed where no other one
            does.
        fetched: Probes whose passes fetched them.
    """
    waited = [probe for probe in fetched if _waited(name, probe)]
    hidden = [probe for probe in fetched if not _waited(name, probe)]
    predicted_s, computing_s = getattr(step, name), getattr(fetching.computing, name)
    copies_s = predicted_s if predicted_s > _WAITS * computing_s else fetching.copies_s
    return float(max(computing_s * _error(name, hidden or having), copies_s * _error(name, waited)))


def _waited(name: PassName, probe: Probe) -> bool:
    """Return whether a pass of a probe that fetched weights was predicted to wait for them."""
    return probe.computing is not None and getattr(probe.predicted, name) > _WAITS * getattr(
        probe.computing, name
    )


def tells_computing(probe: Probe) -> bool:
    """Return whether a pass of a probe was predicted to take as long as its computation, whatever
    it fetched.
    """
    return not all(_waited(name, probe) for name in _NAMES)


def _shared_error(fetched: Sequence[Probe]) -> float:
    """Return what probes that fetched weights say of passes that do not: measured over predicted
    seconds of what is computed.

    A pass takes at least as long as its computation, so that each of the two is a bound from above,
    and the lower one counts. Where both passes were predicted to wait, nothing is known.
    """
    bounds = [
        min(ratios)
        for probe in fetched
        if probe.computing is not None
        and tells_computing(probe)
        and (ratios := _ratios((probe.actual, probe.computing, name) for name in _NAMES))
    ]
    return median(bounds or [1.0])


def _ratios(compared: Iterable[tuple[Figures, Figures | Passes, str]]) -> list[float]:
    """Return measured over predicted seconds of passes, where there are both."""
    pairs = ((getattr(actual, name), getattr(told, name)) for actual, told, name in compared)
    return [actual / predicted for actual, predicted in pairs if actual > 0 and predicted > 0]


def _corrected_exposed_s(exposed_s: float, mode: Mode, probes: Sequence[Probe]) -> float:
    """Return the exposed optimizer corrected by those of the probes that are of the same mode.

    What SuperOffload exposes is what is left of Adam when other work has hidden the rest, so that a
    small error of Adam can multiply it. There it is scaled too, but not changed by more seconds
    than the probe was off.
    """
    corrected = []
    for probe in probes:
        actual, predicted = probe.actual.exposed_optimizer_s, probe.predicted.exposed_optimizer_s
        if probe.mode == mode and actual > 0 and predicted > 0:
            scaled, most = exposed_s * actual / predicted, abs(actual - predicted)
            if mode == "superoffload":
                scaled = max(exposed_s - most, min(exposed_s + most, scaled))
            corrected.append(scaled)
    return median(corrected or [exposed_s])


def _error(name: PassName, probes: Sequence[Probe]) -> float:
    """Return measured over predicted seconds of a pass (median); 1 where there is nothing to
    compare.
    """
    return median(_ratios((probe.actual, probe.predicted, name) for probe in probes) or [1.0])


def corrected_terms(
    terms: Sequence[MemoryTerm], mode: Mode, ranks: int, probes: Sequence[Probe]
) -> tuple[MemoryTerm, ...]:
    """Return GPU memory terms corrected by probes of the same model, as ``correcting`` returns
    them.

    What the allocator reserved beyond the prediction becomes a term, and what it reserved less is
    taken off its slack. The share of the driver and NCCL is as measured. Where no probe was of this
    mode, all that carries over is what every probed mode took beyond its prediction: that is most
    likely of parts that they share, such as activations.
    """
    near = [probe for probe in probes if probe.ranks == ranks and probe.actual.gpu_reserved_bytes]
    beyond: dict[Mode, int] = {}
    for probe in near:
        excess = probe.actual.gpu_reserved_bytes - probe.predicted.gpu_reserved_bytes
        beyond[probe.mode] = max(beyond.get(probe.mode, excess), excess)
    if mode not in beyond:
        if (shared := min(beyond.values(), default=0)) <= 0:
            return tuple(terms)
        formula = f"by a probe of this model here, with {' and '.join(beyond)}"
        return (*terms, term("probe-excess", "gpu", shared, "estimate", formula))
    more = beyond[mode]
    outside = max(
        (
            probe.actual.gpu_device_bytes - probe.actual.gpu_reserved_bytes
            for probe in near
            if probe.mode == mode and probe.actual.gpu_device_bytes
        ),
        default=0,
    )
    found = [_corrected(each, more, outside) for each in terms]
    if more > 0:
        found.append(
            term("probe-excess", "gpu", more, "calibrated", "by a probe of this model here")
        )
    return tuple(found)


def _corrected(found: MemoryTerm, more: int, outside: int) -> MemoryTerm:
    if found.kind == "allocator-slack" and more < 0:
        return replace(
            found, bytes=max(0, found.bytes + more), formula=f"{found.formula}, less by a probe"
        )
    if found.kind == "cuda-context" and outside:
        return replace(found, bytes=outside, formula="driver, kernels, NCCL, by a probe")
    if found.kind == "nccl-buffers" and outside:
        return replace(found, bytes=0, formula="counted with the context")
    return found
