"""What was measured on this machine: its rates (``so-tui calibrate``), and how far predictions were off (``plan --probe``).

One JSON file per machine in the XDG state folder, named after host, GPU and CPU. A machine of the same kind (a node of a cluster) uses
the figures of one that was measured, and the plan says so.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from so_tui.folders import state_home
from so_tui.machine.types import Machine
from so_tui.model.profile import profile_of
from so_tui.plan import state_files
from so_tui.plan.constants import JSON_NAMES, AttentionRates, Calibrated, Speed, published_speed
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


class Passes(Struct, frozen=True, kw_only=True):
    """Seconds of a step's passes."""

    forward_s: NotNegative
    backward_s: NotNegative


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
    computing: Passes | None = None
    """What was predicted of these passes as if the GPU had the weights; None where it did, and in older probes."""


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
    return Calibration(
        hostname=machine.hostname,
        gpu_name=gpu,
        cpu_name=machine.cpu_name,
        cores=len(machine.online_cpus),
    )


def folder() -> Path:
    return state_home() / "calibration"


def path_of(machine: Machine) -> Path:
    """Return the file of this machine, whether it exists or not."""
    mine = empty(machine)
    kind = hashlib.sha256(f"{mine.gpu_name}\0{mine.cpu_name}\0{mine.cores}".encode()).hexdigest()[
        :8
    ]
    return folder() / f"{re.sub(r'[^A-Za-z0-9.-]', '_', mine.hostname)}-{kind}.json"


def calibration_of(machine: Machine) -> Calibration | None:
    """Return what was measured on this machine, else on another of its kind; None when nothing was. An unreadable file counts as none."""
    own = path_of(machine)
    if (found := state_files.read(own, Calibration)) is not None:
        return found
    mine = empty(machine)
    same_kind = (
        state_files.read(path, Calibration)
        for path in sorted(folder().glob(f"*-{own.stem[-8:]}.json"))
    )
    alike = (mine.gpu_name, mine.cpu_name, mine.cores)
    return next(
        (
            other
            for other in same_kind
            if other and (other.gpu_name, other.cpu_name, other.cores) == alike
        ),
        None,
    )


def store(machine: Machine, *, rates: Rates | None = None, probe: Probe | None = None) -> Path:
    """Add to this machine's file; a probe replaces the one of the same model, mode, ranks and settings. Raises OSError."""
    path = path_of(machine)
    known = state_files.read(path, Calibration) or empty(machine)
    if rates is not None:
        known = replace(known, rates=rates)
    if probe is not None:
        same = (probe.model, probe.mode, probe.ranks, probe.settings)
        others = tuple(
            old for old in known.probes if (old.model, old.mode, old.ranks, old.settings) != same
        )
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
    missing = (
        measured.keys()
        - own.keys()
        - ({"peer_bytes_per_s"} if len(machine.gpus) < 2 else set())
        - _DEEPSPEEDS
    )
    calibrated = Calibrated(
        date=rates.measured, host="" if known.hostname == machine.hostname else known.hostname
    )
    if published is None:
        if missing:
            return None
        # One GPU has no peer; where more machines like it are imagined, memory alone counts.
        assumed = {
            "peer_bytes_per_s": own["h2d_bytes_per_s"],
            "pageable_d2h_bytes_per_s": own["d2h_bytes_per_s"],
        }
        return Speed(**assumed | own, calibrated=calibrated)
    rest = {name: getattr(published, name) for name in Speed.__struct_fields__} | {
        "source": published.source if missing else ""
    }
    return Speed(**rest | own | {"calibrated": calibrated})
