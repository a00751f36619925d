"""A RunSpec on a Machine: whether it fits, how fast it will be, and which mode and ratio to take.

Pure functions. They raise InputError for a model that is not described well enough (``model.config``, ``model.parameters``); everything
that speaks against running a described model is a reason in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from so_tui.machine.types import Machine
from so_tui.model.activations import policy_of
from so_tui.model.architecture import architecture
from so_tui.model.flops import flops_of, idle_parameters, model_flops
from so_tui.model.layout import state_layout
from so_tui.plan.advice import impossible, remedies, roomier, warnings
from so_tui.plan.assess import Assessment, assess, in_mode, mode_without_gpu
from so_tui.plan.binding import whole_gpus
from so_tui.plan.explain import REPEATS, explained, larger_steps
from so_tui.plan.memory import OUTSIDE_ALLOCATOR
from so_tui.plan.search import ALIKE, fastest, fastest_policy, rate, with_fitting_cores, with_policy
from so_tui.plan.site import Gpus, Site, bindings, other_site, rank_counts, site_of
from so_tui.plan.types import Mode, Plan, PlanRow, Workload
from so_tui.plan.verdict import EACH_GPU, alike, gib, in_words
from so_tui.plan.workload import seen
from so_tui.spec.errors import InputError
from so_tui.spec.types import Preset, RunSpec


def make_plan(spec: RunSpec, machine: Machine, *, workload: Workload | None = None, probed: bool = True) -> Plan:
    """The spec as given. What it leaves open is decided: mode ``auto`` becomes ``gpu`` when that fits with a margin and is faster, else
    ``superoffload`` at the spec's ratio; recomputing ``auto`` becomes the fastest that fits.

    ``workload``: what is known of the data; else what was seen of it, else a probe's of this model, else full sequences. ``probed``:
    whether probes of this model on this machine correct the prediction.
    """
    site = _site_for(spec, machine, workload)
    if not probed:
        site = replace(site, probes=())
    found, choices = _decided(spec, site)
    return _plan(spec, site, found, (*choices, *_recomputing(spec, site, found)))


def _site_for(spec: RunSpec, machine: Machine, workload: Workload | None = None) -> Site:
    """The site that the spec asks for, with what is known of its data."""
    known = seen(spec) if workload is None else None
    site = site_of(machine, spec.gpus, spec.offload.cpu_adam_cores_fraction)
    return replace(site, workload=known.workload if known else workload)


def _decided(spec: RunSpec, site: Site) -> tuple[Assessment, tuple[str, ...]]:
    if spec.offload.mode != "auto":
        return fastest_policy(spec, site), ()
    if not site.has_gpu:
        mode = mode_without_gpu(spec)
        return fastest_policy(in_mode(spec, mode), site), (f"auto is {mode} on a machine without GPUs",)
    offloaded = fastest_policy(in_mode(spec, "superoffload"), site)
    if site.gpu_memory_unknown:
        return offloaded, ("auto is superoffload here: the GPU's memory is not known",)
    on_gpu = fastest_policy(in_mode(spec, "gpu"), site)
    if on_gpu.verdict == "fits" and (offloaded.verdict != "fits" or rate(on_gpu) >= rate(offloaded)):
        return on_gpu, ("auto is gpu here: everything fits on the GPU, and offloading would only add time",)
    if on_gpu.verdict == "fits":
        return offloaded, ("auto is superoffload here: the room it makes on the GPU saves more recomputing than the offload costs",)
    if on_gpu.verdict == "tight" and offloaded.verdict == "does not fit":
        return on_gpu, (f"auto is gpu here: at ratio {spec.offload.ratio:.2f} {_first_shortage(offloaded)}",)
    return offloaded, (f"auto is superoffload here: without offload {_first_shortage(on_gpu)}",)


def recommend(spec: RunSpec, machine: Machine, gpus: int | None = None) -> Plan:
    """The fastest settings that fit on this machine with a margin, on ``gpus`` GPUs or as many as the spec says; each with its reason.

    Chosen are mode, ratio, recomputing, micro-batch with accumulation, and the cores of CPU Adam.
    Tokens of a step and sequence length stay.
    """
    wanted = spec if gpus is None else replace(spec, gpus=gpus)
    plan, site, chosen = _recommended(wanted, machine)
    advice = roomier(chosen.spec, site) if plan.verdict == "tight" else larger_steps(wanted, site, chosen)
    return replace(plan, warnings=(*plan.warnings, *advice))


def _recommended(wanted: RunSpec, machine: Machine) -> tuple[Plan, Site, Assessment]:
    site = _site_for(wanted, machine)
    chosen, tried = fastest(wanted, site)
    with_cores = with_fitting_cores(chosen, site)
    if with_cores is not chosen.spec:
        site = other_site(site, site.gpus, with_cores.offload.cpu_adam_cores_fraction)
        chosen = assess(with_cores, site)
    reasons = tuple(explained(wanted, site, chosen, tried))
    plan = _plan(chosen.spec if chosen.verdict != "does not fit" else wanted, site, chosen, reasons, searched=True)
    return replace(plan, recommended=plan.verdict == "fits"), site, chosen


def plan_table(presets: Sequence[Preset], machine: Machine, gpu_counts: Sequence[int] = ()) -> tuple[PlanRow, ...]:
    """The recommended plan of every preset on every GPU count, by default ``rank_counts``. In each row the count with the most tokens/s
    per GPU is marked, or the smallest of those that are alike.

    Presets of which nothing can be said (``unplannable``) are left out.
    """
    counts = gpu_counts or rank_counts(machine)
    return tuple(_row(preset.spec, machine, counts) for preset in presets if not unplannable(preset.spec))


def unplannable(spec: RunSpec) -> str:
    """Why nothing can be said of a model: its shape or its parameters are not known. Empty where they are."""
    try:
        state_layout(spec, 1)
        architecture(spec.model.config)
    except InputError as error:
        return str(error.problems[0])
    return ""


def plans_json(plans: Iterable[Plan]) -> dict[str, Any]:
    """What ``plan --json`` prints: plain values; of the spec only what a plan chooses (``presets`` and run directories have the rest)."""
    rows = []
    for plan in plans:
        row = msgspec.to_builtins(plan, str_keys=True)
        del row["spec"]
        row["settings"] = settings_of(plan.spec)
        rows.append(row)
    return {"plans": rows}


def settings_of(spec: RunSpec) -> dict[str, str | int | float]:
    """What a plan chooses, by the keys that set it."""
    return {
        "offload.mode": spec.offload.mode,
        "offload.ratio": spec.offload.ratio,
        "offload.cpu_adam_cores_fraction": spec.offload.cpu_adam_cores_fraction,
        "model.activation_checkpointing": spec.model.activation_checkpointing,
        "train.micro_batch": spec.train.micro_batch,
        "train.gradient_accumulation": spec.gradient_accumulation_steps,
    }


def command_of(plan: Plan, given: RunSpec, preset: str, gpus: Gpus) -> str:
    """The command that runs a plan whose settings are not all those of ``given``, the preset that was named.

    ``gpus``: those that were planned for, in the words of who asked for them; a count of them may be others by the time it runs.
    """
    before, after = settings_of(given), settings_of(plan.spec)
    if plan.spec.train.tokens_per_step:
        del after["train.gradient_accumulation"]  # follows from the target
    if plan.mode == "gpu":
        del after["offload.ratio"], after["offload.cpu_adam_cores_fraction"]
    wanted = str(gpus) if isinstance(gpus, int) else ",".join(map(str, gpus)) + ("," if len(gpus) == 1 else "")
    chosen = "" if gpus == given.gpus else f" --gpus {wanted}"
    return f"so-tui run {preset}{chosen}" + "".join(f" --set {key}={value}" for key, value in after.items() if before[key] != value)


def _row(spec: RunSpec, machine: Machine, gpu_counts: Sequence[int]) -> PlanRow:
    cells = {count: replace(_recommended(replace(spec, gpus=count), machine)[0], recommended=False) for count in gpu_counts}
    marked = _best_count(cells)
    if marked is not None:
        cells[marked] = replace(cells[marked], recommended=True)
    return PlanRow(
        preset=spec.name,
        title=spec.label,
        parameters=spec.model.parameter_count,
        active_parameters=spec.model.parameter_count - idle_parameters(spec.model.parameters, architecture(spec.model.config)),
        sequence_length=spec.data.sequence_length,
        cells=cells,
    )


def _best_count(cells: dict[int, Plan]) -> int | None:
    """The GPU count to recommend: of those that fit, most tokens/s per GPU; the fewest GPUs where speeds are not known or alike.

    What is tight is never recommended: the margin is there because some terms are estimates.
    """
    rates = {count: (plan.useful_tokens_per_s_total or 0.0) / count for count, plan in cells.items() if plan.verdict == "fits"}
    return min((count for count, found in rates.items() if found >= (1 - ALIKE) * max(rates.values())), default=None)


def _plan(spec: RunSpec, site: Site, found: Assessment, choices: Sequence[str], *, searched: bool = False) -> Plan:
    offload = found.spec.offload
    blocked = (*impossible(spec, site.machine), *((site.problem,) if site.problem else ()))
    fits = not blocked and found.verdict != "does not fit"
    sequences = site.ranks * spec.train.micro_batch * spec.gradient_accumulation_steps
    tokens = sequences * spec.data.sequence_length
    mends = tuple(remedies(spec, site, searched=searched)) if found.verdict == "does not fit" and not blocked else ()
    step = None if blocked else found.step
    disk = sum(term.bytes for term in found.terms if term.place == "disk")
    return Plan(
        preset=spec.name,
        gpus=site.ranks,
        mode=cast(Mode, offload.mode),
        ratio=offload.ratio,
        fits=fits,
        verdict=found.verdict if fits else "does not fit",
        possible=not blocked,
        reasons=(*blocked, *_verdict_reasons(site, found, bool(blocked)), *mends, *((*choices, *_accumulation(spec)) if fits else ())),
        remedies=mends,
        warnings=tuple(warnings(spec, site, found, searched=searched)),
        shortage=found.shortages[0] if found.shortages else None,
        gpu_bytes=found.demand.gpu_bytes,
        gpu_reserved_bytes=sum(term.bytes for term in found.terms if term.place == "gpu" and term.name not in OUTSIDE_ALLOCATOR),
        gpu_capacity_bytes=site.supply.gpu_bytes,
        host_bytes_per_node=found.demand.node_bytes,
        host_capacity_bytes_per_node=site.supply.node_bytes,
        shm_bytes=found.demand.shm_bytes,
        disk_bytes=disk,
        disk_peak_bytes=spec.checkpoint.most_at_once * disk,
        breakdown=found.terms,
        step=step,
        step_s=step.total_s if step else None,
        tokens_per_step=tokens,
        useful_tokens_per_s_total=tokens * found.workload.useful_share / step.total_s if step else None,
        model_tflops_per_gpu=_tflops(spec, sequences, step.total_s, site.ranks) if step else None,
        speed_source=_source(found, site) if step else "",
        binding=() if site.problem else bindings(site.machine, site.gpus, offload.mode, offload.cpu_adam_cores_fraction),
        spec=_resolved(found.spec, site),
    )


def _accumulation(spec: RunSpec) -> Iterator[str]:
    """What became of a target of tokens per optimizer step, rounding included."""
    if target := spec.train.tokens_per_step:
        once = spec.ranks * spec.train.micro_batch * spec.data.sequence_length
        reached = spec.gradient_accumulation_steps * once
        accumulation = spec.gradient_accumulation_steps
        yield f"accumulation {accumulation} comes nearest to {target:,} tokens a step: {reached:,}, {once:,} in each micro-step"


def _source(found: Assessment, site: Site) -> str:
    source = site.speed.source if site.speed else ""
    source += f"; {_data(found.workload)}"
    return f"{source}; corrected by a probe of this model here" if found.probed else source


def _data(workload: Workload) -> str:
    if workload == Workload():
        return "for whole sequences with every token trained, the most that data can cost"
    return f"for documents of {workload.attended_tokens:.0f} tokens, {workload.trained_share:.0%} of all trained, as seen of the data"


def _resolved(spec: RunSpec, site: Site) -> RunSpec:
    """The spec as it will run: with host indices for a mere count of GPUs, and nothing left to choose."""
    spec = with_policy(spec, policy_of(spec.model))
    if site.problem or not site.has_gpu or not isinstance(spec.gpus, int):
        return spec
    return replace(spec, gpus=tuple(gpu.index for gpu in whole_gpus(site.machine)[: spec.gpus]))


def _tflops(spec: RunSpec, sequences: int, step_s: float, ranks: int) -> float:
    length = spec.data.sequence_length
    return model_flops(flops_of(spec.model), sequences * length, [length] * sequences) / step_s / ranks / 1e12


def _verdict_reasons(site: Site, found: Assessment, blocked: bool) -> tuple[str, ...]:
    short = tuple(in_words(shortage) for shortage in found.shortages)
    if found.verdict == "does not fit":
        return short
    if blocked:
        return ()
    return (*short, _summary(found, site))


def _summary(found: Assessment, site: Site) -> str:
    parts = []
    if found.demand.gpu_bytes:
        of = f" of {gib(site.supply.gpu_bytes)}" if site.supply.gpu_bytes else ""
        parts.append(f"{gib(found.demand.gpu_bytes)}{of} on {EACH_GPU}")
    # The number of a node comes last: before an amount it would read as a part of it.
    parts += [f"{gib(needs)} of {gib(has)} on {nodes}" for nodes, needs, has in alike(found.demand, site.supply)]
    return "needs " + "; ".join(parts)


def _recomputing(spec: RunSpec, site: Site, found: Assessment) -> tuple[str, ...]:
    if spec.model.activation_checkpointing != "auto" or site.speed is None:
        return ()
    return (f"activation checkpointing auto is {found.spec.model.activation_checkpointing} here: {REPEATS[policy_of(found.spec.model)]}",)


def _first_shortage(found: Assessment) -> str:
    return in_words(found.shortages[0]) if found.shortages else "it fits"
