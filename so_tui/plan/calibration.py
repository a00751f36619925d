"""What was measured on this very machine: its rates (``so-tui calibrate``) and how far predictions were off (``plan --probe``).

One JSON file per machine in the XDG state folder, named after host, GPU and CPU. A machine of the same kind (a node of a cluster) borrows
the figures of one that was measured, and the plan says so.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.machine.types import Machine
from so_tui.plan import kept
from so_tui.plan.constants import JSON_NAMES, Speed, published_speed
from so_tui.plan.types import Mode, Workload
from so_tui.spec.folders import state_home
from so_tui.spec.types import ModelSpec
from so_tui.structs import prepare

SCHEMA = 1
CALIBRATED = "rates calibrated"
"""How the source of rates that were measured begins."""


class Rates(Struct, frozen=True, kw_only=True, rename=JSON_NAMES):
    """What ``so-tui calibrate`` measured; None where the machine has none of it, or it was not measured."""

    measured: str
    """Date, ISO 8601."""
    seconds: float
    """How long measuring took."""
    matrix_flops: float | None = None
    hbm_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    both_ways_bytes_per_s: tuple[float, float] | None = None
    """Down and up while both go at once."""
    peer_bytes_per_s: float | None = None
    layer_launch_overhead_s: float | None = None
    """Forward and backward of a layer too small for a GPU: Python, hooks and launches."""
    layer_launch_overhead_by_ranks: tuple[tuple[int, float], ...] = ()
    """(ranks, the same where so many wait for each other every 32 of them, about once in a layer of a model)."""
    adam: tuple[tuple[int, float], ...] = ()
    """(cores, bytes of host memory traffic per second)."""
    adam_together: tuple[tuple[int, float], ...] = ()
    """(ranks, bytes of host memory traffic per second of each) with so many Adam workers at once on the first GPU's node."""
    node_bytes_per_s: tuple[tuple[int, float], ...] = ()
    """(NUMA node, the most of its memory's bandwidth that any number of its cores reached)."""


class Figures(Struct, frozen=True, kw_only=True):
    """The same things predicted and measured, of one setting."""

    step_s: float
    forward_s: float
    backward_s: float
    exposed_optimizer_s: float
    gpu_reserved_bytes: int
    gpu_device_bytes: int
    host_bytes: int
    """Of the run's processes while it trains."""
    host_load_bytes: int = 0
    """The most before the first step; 0 where it was not measured."""


class Probe(Struct, frozen=True, kw_only=True):
    """A few real steps of one setting on this machine, beside what was predicted for them without any probe."""

    measured: str
    model: str
    """``model_key`` of the model."""
    mode: Mode
    ranks: int
    settings: str
    """For people: ``superoffload 0.90, micro-batch 4 x 4096, full``."""
    workload: Workload
    predicted: Figures
    actual: Figures
    constants: str = ""
    """``digest`` of the constants that ``predicted`` rests on."""


class Calibration(Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    hostname: str
    gpu_name: str
    cpu_name: str
    cores: int
    rates: Rates | None = None
    probes: tuple[Probe, ...] = ()


prepare(Calibration)


def model_key(model: ModelSpec) -> str:
    """Names a shape, whatever its weights: a digest of its configuration and parameter table."""
    return _digest(model.parameters, str(model.config.get("model_type", "")))


@lru_cache(maxsize=64)
def _digest(blocks: object, model_type: str) -> str:
    return f"{model_type}-{hashlib.sha256(msgspec.json.encode(blocks)).hexdigest()[:12]}"


def empty(machine: Machine) -> Calibration:
    """That of a machine of which nothing is known yet."""
    gpu = machine.gpus[0].name if machine.gpus else ""
    return Calibration(hostname=machine.hostname, gpu_name=gpu, cpu_name=machine.cpu_name, cores=len(machine.online_cpus))


def folder() -> Path:
    return state_home() / "calibration"


def path_of(machine: Machine) -> Path:
    """The file of this machine, whether it exists or not."""
    mine = empty(machine)
    kind = hashlib.sha256(f"{mine.gpu_name}\0{mine.cpu_name}\0{mine.cores}".encode()).hexdigest()[:8]
    return folder() / f"{re.sub(r'[^A-Za-z0-9.-]', '_', mine.hostname)}-{kind}.json"


def calibration_of(machine: Machine) -> Calibration | None:
    """What is known of this machine, else of another of its kind; None when nothing is. An unreadable file counts as none."""
    own = path_of(machine)
    if (found := kept.read(own, Calibration)) is not None:
        return found
    mine = empty(machine)
    same_kind = (kept.read(path, Calibration) for path in sorted(folder().glob(f"*-{own.stem[-8:]}.json")))
    alike = (mine.gpu_name, mine.cpu_name, mine.cores)
    return next((other for other in same_kind if other and (other.gpu_name, other.cpu_name, other.cores) == alike), None)


def store(machine: Machine, *, rates: Rates | None = None, probe: Probe | None = None) -> Path:
    """Add to what is known of this machine; a probe replaces the one of the same model, mode, ranks and settings. Raises OSError."""
    path = path_of(machine)
    known = kept.read(path, Calibration) or empty(machine)
    if rates is not None:
        known = replace(known, rates=rates)
    if probe is not None:
        same = (probe.model, probe.mode, probe.ranks, probe.settings)
        others = tuple(old for old in known.probes if (old.model, old.mode, old.ranks, old.settings) != same)
        known = replace(known, probes=(*others, probe))
    return kept.write(path, known)


def speed_of(machine: Machine, gpu_name: str, known: Calibration | None) -> Speed | None:
    """The machine's own rates, filled up with those published for its GPU; None where that leaves any of them unknown.

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
        "peer_bytes_per_s": rates.peer_bytes_per_s,
        "layer_launch_overhead_s": rates.layer_launch_overhead_s,
        "layer_launch_overhead_by_ranks": rates.layer_launch_overhead_by_ranks,
        "adam": rates.adam or None,
        "adam_together": rates.adam_together,
        "node_bytes_per_s": slowest,
    }
    own = {name: value for name, value in measured.items() if value is not None}
    missing = measured.keys() - own.keys() - ({"peer_bytes_per_s"} if len(machine.gpus) < 2 else set())
    where = "here" if known.hostname == machine.hostname else f"on {known.hostname}, a machine like this one"
    source = f"{CALIBRATED} {where} on {rates.measured[:10]}"
    if published is None:
        # One GPU has no peer; where more machines like it are imagined, memory alone counts.
        return None if missing else Speed(**{"peer_bytes_per_s": own["h2d_bytes_per_s"]} | own, source=source)
    if missing:
        source += f", the rest {published.source}"
    return replace(Speed(**{name: getattr(published, name) for name in Speed.__struct_fields__}), **own, source=source)
