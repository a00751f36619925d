"""Whether one spec, with its mode decided, fits on a machine, and how fast it is there."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from msgspec import Struct

from so_tui.machine.types import Machine
from so_tui.model.profile import WEIGHT_BYTES, ModelProfile, profile_of
from so_tui.plan.gpu_memory import memory_terms
from so_tui.plan.host_memory import Copies, copies
from so_tui.plan.measured import (
    STEP_PARTS,
    Fetching,
    Passes,
    Probe,
    corrected_step,
    corrected_terms,
    correcting,
)
from so_tui.plan.notes import MemoryPool, NodeNeed, Shortage
from so_tui.plan.placement import Placement
from so_tui.plan.plan import GPU_MARGIN, HOST_MARGIN, TIGHT_MARGIN, StepTime, Verdict
from so_tui.plan.rates import DIGEST, between_hosts_bytes_per_s, constants
from so_tui.plan.resources import (
    Resources,
    Supply,
    attention_of,
    calibrated_resources,
    resources_of,
)
from so_tui.plan.step_time import SecondStates, StepModel, choose
from so_tui.plan.terms import Location, MemoryTerm, TermKind
from so_tui.plan.workload import Workload, seen
from so_tui.spec.run_spec import Mode, RunSpec
from so_tui.units import memory_size

# Search for the smallest offload ratio that leaves enough GPU memory free. Pure.


RATIOS = tuple(step / 20 for step in range(21))
"""Offload ratios that are tried, ascending."""
STATE_BYTES = 16
"""Bytes per parameter whose optimizer states stay on the GPU."""


# Whether memory suffices: what a run needs of each memory pool, what there is, and the verdict.


class _Demand(Struct, frozen=True):
    """Peak bytes: on the fullest GPU, per CPU node, in /dev/shm."""

    gpu_bytes: int
    node_bytes: dict[int, int]
    shm_bytes: int


def _demand_of(terms: Sequence[MemoryTerm], rank_nodes: Sequence[int]) -> _Demand:
    """Add the terms up; ``rank_nodes`` are the CPU nodes on which the ranks of this host
    allocate.
    """
    totals: Counter[tuple[Location, int | None]] = Counter()
    for term in terms:
        totals[term.location, term.rank] += term.bytes
    node_bytes: Counter[int] = Counter()
    for rank, node in enumerate(rank_nodes):
        node_bytes[node] += totals["node", None] + totals["node", rank]
    return _Demand(totals["gpu", None], dict(node_bytes), totals["shm", None])


def _host_room(demand: _Demand, resources: Resources) -> int:
    """Return the host memory that each rank may take beyond this demand, with the margin left
    free.
    """
    supply = resources.supply
    usable = 1 - _node_margin(supply)
    free = [
        (usable * supply.node_bytes.get(node, 0) - needs) / max(1, resources.nodes.count(node))
        for node, needs in demand.node_bytes.items()
    ]
    if supply.limit_bytes is not None:
        left = usable * supply.limit_bytes - sum(demand.node_bytes.values())
        free.append(left / max(1, resources.ranks))
    return int(min(free, default=0.0))


def _judge(demand: _Demand, supply: Supply) -> tuple[Verdict, tuple[Shortage, ...]]:
    """Return whether it fits, and where it does not, worst first."""
    margin = _node_margin(supply)
    # Nodes are grouped only where there is something to say of them.
    any_short = any(
        needs > (1 - margin) * supply.node_bytes.get(node, 0)
        for node, needs in demand.node_bytes.items()
    )
    hosts = node_needs(demand, supply) if any_short else ()
    on_host = sum(demand.node_bytes.values())
    pools: list[tuple[MemoryPool, tuple[int, ...], int, int | None, float]] = [
        ("gpu", (), demand.gpu_bytes, supply.gpu_bytes, GPU_MARGIN),
        *(("node", host.nodes, host.needs, host.has, margin) for host in hosts),
        ("limit", (), on_host, supply.limit_bytes, margin),
        ("shm", (), demand.shm_bytes, supply.shm_bytes, TIGHT_MARGIN),
    ]
    shortages = [
        Shortage(needs, has, needs > (1 - TIGHT_MARGIN) * has, pool, nodes)
        for pool, nodes, needs, has, left_free in pools
        if has is not None and needs > (1 - left_free) * has
    ]
    shortages.sort(key=lambda short: short.needs / max(1, short.has), reverse=True)
    if fatal := tuple(short for short in shortages if short.fatal):
        return "does not fit", fatal
    return ("tight" if shortages else "fits"), tuple(shortages)


def _node_margin(supply: Supply) -> float:
    """Return the share of a CPU node that stays free; where it is the GPU's memory too, as much as
    of a GPU's.
    """
    return GPU_MARGIN if supply.one_memory else HOST_MARGIN


def node_needs(demand: _Demand, supply: Supply) -> tuple[NodeNeed, ...]:
    """Return what CPU nodes need and have; nodes whose figures are written the same share one
    entry.
    """
    groups: dict[tuple[str, str], NodeNeed] = {}
    for node, needs in sorted(demand.node_bytes.items()):
        has = supply.node_bytes.get(node, 0)
        written = memory_size(needs), memory_size(has)
        fullest = groups.get(written, NodeNeed((), 0, has))
        if needs / max(1, has) <= fullest.needs / max(1, fullest.has):
            needs, has = fullest.needs, fullest.has
        groups[written] = NodeNeed((*fullest.nodes, node), needs, has)
    return tuple(groups.values())


_ANY_DATA = Workload()


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model on resources: what all settings that are tried for a run have in common."""

    profile: ModelProfile
    resources: Resources
    hosts: int = 1
    """This host, and others like it that take part."""
    probes: tuple[Probe, ...] = ()
    """Probes of this model on this machine, which correct predictions."""
    workload: Workload = _ANY_DATA
    """What is known of the data."""

    def on(self, spec: RunSpec) -> Target:
        """Return the same model and data on the GPUs and cores of another spec."""
        machine, known = self.resources.machine, self.resources.calibration
        fraction = spec.offload.cpu_adam_cores_fraction
        return replace(self, resources=calibrated_resources(machine, spec.gpus, fraction, known))

    @property
    def ranks(self) -> int:
        """All ranks, on all hosts."""
        return self.hosts * self.resources.ranks


def target_of(
    spec: RunSpec, machine: Machine, *, workload: Workload | None = None, probed: bool = True
) -> Target:
    """Return what a spec is planned for.

    Args:
        spec: Names model, GPUs and cores.
        machine: Where it is to run.
        workload: The data's; else what was seen of it, else a probe's of this model, else full
            sequences.
        probed: Whether probes of this model on this machine correct predictions.

    Raises:
        InputError: As ``profile_of``.
    """
    profile = profile_of(spec.model)
    resources = resources_of(machine, spec.gpus, spec.offload.cpu_adam_cores_fraction)
    known = resources.calibration.probes if resources.calibration and probed else ()
    # Those of the same model that measured the error of today's predictions, and tell fetching
    # weights apart from computing.
    probes = tuple(
        probe
        for probe in known
        if (probe.model, probe.constants, probe.step_parts) == (profile.key, DIGEST, STEP_PARTS)
        and (not probe.host_weights or probe.computing is not None)
    )
    if workload is None:
        told = seen(spec) or (probes[-1] if probes else None)
        workload = told.workload if told else _ANY_DATA
    return Target(
        profile=profile, resources=resources, hosts=spec.nodes, probes=probes, workload=workload
    )


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """One spec on a target."""

    spec: RunSpec
    """With the mode decided."""
    target: Target
    placement: Placement
    terms: tuple[MemoryTerm, ...]
    demand: _Demand
    verdict: Verdict
    """By memory alone."""
    shortages: tuple[Shortage, ...]
    copies: Copies | None = None
    """Of states, for checkpoints that are written behind training."""
    speculation_gains_nothing: bool = False
    """Whether there was memory for second sets of states, but they would make the step no
    faster.
    """
    known_step: StepTime | None = None
    """Of this placement, where the judgement needed it."""

    @property
    def fits(self) -> bool:
        """Whether it may run: with the margin, or tight."""
        return self.verdict != "does not fit"

    @property
    def worst(self) -> Shortage | None:
        return self.shortages[0] if self.shortages else None

    @property
    def mode(self) -> Mode:
        return self.placement.mode

    def bytes_of(self, kind: TermKind) -> int:
        return sum(term.bytes for term in self.terms if term.kind == kind)

    @property
    def disk_bytes(self) -> int:
        """Of one checkpoint."""
        return sum(term.bytes for term in self.terms if term.location == "disk")

    @property
    def gpu_bytes_left(self) -> int:
        """Of each GPU, where they have memory of their own; 0 where its size is not known."""
        supply = self.target.resources.supply
        known = supply.gpu_bytes is not None and not supply.one_memory
        return (supply.gpu_bytes or 0) - self.demand.gpu_bytes if known else 0

    @property
    def roomy(self) -> bool:
        """Whether twice the margin of each GPU stays free."""
        return self.gpu_bytes_left >= 2 * GPU_MARGIN * (self.target.resources.supply.gpu_bytes or 0)

    @cached_property
    def step(self) -> StepTime | None:
        """None where the speed is not known. Computed on demand: most settings that are tried are
        judged by memory alone.
        """
        return self.known_step or _step(self.placement, self.target)

    @property
    def rate(self) -> float:
        """Sequences per second of one rank, of a shared one its part; 0 where no speed is known."""
        train, steps = self.spec.train, self.spec.gradient_accumulation_steps
        if not self.step:
            return 0.0
        return train.micro_batch * steps / train.sequence_parallel / self.step.total_s

    @property
    def model(self) -> StepModel | None:
        """What predicts ``step``."""
        return step_model(self.placement, self.target)

    def step_with(self, target: Target | None = None, **changes: Any) -> StepTime | None:
        """Return the step of another placement, which takes as much memory, or on another
        target.
        """
        return _step(replace(self.placement, **changes), target or self.target)


def assess(spec: RunSpec, target: Target) -> Assessment:
    """Judge a spec whose mode is decided."""
    resources = target.resources
    placement = Placement(
        spec=spec,
        profile=target.profile,
        layout=target.profile.layout(target.ranks, spec.offload),
        has_gpu=resources.has_gpu or spec.offload.mode == "gpu",
        one_memory=resources.supply.one_memory,
        local_ranks=resources.ranks,
        pinned_rounded=resources.pinned_rounded,
    )
    terms = [*_terms(placement, target)]

    def room() -> int:
        return _host_room(_demand_of(terms, resources.nodes), resources)

    second, step, gains_nothing = choose(
        placement, room, lambda second: _step(_speculating(placement, second), target)
    )
    if second:
        placement = _speculating(placement, second)
        terms.append(second.term)
    copied = copies(placement, room)
    if copied and copied.bytes:
        placement = replace(placement, copies_bytes=copied.bytes)
        terms.append(copied.term)
    demand = _demand_of(terms, resources.nodes)
    verdict, shortages = _judge(demand, resources.supply)
    if resources.gpu_memory_unknown and verdict == "fits":
        verdict = "tight"
    return Assessment(
        spec=spec,
        target=target,
        placement=placement,
        terms=tuple(terms),
        demand=demand,
        verdict=verdict,
        shortages=shortages,
        copies=copied,
        speculation_gains_nothing=gains_nothing,
        known_step=step,
    )


def _speculating(placement: Placement, second: SecondStates | None) -> Placement:
    return (
        replace(placement, speculating=second.sub_groups, speculation_bytes=second.budget_bytes)
        if second
        else placement
    )


def in_mode(spec: RunSpec, mode: Mode, ratio: float | None = None) -> RunSpec:
    """Return the spec with its mode decided, and its ratio where one is given."""
    return spec.changed("offload", mode=mode, ratio=spec.offload.ratio if ratio is None else ratio)


def in_mode_without_gpu(spec: RunSpec) -> RunSpec:
    """Return the spec in the offload mode for a machine without GPUs: DeepSpeed's own SuperOffload
    needs one, its ZeRO-Offload does not.
    """
    deepspeeds = spec.offload.engine == "deepspeed"
    return in_mode(spec, "zerooffload" if deepspeeds else "superoffload")


@dataclass(frozen=True)
class Candidates:
    """One batch and one recomputation, with the states in different locations. Each is assessed
    once, on demand.
    """

    spec: RunSpec
    target: Target

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to choose from. A fixed ratio is one of states in host memory."""
        mode = self.spec.offload.mode
        if mode != "auto" and self.spec.fixes("offload.mode"):
            return (mode,)
        return ("superoffload",) if self.spec.fixes("offload.ratio") else ("gpu", "superoffload")

    @cached_property
    def on_gpu(self) -> Assessment | None:
        """Without offload; None if another mode is fixed, the bare states are larger than the
        GPUs, or weights are to be in host memory.
        """
        if self.modes[0] != "gpu":
            return None
        if len(self.modes) == 1:
            return assess(in_mode(self.spec, "gpu"), self.target)
        supply = self.target.resources.supply
        states = STATE_BYTES * self.spec.model.parameter_count
        capacity = supply.gpu_bytes
        if supply.one_memory:
            capacity = min(supply.node_bytes.values(), default=None)
        too_large = capacity is not None and states > capacity * self.target.ranks
        if self.spec.offload.parameters == "cpu" or too_large:
            return None
        return assess(in_mode(self.spec, "gpu"), self.target)

    @cached_property
    def offloaded(self) -> Assessment | None:
        """States in host memory at the fixed ratio, else at the smallest that leaves the margin of
        each GPU free; at ratio 1 when none does. None if mode ``gpu`` is fixed.
        """
        return None if self.modes == ("gpu",) else self._at_smallest_ratio(GPU_MARGIN)

    @cached_property
    def best(self) -> Assessment:
        """The fastest location: the more stays on the GPU, the faster.

        Without offload where that fits with a margin, else SuperOffload at the smallest ratio that
        does; else what at least may fit; else what is least short. Where the GPU's memory is not
        known, what takes the least of it.
        """
        if not self.target.resources.has_gpu:
            given = len(self.modes) == 1 and self.spec.offload.mode != "auto"
            spec = self.spec if given else in_mode_without_gpu(self.spec)
            return assess(spec, self.target)
        if self.offloaded is None:
            return assess(in_mode(self.spec, "gpu"), self.target)
        if self.target.resources.gpu_memory_unknown:
            return self.offloaded
        if self.on_gpu is not None and self.on_gpu.verdict == "fits":
            return self.on_gpu
        if self.offloaded.verdict == "fits":
            return self.offloaded
        if self.on_gpu is not None and self.on_gpu.verdict == "tight":
            return self.on_gpu
        return self._at_smallest_ratio(TIGHT_MARGIN)

    @cached_property
    def _whole(self) -> Assessment:
        return self._offloading(1.0)

    def _offloading(self, ratio: float) -> Assessment:
        return assess(in_mode(self.spec, self.modes[-1], ratio), self.target)

    def _at_smallest_ratio(self, margin: float) -> Assessment:
        """Return states in host memory at the fixed ratio, else at the smallest that leaves
        ``margin`` of each GPU free, else at ratio 1.
        """
        if self.spec.fixes("offload.ratio"):
            return self._offloading(self.spec.offload.ratio)
        target, whole, supply = self.target, self._whole, self.target.resources.supply
        offload = whole.spec.offload  # whose mode is decided, and with it where states stay
        accepted: tuple[Verdict, ...] = ("fits",) if margin == GPU_MARGIN else ("fits", "tight")
        # Weights whose states stay on the GPU are there, too.
        with_weights = offload.parameters == "cpu" and offload.engine == "so-tui"
        each = STATE_BYTES + (WEIGHT_BYTES if with_weights else 0)
        room = int((1 - margin) * (supply.gpu_bytes or 0)) - whole.demand.gpu_bytes

        def fits(ratio: float) -> bool:
            if supply.one_memory:  # the states take about as much of it wherever they are stepped
                return self._offloading(ratio).verdict in accepted
            # The ratio changes nothing on the GPU but the states that stay there.
            return each * target.profile.gpu_numel(target.ranks, offload, ratio) <= room

        if supply.gpu_bytes is None and not (supply.one_memory and whole.verdict in accepted):
            return whole
        ratio = RATIOS[bisect_left(RATIOS, True, hi=len(RATIOS) - 1, key=fits)]
        return whole if ratio == 1.0 else self._offloading(ratio)


def best(spec: RunSpec, target: Target) -> Assessment:
    """Return the fastest location for the states of ``spec``, batch and recomputation as given."""
    return Candidates(spec, target).best


def _terms(placement: Placement, target: Target) -> tuple[MemoryTerm, ...]:
    found, mode, ranks = memory_terms(placement), placement.mode, placement.layout.ranks
    host_weights = placement.spec.offload.keeps_weights_on_host
    near = correcting(mode, ranks, target.probes, host_weights=host_weights)
    # A GPU that held a layer's weights at a time says nothing of one that holds all.
    near = [probe for probe in near if host_weights or not probe.host_weights]
    return corrected_terms(found, mode, ranks, near)


def _step(placement: Placement, target: Target) -> StepTime | None:
    if (model := step_model(placement, target)) is None:
        return None
    step, ranks = model.step_time(), placement.layout.ranks
    if not target.probes:
        return step
    return corrected_step(step, placement.mode, ranks, target.probes, fetching_of(model))


def fetching_of(model: StepModel) -> Fetching | None:
    """Return what is predicted of fetching weights from host memory; None where the GPU has
    them.
    """
    if not model.placement.host_weights:
        return None
    computing = replace(model, fetches=False).step_time()
    copies_s = model.placement.spec.gradient_accumulation_steps * model.fetched_weights_s
    return Fetching(
        Passes(forward_s=computing.forward_s, backward_s=computing.backward_s), copies_s
    )


def step_model(placement: Placement, target: Target) -> StepModel | None:
    """Return what predicts the step of a placed spec; None where the speed is not known, or it
    cannot run.
    """
    resources, between = target.resources, None
    if resources.speed is None or resources.problem:
        return None
    if target.hosts > 1:
        share = resources.ranks / max(1, len(resources.machine.gpus))
        between = between_hosts_bytes_per_s(resources.network, share)
    superoffload = placement.spec.offload.mode == "superoffload"
    return StepModel(
        placement=placement,
        speed=resources.speed,
        workload=target.workload,
        attention=attention_of(placement.spec, placement.profile, resources).backend,
        between_hosts_bytes_per_s=between,
        adam_cores=resources.adam_cores if superoffload else resources.cores,
        ranks_per_node=resources.ranks_per_node,
        use=constants().step,
    )
