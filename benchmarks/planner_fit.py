"""From measured rows to the planner's constants, and to tables."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgspec
from msgspec.structs import replace

from benchmarks.planner_settings import WITH_LESS
from so_tui.launch.probe import Measured
from so_tui.machine.types import Machine
from so_tui.model.profile import profile_of
from so_tui.plan import rates
from so_tui.plan.fit import Target, assess
from so_tui.plan.host_memory import gradient_blocks, steady_bytes
from so_tui.plan.measured import Figures
from so_tui.plan.plan import GPU_MARGIN
from so_tui.plan.rates import PATH, Constants, Speed, constants, published_speed
from so_tui.plan.resources import Resources, resources_of
from so_tui.plan.terms import OUTSIDE_ALLOCATOR, MemoryTerm
from so_tui.runs.records import MetricRecord, PhaseRecord, Sample
from so_tui.spec import RunSpec, check_tree, with_values

MEMORY = (
    "block_share",
    "slack_share",
    "stream_pool_share",
    "cuda_context_bytes",
    "offload_context_bytes",
    "nccl_bytes",
    "cuda_process_bytes",
    "shared_libraries_bytes",
    "nccl_host_bytes",
    "nccl_peer_host_bytes",
    "after_loading_bytes",
    "launcher_bytes",
)
STEP = (
    "matrix_efficiency",
    "elementwise_bytes_per_flop",
    "loss_bytes_per_logit",
    "forward_launches_per_layer",
    "backward_launches_per_layer",
    "gpu_step_bytes_per_parameter",
    "gpu_step_tensor_s",
    "clipped_adam_share",
    "norm_s",
    "weight_copy_latency_s",
    "zerooffload_copies",
    "zerooffload_step_bytes",
    "other_s",
    "all_gather_share",
    "all_gather_launches_per_layer",
)
RESULTS = Path(__file__).with_name("results") / "planner-h200.json"
"""Rows that the constants rest on, of this benchmark and of others in its form (``label`` says of
which, and what is special); every fit of memory rests on them too. 0: not measured;
``since_changed`` names the figures that the program's own changes have made obsolete, ``missed``
those that the constants do not meet.
"""
CHECKED = RESULTS.with_name("planner-check-h200.json")
"""Rows of the set ``check``, on which no constant rests: what leads to a change moves to the
others. ``since_planned_otherwise`` names the figures that today's constants predict nearer to what
was measured, ``since_refitted`` those that they predict a little otherwise (steps by at most 4 %)
since attention has rates of its own and what recomputation leaves out is left out.
"""
_UNDER = 4.0
"""How much worse too little memory is than too much, in the fit: too little ends a run."""
_LEAST_GAIN = 1e-8
"""The fit ends when less is gained than the square of a hundredth of a percent; most of its time
would go into gains that no plan shows.
"""


class LoadFigures(Figures, frozen=True, kw_only=True):
    """Figures of a setting, with host memory while it loads."""

    host_load_bytes: int = 0
    """Most before the first step; 0 where it was not measured."""


class LoadMeasured(Measured, frozen=True, kw_only=True):
    figures: LoadFigures


@dataclass(frozen=True)
class Case:
    """A measured row, ready to be predicted again."""

    spec: RunSpec
    resources: Resources
    measured: LoadMeasured


def case_of(row: dict[str, Any]) -> Case:
    machine = msgspec.convert(row["machine"], Machine, strict=False)
    # Rows say what differs from the defaults, and some have changed since: these are the ones of
    # that time.
    then = {"checkpoint.every_minutes": "0"} | row.get("defaults", {})
    spec = with_values(check_tree(row["spec"]), then)
    resources = resources_of(machine, spec.gpus, spec.offload.cpu_adam_cores_fraction)
    measured = msgspec.convert(row["measured"], LoadMeasured)
    obsolete = dict.fromkeys(row.get("since_changed", ()), 0)
    measured = replace(measured, figures=replace(measured.figures, **obsolete))
    return Case(spec, dataclasses.replace(resources, speed=_speed(machine, row["speed"])), measured)


def _speed(machine: Machine, noted: dict[str, Any] | None) -> Speed | None:
    """The machine's rates: its own where they were calibrated when it was measured, filled up with
    those published for its GPU today.
    """
    published = published_speed(machine.gpus[0].name) if noted and machine.gpus else None
    if published is None or noted is None or not noted.get("calibrated"):
        return published
    return msgspec.convert(msgspec.to_builtins(published) | noted, Speed)


def load_bytes(spec: RunSpec, terms: Sequence[MemoryTerm], ranks: int) -> int:
    """Return the peak host memory of a run of ``ranks`` on one host before its first step, launcher
    included.

    DeepSpeed's optimizers allocate their moments in that step, ours before. NCCL's memory comes
    with the first collectives.
    """
    node = [found for found in terms if found.location == "node"]
    kinds = {found.kind for found in node}
    partition = sum(found.bytes for found in node if found.kind == "gradient-partition")
    later = {"saving", "nccl-on-host"}
    if not spec.offload.own_engine:
        later |= {"moments", *({"loading"} if partition else ())}
    allocating = 0
    if partition and "libraries" in kinds:  # without CUDA nothing is copied into pinned memory
        layout = profile_of(spec.model).layout(ranks, spec.offload)
        allocating, _ = gradient_blocks(layout, partition, "pinned-rounding" in kinds)
    each = sum(
        found.bytes * (ranks if found.rank is None else 1)
        for found in node
        if found.kind not in later
    )
    return allocating * ranks + each


def load_peak_bytes(records: Sequence[MetricRecord], samples: Sequence[Sample]) -> int:
    """Return the most host memory that a run's processes had before its first step."""
    # The first step's own record does not mark its start: it is written late, after the memory of
    # all processes was measured.
    began = (
        record.time
        for record in records
        if isinstance(record, PhaseRecord) and record.phase == "training"
    )
    training = next(began, math.inf)
    before = (sample.run_memory_peak_bytes or 0 for sample in samples if sample.time < training)
    return max(before, default=0)


def predicted(case: Case) -> LoadFigures:
    """With the constants of the moment, for the data that was trained on."""
    resources = case.resources
    target = Target(
        profile=profile_of(case.spec.model), resources=resources, workload=case.measured.workload
    )
    found = assess(case.spec, target)
    on_gpu = [term for term in found.terms if term.location == "gpu"]
    return LoadFigures(
        step_s=found.step.total_s if found.step else 0.0,
        forward_s=found.step.forward_s if found.step else 0.0,
        backward_s=found.step.backward_s if found.step else 0.0,
        exposed_optimizer_s=found.step.exposed_optimizer_s if found.step else 0.0,
        gpu_reserved_bytes=sum(term.bytes for term in on_gpu if term.kind not in OUTSIDE_ALLOCATOR),
        gpu_device_bytes=sum(term.bytes for term in on_gpu),
        host_bytes=steady_bytes(found.terms, resources.ranks),
        host_load_bytes=load_bytes(found.spec, found.terms, resources.ranks),
    )


def fit(rows: Sequence[dict[str, Any]], source: str) -> str:
    """Rewrite ``constants.json`` for the rows of the set ``fit`` and the kept ones; returns what
    changed, as text.
    """
    own = [row for row in rows if row["set"] == "fit" and "measured" in row]
    if len(own) < 6:
        return f"only {len(own)} settings of the set `fit` are measured; a fit needs at least 6"
    keys = {row["key"] for row in own}
    kept = [row for row in json.loads(RESULTS.read_text()) if row["key"] not in keys]
    used = [*own, *kept]
    best = fitted([case_of(row) for row in own], [case_of(row) for row in kept])
    gpus = sorted({gpu["name"] for row in used for gpu in row["machine"]["gpus"]} or {"no GPU"})
    torch = sorted({str(row["machine"]["software"]["torch"]) for row in used})
    settings = (
        f"{len(own)} settings of {source} and, for memory, the {len(used) - len(own)} kept beside "
        "this benchmark"
    )
    text = f"Fitted to {settings}, measured on {', '.join(gpus)} with torch {', '.join(torch)}"
    provenance = f"{text}, by benchmarks/planner.py --fit."
    before = constants()
    best = replace(
        best,
        memory=replace(best.memory, provenance=provenance, fitted=True),
        step=replace(best.step, provenance=provenance, fitted=True),
    )
    PATH.write_text(dumped(best))
    changes = [
        (
            f"{section}.{name}: {getattr(getattr(before, section), name):.4g} -> "
            f"{getattr(getattr(best, section), name):.4g}"
        )
        for section, names in (("memory", MEMORY), ("step", STEP))
        for name in names
    ]
    return "\n".join([provenance, *changes])


def fitted(cases: Sequence[Case], kept: Sequence[Case] = ()) -> Constants:
    """The constants with the least error over these cases, each group by itself. ``kept``: for
    memory alone, since their machine's rates may have been published ones, and what is fitted are
    shares of the rates.
    """
    start = constants()
    memory = _descend(start, "memory", MEMORY, lambda: sum(map(_memory_error, [*cases, *kept])))
    with_speed = [case for case in cases if case.resources.speed is not None]
    return (
        _descend(memory, "step", STEP, lambda: sum(map(_step_error, with_speed)))
        if with_speed
        else memory
    )


def _memory_error(case: Case) -> float:
    told, found = predicted(case), case.measured.figures
    error = _off(told.gpu_reserved_bytes, found.gpu_reserved_bytes, _UNDER)
    # What is beside the allocator by itself: contexts are not to make up for what the other terms
    # miss.
    beside = told.gpu_device_bytes - told.gpu_reserved_bytes
    error += _off(found.gpu_reserved_bytes + beside, found.gpu_device_bytes, _UNDER)
    return (
        error
        + _off(told.host_bytes, found.host_bytes, 1.0)
        + _off(told.host_load_bytes, found.host_load_bytes, 1.0)
    )


def _step_error(case: Case) -> float:
    told, found = predicted(case), case.measured.figures
    error = _off(told.step_s, found.step_s, 1.0) + 0.5 * _off(
        told.backward_s, found.backward_s, 1.0
    )
    if case.spec.offload.own_engine:
        # These rows are older than the present division of a step: waits for weights that the GPU's
        # work hid count as the optimizer's.
        return error + 0.5 * _off(
            told.forward_s + told.exposed_optimizer_s,
            found.forward_s + found.exposed_optimizer_s,
            1.0,
        )
    error += 0.5 * _off(told.forward_s, found.forward_s, 1.0)
    return error + ((told.exposed_optimizer_s - found.exposed_optimizer_s) / found.step_s) ** 2


def _off(told: float, found: float, under: float) -> float:
    """Square of the relative error; ``under`` times as bad below the truth. 0 where nothing was
    measured.
    """
    if not found:
        return 0.0
    error = told / found - 1
    return error * error * (under if error < 0 else 1.0)


def _descend(
    start: Constants, section: str, names: Iterable[str], error: Callable[[], float]
) -> Constants:
    """Coordinate by coordinate, up and down by a factor that shrinks: few, nearly independent
    figures need no more.
    """
    names = tuple(names)

    def cost(candidate: Constants) -> float:
        with patch.object(rates, "SHIPPED", candidate):
            return error()

    def moved(candidate: Constants, name: str, factor: float) -> Constants:
        old = getattr(getattr(candidate, section), name)
        new = int(old * factor) if isinstance(old, int) else old * factor
        return replace(candidate, **{section: replace(getattr(candidate, section), **{name: new})})

    best, lowest, stride = start, cost(start), 1.4
    while stride > 1.005:
        improved = False
        for name in names:
            for factor in (stride, 1 / stride):
                candidate = moved(best, name, factor)
                if (found := cost(candidate)) < lowest - _LEAST_GAIN:
                    best, lowest, improved = candidate, found, True
        if not improved:
            stride = 1 + (stride - 1) / 2
    return best


def dumped(found: Constants) -> str:
    """As the file is kept: one figure a line, points of a curve in one."""
    tree = msgspec.to_builtins(found)
    for kind in tree["machines"]:
        del kind["calibrated"]
    for section in ("memory", "step"):
        tree[section] = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in tree[section].items()
        }
    text = json.dumps(tree, indent=1)
    return re.sub(r"\[\s+([-\d.e+]+),\s+([-\d.e+]+)\s+\]", r"[\1, \2]", text) + "\n"


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Both sets: what constants rest on as they predict it today, the check as it was predicted
    when it was measured.
    """
    parts = []
    for name in ("fit", "check"):
        done = [row for row in rows if row["set"] == name and "measured" in row]
        if done:
            compared = [(row, *_told_and_found(row)) for row in done]
            parts += [
                f"### Set `{name}`: {len(done)} settings",
                "",
                *_table(compared),
                "",
                _summary(compared),
                "",
            ]
    failed = [row for row in rows if "error" in row]
    parts += [
        (
            f"- not measured: {row['setting']['size']} x {row['setting']['gpus']} {row['name']}: "
            f"{row['error']}"
        )
        for row in failed
    ]
    return "\n".join(parts)


_COLUMNS = (
    ("reserved", "gpu_reserved_bytes", 1e9),
    ("device", "gpu_device_bytes", 1e9),
    ("host", "host_bytes", 1e9),
    ("host while loading", "host_load_bytes", 1e9),
    ("step", "step_s", 1.0),
)


Compared = tuple[dict[str, Any], LoadFigures, LoadFigures]
"""A row, what is planned of it, and what was measured."""


def _table(rows: Sequence[Compared]) -> list[str]:
    lines = [
        (
            "| model | GPUs | setting | GPU reserved, GB | GPU device, GB | host, GB | host while "
            "loading, GB | step, s |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, told, found in sorted(
        rows,
        key=lambda each: (each[0]["setting"]["gpus"], each[0]["setting"]["size"], each[0]["name"]),
    ):
        cells = [
            _cell(getattr(told, key) / unit, getattr(found, key) / unit)
            for _, key, unit in _COLUMNS
        ]
        clipping = "" if row["setting"].get("clipping", 1.0) else ", no clipping"
        label = f" ({row['label']})" if row["label"] else ""
        lines.append(
            f"| {row['setting']['size']} | {row['setting']['gpus']} | "
            f"{row['name']}{clipping}{label} | " + " | ".join(cells) + " |"
        )
    return [*lines, "", "Each cell: predicted / measured (error)."]


def _told_and_found(row: dict[str, Any]) -> tuple[LoadFigures, LoadFigures]:
    case = case_of(row)
    told = (
        msgspec.convert(row["predicted"], LoadFigures) if row["set"] == "check" else predicted(case)
    )
    return told, case.measured.figures


def _cell(told: float, found: float) -> str:
    return f"{told:.2f} / {found:.2f} ({told / found - 1:+.1%})" if found else ""


def _summary(rows: Sequence[Compared]) -> str:
    texts = []
    for (name, key, _), limit in zip(_COLUMNS, (0.05, 0.05, 0.05, 0.05, 0.15), strict=True):
        pairs = [(getattr(told, key), getattr(found, key)) for _, told, found in rows]
        errors = [told / found - 1 for told, found in pairs if found]
        if errors:
            within = sum(abs(error) <= limit for error in errors)
            texts.append(
                f"{name} within {limit:.0%} on {within} of {len(errors)}, at worst "
                f"{min(errors):+.1%} and {max(errors):+.1%}"
            )
    digests = sorted(
        {row["constants"] if row["set"] == "check" else "of today" for row, _, _ in rows}
    )
    return "; ".join(texts) + f". Constants {', '.join(digests)}."


def sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """Fastest first, with the recommended and the original setting marked. Ratios that keep the
    same sub-groups on the GPU are one and the same work: comparisons below the table take the
    median of those.
    """
    done = [row for row in rows if row["set"] == "sweep" and "measured" in row]
    if not done:
        return "nothing measured yet"
    rates = {row["key"]: _rate(row) for row in done}
    done.sort(key=lambda row: rates[row["key"]], reverse=True)
    alike: dict[str, list[float]] = {}
    for row in done:
        alike.setdefault(_work(row), []).append(rates[row["key"]])

    def usual(row: dict[str, Any]) -> float:
        return median(alike[_work(row)])

    lines = [
        (
            "| setting | core fraction | useful tokens/s | of the best | step predicted / "
            "measured, s | |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for row in done:
        told, found = row["predicted"]["step_s"], row["measured"]["figures"]["step_s"]
        label = f"**{row['label']}**" if row["label"] else ""
        rate, best = rates[row["key"]], rates[done[0]["key"]]
        lines.append(
            f"| {row['name']} | {row['setting']['cores']} | {rate:.0f} | {rate / best:.1%} | "
            f"{told:.2f} / {found:.2f} | {label} |"
        )
    named = {label: row for row in done for label in row["label"].split(", ") if label}
    if "recommended" in named and "original" in named:
        times = usual(named["recommended"]) / usual(named["original"])
        lines += ["", f"The recommendation is {times:.2f} x as fast as the original setting."]
    for label, row in named.items():
        if found := re.fullmatch(WITH_LESS.replace("{:g}", "(.+)"), label):
            fitting = [
                other
                for other in done
                if _device_bytes(other) <= (1 - GPU_MARGIN) * float(found[1]) * 2**30
            ]
            fastest = max(
                fitting, key=lambda other: (usual(other), other is row), default=row
            )  # of equals, this one
            share = usual(row) / usual(fastest)
            lines += [
                "",
                (
                    f"{label[0].upper()}{label[1:]}: {row['name']}, {share:.1%} of the fastest "
                    f"that fits there, {fastest['name']}."
                ),
            ]
    return "\n".join(lines)


def _rate(row: dict[str, Any]) -> float:
    """Useful tokens/s."""
    setting, found = row["setting"], row["measured"]
    length = check_tree(row["spec"]).data.sequence_length
    positions = setting["gpus"] * setting["micro_batch"] * setting["accumulation"] * length
    return float(positions * found["workload"]["useful_share"] / found["figures"]["step_s"])


def _work(row: dict[str, Any]) -> str:
    """A setting without its ratio, which shows in the memory that is planned, if in anything."""
    planned = {name: size for name, size in row["predicted"].items() if name.endswith("_bytes")}
    return json.dumps(row["setting"] | {"ratio": 0.0} | planned, sort_keys=True)


def _device_bytes(row: dict[str, Any]) -> float:
    """What the allocator reserved, as measured, and what is planned beside it."""
    told = row["predicted"]
    return float(
        row["measured"]["figures"]["gpu_reserved_bytes"]
        + told["gpu_device_bytes"]
        - told["gpu_reserved_bytes"]
    )
