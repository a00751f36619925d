"""One spec, with its mode decided, on one site: bytes, verdict, seconds. And the smallest ratio that fits."""

from __future__ import annotations

from bisect import bisect_left

from msgspec import Struct
from msgspec.structs import replace

from so_tui.plan.architecture import Architecture, architecture
from so_tui.plan.flops import flops_of
from so_tui.plan.layout import StateLayout, state_layout
from so_tui.plan.memory import memory_terms
from so_tui.plan.site import Site
from so_tui.plan.speed import step_time
from so_tui.plan.types import MemoryTerm, Mode, StepTime, Verdict
from so_tui.plan.verdict import GPU_MARGIN, TIGHT_MARGIN, Demand, Shortage, demand_of, judge
from so_tui.spec.types import RunSpec

RATIOS = tuple(step / 20 for step in range(21))
"""The offload ratios that are tried, ascending."""


class Assessment(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    """With the mode decided."""
    layout: StateLayout
    terms: tuple[MemoryTerm, ...]
    demand: Demand
    verdict: Verdict
    """By memory alone."""
    shortages: tuple[Shortage, ...]
    step: StepTime | None


def assess(spec: RunSpec, site: Site, *, ranks: int | None = None) -> Assessment:
    """``ranks``: their number, where other hosts like this one take part. Raises InputError as ``state_layout`` does."""
    shape = architecture(spec.model.config)
    layout = state_layout(spec, ranks or site.ranks)
    terms = memory_terms(spec, layout, shape, has_gpu=site.has_gpu or spec.offload.mode == "gpu", local_ranks=site.ranks)
    demand = demand_of(terms, site.nodes)
    verdict, shortages = judge(demand, site.supply)
    return Assessment(
        spec=spec,
        layout=layout,
        terms=terms,
        demand=demand,
        verdict=verdict,
        shortages=shortages,
        step=_step(spec, layout, shape, site),
    )


def in_mode(spec: RunSpec, mode: Mode, ratio: float | None = None) -> RunSpec:
    """The spec with its mode decided, and its ratio where one is given."""
    return replace(spec, offload=replace(spec.offload, mode=mode, ratio=spec.offload.ratio if ratio is None else ratio))


def best(spec: RunSpec, site: Site, *, ranks: int | None = None) -> Assessment:
    """The fastest way to train ``spec`` on this site, by the rule that what stays on the GPU costs no time.

    Without offload when that fits with a margin, else SuperOffload at the smallest ratio that does; else what at least may fit; else
    what is least short.
    """
    if not site.has_gpu:
        return assess(in_mode(spec, "superoffload"), site, ranks=ranks)
    on_gpu = assess(in_mode(spec, "gpu"), site, ranks=ranks)
    if on_gpu.verdict == "fits":
        return on_gpu
    comfortable = smallest_ratio(spec, site, margin=GPU_MARGIN, ranks=ranks)
    if comfortable.verdict == "fits":
        return comfortable
    if on_gpu.verdict == "tight":
        return on_gpu
    return smallest_ratio(spec, site, margin=TIGHT_MARGIN, ranks=ranks)


def smallest_ratio(spec: RunSpec, site: Site, *, margin: float, ranks: int | None = None) -> Assessment:
    """SuperOffload at the smallest ratio that leaves ``margin`` of each GPU free; at ratio 1 when none does."""
    capacity = site.supply.gpu_bytes
    assessed: dict[float, Assessment] = {}

    def leaves_margin(ratio: float) -> bool:
        assessed[ratio] = assess(in_mode(spec, "superoffload", ratio), site, ranks=ranks)
        return capacity is None or assessed[ratio].demand.gpu_bytes <= (1 - margin) * capacity

    # The more is offloaded, the less the GPU holds: the answer can be found by halving.
    ratio = RATIOS[min(bisect_left(RATIOS, True, key=leaves_margin), len(RATIOS) - 1)]
    return assessed[ratio] if ratio in assessed else assess(in_mode(spec, "superoffload", ratio), site, ranks=ranks)


def _step(spec: RunSpec, layout: StateLayout, shape: Architecture, site: Site) -> StepTime | None:
    if site.speed is None or site.problem:
        return None
    cores = site.adam_cores if spec.offload.mode == "superoffload" else site.cores
    flops = flops_of(spec.model)
    return step_time(spec, layout, shape, flops, site.speed, adam_cores=cores, ranks_per_node=site.ranks_per_node)
