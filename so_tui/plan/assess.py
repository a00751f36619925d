"""One spec, with its mode decided, on one site: bytes, verdict, seconds. And the smallest ratio that fits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from msgspec.structs import replace

from so_tui.model.architecture import architecture
from so_tui.model.flops import flops_for
from so_tui.model.layout import StateLayout, gpu_numel, state_layout
from so_tui.plan.calibration import Probe, model_key
from so_tui.plan.memory import memory_terms
from so_tui.plan.refine import refined_step, refined_terms
from so_tui.plan.site import Site
from so_tui.plan.speed import step_time
from so_tui.plan.types import MemoryTerm, Mode, Shortage, StepTime, Verdict, Workload
from so_tui.plan.verdict import GPU_MARGIN, TIGHT_MARGIN, Demand, demand_of, judge
from so_tui.spec.types import RunSpec

RATIOS = tuple(step / 20 for step in range(21))
"""The offload ratios that are tried, ascending."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    spec: RunSpec
    """With the mode decided."""
    site: Site
    layout: StateLayout
    terms: tuple[MemoryTerm, ...]
    demand: Demand
    verdict: Verdict
    """By memory alone."""
    shortages: tuple[Shortage, ...]
    workload: Workload
    probed: bool
    """Whether a probe of this model on this machine corrected the prediction."""

    @cached_property
    def step(self) -> StepTime | None:
        """None where no speed is known. Worked out when it is asked for: of much that is tried memory alone counts."""
        return _step(self.spec, self.layout, self.site, self.workload)


def assess(spec: RunSpec, site: Site, *, ranks: int | None = None, workload: Workload | None = None) -> Assessment:
    """``ranks``: their number, where other hosts like this one take part. ``workload``: of the data; else what the site knows of it, else a
    probe's of this model, else full sequences. Raises InputError as ``state_layout`` does.
    """
    layout = state_layout(spec, ranks or site.ranks)
    return _judged(spec, layout, site, _terms(spec, layout, site), workload)


def _judged(spec: RunSpec, layout: StateLayout, site: Site, terms: tuple[MemoryTerm, ...], workload: Workload | None = None) -> Assessment:
    probes = _probes(spec, site)
    demand = demand_of(terms, site.nodes)
    verdict, shortages = judge(demand, site.supply)
    if site.gpu_memory_unknown and verdict == "fits":
        verdict = "tight"
    known = workload or site.workload or (probes[-1].workload if probes else Workload())
    return Assessment(
        spec=spec,
        site=site,
        layout=layout,
        terms=terms,
        demand=demand,
        verdict=verdict,
        shortages=shortages,
        workload=known,
        probed=bool(probes),
    )


def step_of(found: Assessment, spec: RunSpec, site: Site) -> StepTime | None:
    """What ``assess`` would say of the step of ``spec``, which differs from the one of ``found`` in what takes no memory."""
    return _step(spec, found.layout, site, found.workload)


def in_mode(spec: RunSpec, mode: Mode, ratio: float | None = None) -> RunSpec:
    """The spec with its mode decided, and its ratio where one is given."""
    return replace(spec, offload=replace(spec.offload, mode=mode, ratio=spec.offload.ratio if ratio is None else ratio))


def mode_without_gpu(spec: RunSpec) -> Mode:
    """DeepSpeed's own SuperOffload needs a GPU; its ZeRO-Offload does not."""
    return "zerooffload" if spec.offload.engine == "deepspeed" else "superoffload"


def best(spec: RunSpec, site: Site, *, ranks: int | None = None) -> Assessment:
    """The fastest place for the states of ``spec`` on this site, batch and recompute as given: what stays on the GPU costs least time.

    Without offload when that fits with a margin, else SuperOffload at the smallest ratio that does; else what at least may fit; else
    what is least short. What takes the least GPU memory where nobody knows how much there is.
    """
    if not site.has_gpu:
        return assess(in_mode(spec, mode_without_gpu(spec)), site, ranks=ranks)
    if site.gpu_memory_unknown:
        return assess(in_mode(spec, "superoffload", 1.0), site, ranks=ranks)
    on_gpu = assess(in_mode(spec, "gpu"), site, ranks=ranks) if states_fit(spec, site, ranks) else None
    if on_gpu is not None and on_gpu.verdict == "fits":
        return on_gpu
    comfortable = smallest_ratio(spec, site, margin=GPU_MARGIN, ranks=ranks)
    if comfortable.verdict == "fits":
        return comfortable
    if on_gpu is not None and on_gpu.verdict == "tight":
        return on_gpu
    return smallest_ratio(spec, site, margin=TIGHT_MARGIN, ranks=ranks)


def states_fit(spec: RunSpec, site: Site, ranks: int | None = None) -> bool:
    """Whether the bare states have room on the GPUs: a quick no for large models."""
    capacity = site.supply.gpu_bytes
    return capacity is None or 16 * spec.model.parameter_count <= capacity * (ranks or site.ranks)


def smallest_ratio(spec: RunSpec, site: Site, *, margin: float, ranks: int | None = None) -> Assessment:
    """SuperOffload at the smallest ratio that leaves ``margin`` of each GPU free; at ratio 1 when none does."""
    capacity = site.supply.gpu_bytes
    whole = in_mode(spec, "superoffload", 1.0)
    if capacity is None:
        return assess(whole, site, ranks=ranks)
    layout = state_layout(whole, ranks or site.ranks)
    terms = _terms(whole, layout, site)
    needed = sum(term.bytes for term in terms if term.place == "gpu")
    room = int((1 - margin) * capacity) - needed

    def leaves_margin(ratio: float) -> bool:
        # What stays on the GPU is all that the ratio changes there.
        return 16 * gpu_numel(whole, layout, ratio) <= room

    ratio = RATIOS[min(bisect_left(RATIOS, True, key=leaves_margin), len(RATIOS) - 1)]
    return _judged(whole, layout, site, terms) if ratio == 1.0 else assess(in_mode(spec, "superoffload", ratio), site, ranks=ranks)


def _terms(spec: RunSpec, layout: StateLayout, site: Site) -> tuple[MemoryTerm, ...]:
    probes, mode = _probes(spec, site), cast(Mode, spec.offload.mode)
    found = memory_terms(
        spec,
        layout,
        architecture(spec.model.config),
        has_gpu=site.has_gpu or mode == "gpu",
        local_ranks=site.ranks,
        pinned_rounded=site.pinned_rounded,
    )
    return refined_terms(found, mode, layout.ranks, probes) if probes else found


def _probes(spec: RunSpec, site: Site) -> tuple[Probe, ...]:
    if not site.probes:
        return ()
    key = model_key(spec.model)
    return tuple(probe for probe in site.probes if probe.model == key)


def _step(spec: RunSpec, layout: StateLayout, site: Site, workload: Workload) -> StepTime | None:
    if site.speed is None or site.problem:
        return None
    shape = architecture(spec.model.config)
    cores = site.adam_cores if spec.offload.mode == "superoffload" else site.cores
    step = step_time(
        spec,
        layout,
        shape,
        flops_for(spec.model.parameters, shape),
        site.speed,
        adam_cores=cores,
        ranks_per_node=site.ranks_per_node,
        workload=workload,
    )
    probes = _probes(spec, site)
    return refined_step(step, cast(Mode, spec.offload.mode), layout.ranks, probes) if probes else step
