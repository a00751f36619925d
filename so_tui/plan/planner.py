"""A RunSpec on a Machine: whether it fits, how fast it will be, and which settings to choose.

Pure functions. They raise InputError for a model that is not described well enough
(``model.config``, ``model.parameters``); whatever else speaks against a run is a reason in its
plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from msgspec.structs import replace

from so_tui.machine.types import Machine
from so_tui.model.flops import idle_parameters, model_flops
from so_tui.model.profile import MLP_TILE_TOKENS, offloaded_bytes, profile_of
from so_tui.plan.fit import Assessment, node_needs, target_of
from so_tui.plan.measured import correcting, tells_computing
from so_tui.plan.notes import (
    AttentionFallsBack,
    AutoCheckpointing,
    Caution,
    Choice,
    FasterWithout,
    GpusChosen,
    InputsOnHost,
    MemoryNeeded,
    MlpTiled,
    Need,
    OneMemory,
    Remedy,
    SavesBehind,
    SavesEvery,
    SettingsReplaced,
    StepsEarly,
    TokensReached,
    WeightsOnHost,
)
from so_tui.plan.plan import OptionalMemory, Plan, PlanRow
from so_tui.plan.rates import Speed, SpeedSource, clearly_faster, step_error
from so_tui.plan.reasons import across_hosts, blockers, cautions, choices
from so_tui.plan.remedies import gpus_with_margin, remedies
from so_tui.plan.resources import as_read, attention_of, rank_counts
from so_tui.plan.saving import affordable_minutes, checkpoint_cost_s, with_wanted_saving
from so_tui.plan.search import (
    SEARCHED,
    VERDICTS,
    best_settings,
    changes_of,
    decided_settings,
    larger_steps,
    left_open,
    released,
    with_fitting_cores,
    with_policy,
)
from so_tui.plan.step_time import can_speculate, second_states_bytes
from so_tui.plan.terms import OUTSIDE_ALLOCATOR, TERM_NAMES
from so_tui.plan.workload import Workload
from so_tui.spec.errors import InputError
from so_tui.spec.run_spec import (
    MACHINE_DECIDES,
    MachineDecided,
    Preset,
    RunSpec,
)


def make_plan(
    spec: RunSpec, machine: Machine, *, workload: Workload | None = None, probed: bool = True
) -> Plan:
    """Plan the spec as given, and decide only what it leaves open.

    Mode ``auto`` becomes ``gpu`` when that fits with a margin and is about as fast or faster, else
    ``superoffload`` at the spec's ratio. Activation checkpointing ``auto`` becomes the fastest that
    fits. Feed-forward blocks are cut into tiles, and layer inputs and weights move to the host,
    where nothing fits otherwise.

    Args:
        spec: What to run.
        machine: Where.
        workload: What is known of the data; else what was seen of it, else a probe's of this model,
            else full sequences.
        probed: Whether probes of this model on this machine correct the prediction.
    """
    spec = with_wanted_saving(as_read(spec, machine))
    target = target_of(spec, machine, workload=workload, probed=probed)
    found = decided_settings(spec, target)
    decided: list[Choice] = [*found.why]
    if spec.model.activation_checkpointing == "auto" and target.resources.speed is not None:
        decided.append(AutoCheckpointing(policy=found.best.spec.model.policy))
    return _plan(spec, found.best, decided)


def recommend(spec: RunSpec, machine: Machine) -> Plan:
    """Return the plan of a spec with all that it leaves to the machine, each with its reason: the
    fastest settings that fit with a margin, or simpler ones that are about as fast.

    What a person set (``RunSpec.fixed``) stays, and so do the sequences of a step on each rank and
    their length. The number of GPUs is the spec's, or another with which it fits.
    """
    wanted = left_open(with_wanted_saving(as_read(spec, machine)))
    plans = {
        count: _Planned(_on_gpus(wanted, count), machine)
        for count in _counts(wanted, rank_counts(machine))
    }
    found = plans[_fitting_count(wanted, plans)]
    plan, chosen = found.plan, found.chosen
    if plan.gpus != wanted.ranks and plan.verdict == "fits":
        most = max(rank_counts(machine))
        there = GpusChosen(
            gpus=chosen.spec.ranks_per_host, given=wanted.ranks_per_host, available=most
        )
        plan = replace(plan, reasons=(*plan.reasons, there))
    slower = _slower_by_hand(wanted, chosen, machine)
    return replace(plan, warnings=(*plan.warnings, *slower, *found.advice))


def replan(spec: RunSpec, machine: Machine) -> Plan:
    """Return the plan of settings that were chosen before, for the machine where they are to run
    now. They stay where they fit; otherwise they are chosen again, for as many GPUs, and the plan
    says which changed. What was chosen for GPUs is never run without any.
    """
    kept = make_plan(spec, machine)
    if kept.fits or not (kept.possible or machine.gpus):
        return kept
    again = recommend(replace(spec, fixed=_with_gpus(spec.fixed)), machine)
    if not again.fits:
        return kept
    changes = changes_of(kept.spec, again.spec)
    why = SettingsReplaced(changes=changes, shortage=kept.shortage)
    here = replace(again.spec, fixed=spec.fixed)
    return replace(again, spec=here, warnings=(why, *again.warnings))


@dataclass(frozen=True)
class _Planned:
    """The best settings for one number of GPUs, planned when they are asked for."""

    wanted: RunSpec
    machine: Machine

    @cached_property
    def chosen(self) -> Assessment:
        return self._both[1]

    @cached_property
    def plan(self) -> Plan:
        return self._both[0]

    @cached_property
    def advice(self) -> tuple[Caution, ...]:
        """What a person may change: more GPUs where it is tight, else more tokens in a step."""
        chosen = self.chosen
        if self.plan.verdict == "tight":
            return tuple(gpus_with_margin(chosen.spec, chosen.target))
        return tuple(larger_steps(self.wanted, chosen))

    @cached_property
    def _both(self) -> tuple[Plan, Assessment]:
        wanted = self.wanted
        chosen, tried, _ = best_settings(wanted, target_of(wanted, self.machine))
        chosen = with_fitting_cores(chosen)
        reasons = tuple(choices(wanted, chosen, tried))
        spec = chosen.spec if chosen.fits else wanted
        plan = _plan(spec, chosen, reasons, searched=True)
        return replace(plan, recommended=plan.verdict == "fits"), chosen


def _on_gpus(wanted: RunSpec, count: int) -> RunSpec:
    """Return the spec for a number of GPUs; with its own indices where it names as many."""
    return wanted if count == wanted.ranks_per_host else replace(wanted, gpus=count)


def _counts(wanted: RunSpec, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of GPUs to choose from, in the order of preference: the spec's own, larger
    ones ascending, smaller ones descending.
    """
    own, shared = wanted.ranks_per_host, wanted.train.sequence_parallel
    if wanted.fixes("gpus"):
        return (own,)
    possible = [count for count in counts if count % shared == 0]
    here = (own,) if own <= max(counts) else ()
    larger = (count for count in possible if count > own)
    smaller = (count for count in reversed(possible) if count < own)
    return (*here, *larger, *smaller) or (own,)


def _fitting_count(wanted: RunSpec, plans: Mapping[int, _Planned]) -> int:
    """Return the first number of GPUs that leaves a margin, with fp32 moments if one does; else the
    first that fits; else the largest.
    """

    def merit(count: int) -> tuple[int, bool]:
        found = plans[count].chosen
        return VERDICTS[
            plans[count].plan.verdict
        ], found.spec.offload.states != wanted.offload.states

    best = None
    for count in plans:
        if (found := merit(count)) == (0, False):
            return count
        if best is None or found < best[0]:
            best = found, count
    assert best is not None
    (order, _), count = best
    return count if order < VERDICTS["does not fit"] else max(plans)


def _slower_by_hand(
    wanted: RunSpec, chosen: Assessment, machine: Machine
) -> Iterator[FasterWithout]:
    """Yield what a person set, and what would be chosen in its place, where that is faster."""
    fixed = [key for key in SEARCHED if key in wanted.fixed]
    if not fixed or not chosen.fits or not chosen.step:
        return
    free = released(chosen.spec, fixed)
    other = with_fitting_cores(best_settings(free, target_of(free, machine)).best)
    changes = [each for each in changes_of(chosen.spec, other.spec) if each.key in fixed]
    faster = other.verdict == "fits" and clearly_faster(other.rate, chosen.rate)
    if changes and faster and other.step:
        yield FasterWithout(
            changes=tuple(changes),
            step_s=chosen.step.total_s * chosen.rate / other.rate,
            given_step_s=chosen.step.total_s,
        )


def plan_table(
    presets: Sequence[Preset], machine: Machine, gpu_counts: Sequence[int] = (), nodes: int = 1
) -> tuple[PlanRow, ...]:
    """Return the plan of every preset on every GPU count, by default ``rank_counts``, of each of
    ``nodes`` hosts.

    In each row the number of GPUs is marked that ``recommend`` chooses. Presets that cannot be
    planned (``unplannable``) are left out.
    """
    counts = gpu_counts or rank_counts(machine)
    return tuple(
        _row(replace(preset.spec, nodes=nodes), machine, counts)
        for preset in presets
        if not unplannable(preset.spec)
    )


def unplannable(spec: RunSpec) -> str:
    """Return why a model cannot be planned: its shape or its parameters are not known. Empty where
    they are.
    """
    try:
        profile_of(spec.model)
    except InputError as error:
        return str(error.problems[0])
    return ""


def _row(spec: RunSpec, machine: Machine, gpu_counts: Sequence[int]) -> PlanRow:
    """Plan a spec on each GPU count. Those that differ from the marked one fix the number."""
    wanted = left_open(with_wanted_saving(as_read(spec, machine)))
    plans = {count: _Planned(_on_gpus(wanted, count), machine) for count in gpu_counts}
    own = [count for count in _counts(wanted, gpu_counts) if count in plans]
    marked = _fitting_count(wanted, {count: plans[count] for count in own}) if own else 0
    cells = {}
    for count, found in plans.items():
        plan = found.plan
        fixed = spec.fixed if count == marked else _with_gpus(spec.fixed)
        cells[count] = replace(
            plan,
            recommended=plan.recommended and count == marked,
            warnings=(*plan.warnings, *(found.advice if count == marked else ())),
            spec=replace(plan.spec, fixed=fixed),
        )
    parameters, profile = spec.model.parameter_count, profile_of(spec.model)
    idle = idle_parameters(profile.blocks, profile.architecture)
    return PlanRow(
        preset=spec.name,
        title=spec.label,
        parameters=parameters,
        active_parameters=parameters - idle,
        sequence_length=spec.data.sequence_length,
        cells=cells,
        nodes=spec.nodes,
    )


def _with_gpus(fixed: Sequence[MachineDecided]) -> tuple[MachineDecided, ...]:
    return tuple(key for key in MACHINE_DECIDES if key == "gpus" or key in fixed)


def _plan(
    spec: RunSpec, found: Assessment, decided: Sequence[Choice], *, searched: bool = False
) -> Plan:
    target, resources, placement = found.target, found.target.resources, found.placement
    demand, supply, ranks = found.demand, resources.supply, found.target.ranks
    blocked = tuple(blockers(spec, resources))
    fits = not blocked and found.fits
    needed: tuple[Need, ...] = ()
    proposed: tuple[Remedy, ...] = ()
    if fits:
        needs = node_needs(demand, supply)
        needed = (MemoryNeeded(demand.gpu_bytes, supply.gpu_bytes, needs),)
    elif not blocked:
        proposed = tuple(remedies(spec, target, searched=searched))
    length, accumulated = spec.data.sequence_length, spec.gradient_accumulation_steps
    sequences = spec.replicas * spec.train.micro_batch * accumulated
    tokens = sequences * length
    step = None if blocked else found.step
    predicted: dict[str, Any] = {
        "useful_tokens_per_s_total": None,
        "model_tflops_per_gpu": None,
    }
    if step and resources.speed and (model := found.model):
        flops = sequences * model_flops(target.profile.flops, length, [length])
        predicted = {
            "rates": model.rates(),
            "useful_tokens_per_s_total": tokens * target.workload.useful_share / step.total_s,
            "model_tflops_per_gpu": flops / step.total_s / ranks / 1e12,
            "speed_source": _speed_source(found, resources.speed),
            "step_error": step_error(resources.speed, resources.gpu_name, target.hosts),
        }
    second_states = found.bytes_of("second-states")
    return Plan(
        preset=spec.name,
        gpus=ranks,
        mode=found.mode,
        ratio=found.spec.offload.ratio,
        fits=fits,
        verdict=found.verdict if fits else "does not fit",
        possible=not blocked,
        reasons=(
            *blocked,
            *(() if blocked and found.fits else found.shortages),
            *needed,
            *proposed,
            *((*decided, *_settled(spec, found)) if fits else ()),
        ),
        remedies=proposed,
        warnings=tuple(cautions(spec, found)),
        shortage=found.worst,
        gpu_bytes=demand.gpu_bytes,
        gpu_reserved_bytes=sum(
            term.bytes
            for term in found.terms
            if term.location == "gpu" and term.kind not in OUTSIDE_ALLOCATOR
        ),
        gpu_capacity_bytes=supply.gpu_bytes,
        one_memory=supply.one_memory,
        host_bytes_per_node=demand.node_bytes,
        host_optional_bytes=(second_states + placement.copies_bytes) * resources.ranks,
        optional=OptionalMemory(
            second_states_bytes=placement.speculation_bytes, copies_bytes=placement.copies_bytes
        ),
        host_capacity_bytes_per_node=supply.node_bytes,
        shm_bytes=demand.shm_bytes,
        disk_bytes=found.disk_bytes,
        disk_peak_bytes=spec.checkpoint.most_at_once * found.disk_bytes,
        checkpoint_cost_s=checkpoint_cost_s(found),
        breakdown=tuple(
            replace(term, name=TERM_NAMES[term.kind], formula=str(term.formula))
            for term in found.terms
        ),
        step=step,
        step_s=step.total_s if step else None,
        tokens_per_step=tokens,
        binding=resources.bindings(found.mode),
        spec=with_policy(found.spec, found.spec.model.policy).changed(
            "checkpoint", every_minutes=affordable_minutes(found.spec, checkpoint_cost_s(found))
        ),
        **predicted,
    )


def _speed_source(found: Assessment, speed: Speed) -> SpeedSource:
    """Return what the prediction of its step rests on."""
    target, mode = found.target, found.mode
    host_weights = found.spec.offload.keeps_weights_on_host
    near = correcting(mode, target.ranks, target.probes, host_weights=host_weights)
    passes = host_weights or any(map(tells_computing, near))
    near = [probe for probe in near if passes or probe.mode == mode]
    weights: Literal["", "gpu", "host"] = "gpu" if host_weights else "host"
    return SpeedSource(
        calibrated=speed.calibrated,
        published=speed.source,
        workload=None if target.workload == Workload() else target.workload,
        probed=bool(near),
        probed_modes=tuple(dict.fromkeys(probe.mode for probe in near)),
        probed_passes=passes or not near,
        probed_weights=weights if near and near[0].host_weights != host_weights else "",
    )


def _settled(spec: RunSpec, found: Assessment) -> Iterator[Choice]:
    """Yield what became of a target of tokens per optimizer step, rounding included, of memory, of
    speculation, and of checkpoints.
    """
    placement, resources, model = found.placement, found.target.resources, found.model
    if resources.supply.one_memory:
        yield OneMemory()
    if can_speculate(found.spec) and placement.layout.cpu_numel:
        second = found.bytes_of("second-states")
        # The step whose gradient norm exceeds the limit, so that Adam waits for it.
        held_back = found.step_with(speculating=()) if second else None
        yield StepsEarly(
            share=placement.early_share,
            bytes=second,
            why_none=_why_none(found),
            held_back_step_s=held_back.total_s if held_back else None,
        )
    if spec.checkpoint.every_minutes and not spec.fixes("checkpoint.every_minutes"):
        cost_s, usual = checkpoint_cost_s(found), spec.checkpoint.every_minutes
        minutes = affordable_minutes(spec, cost_s)
        yield SavesEvery(minutes=minutes, usual_minutes=usual, cost_s=cost_s)
    if found.copies:
        yield SavesBehind(share=found.copies.share, bytes=found.copies.bytes)
    if found.spec.model.tiles_mlp:
        yield MlpTiled(tile_tokens=MLP_TILE_TOKENS)
    if offloaded_bytes(found.target.profile.architecture, found.spec.model):
        passes = found.spec.gradient_accumulation_steps
        yield InputsOnHost(
            bytes=found.bytes_of("offloaded-inputs"),
            results_bytes=found.bytes_of("offloaded-results"),
            out_s=model.kept_copies_s(model.speed.d2h_bytes_per_s) if model else None,
            back_s=model.kept_copies_s(model.speed.h2d_bytes_per_s) if model else None,
            exposed_s=passes * model.one_pass.exposed_copies_s if model else 0.0,
        )
    if moved := placement.host_weights:
        once = model.one_pass if model else None
        yield WeightsOnHost(
            bytes=2 * moved,
            fetched_s=model.fetched_weights_s if model else None,
            pass_s=min(once.forward_s, once.backward_s) if once else None,
        )
    yield from across_hosts(found)
    attention = attention_of(found.spec, found.target.profile, resources)
    for fastest, obstacle in attention.passed_over[:1]:
        if obstacle not in ("not-installed", "other-gpu"):
            yield AttentionFallsBack(backend=attention.backend, fastest=fastest, obstacle=obstacle)
    if target := spec.train.tokens_per_step:
        once_tokens = spec.replicas * spec.train.micro_batch * spec.data.sequence_length
        steps = spec.gradient_accumulation_steps
        yield TokensReached(
            accumulation=steps,
            target=target,
            tokens=steps * once_tokens,
            tokens_per_pass=once_tokens,
        )


def _why_none(found: Assessment) -> Literal["memory", "budget", "slower"]:
    """Return why a spec does not speculate, if it does not."""
    if found.speculation_gains_nothing:
        return "slower"
    given = found.spec.offload.speculation_gib * 2**30
    numels = (group.numel for group in found.placement.layout.cpu_groups)
    return "budget" if 0 < given < second_states_bytes(found.spec) * min(numels) else "memory"
