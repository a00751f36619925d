"""Predictions corrected by what a probe of the same model on this machine measured. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec.structs import replace

from so_tui.plan.calibration import Figures, Probe
from so_tui.plan.types import MemoryTerm, Mode, StepTime

BEYOND = "measured beyond the formulas"


def refined_step(step: StepTime, mode: Mode, ranks: int, probes: Sequence[Probe]) -> StepTime:
    """Forward and backward by the ratio that any probe of the model found; the exposed optimizer by those of the same mode.

    Probes with as many ranks count alone where there are any. In SuperOffload the host waits for weights while the GPU still computes what
    it was given before, so that some of forward is measured as the optimizer's: only their sum is corrected there, and what it says of
    forward in other modes is what it says of backward.
    """
    near = [probe for probe in probes if probe.ranks == ranks] or list(probes)
    same = [probe for probe in near if probe.mode == mode]
    if not near:
        return step
    backward = _ratio([(probe.actual.backward_s, probe.predicted.backward_s) for probe in same or near])
    if same and mode == "superoffload":
        forward = optimizer = _ratio([(_forward_and_optimizer(probe.actual), _forward_and_optimizer(probe.predicted)) for probe in same])
    else:
        forward = _ratio([_forward(probe) for probe in same or near])
        optimizer = _ratio([(probe.actual.exposed_optimizer_s, probe.predicted.exposed_optimizer_s) for probe in same])
    return replace(
        step,
        forward_s=step.forward_s * forward,
        backward_s=step.backward_s * backward,
        exposed_optimizer_s=step.exposed_optimizer_s * optimizer,
    )


def _forward_and_optimizer(figures: Figures) -> float:
    return figures.forward_s + figures.exposed_optimizer_s


def _forward(probe: Probe) -> tuple[float, float]:
    """Measured and predicted, of what tells how fast forward is."""
    if probe.mode == "superoffload":
        return probe.actual.backward_s, probe.predicted.backward_s
    return probe.actual.forward_s, probe.predicted.forward_s


def refined_terms(terms: Sequence[MemoryTerm], mode: Mode, ranks: int, probes: Sequence[Probe]) -> tuple[MemoryTerm, ...]:
    """What the allocator was found to reserve more or less than predicted, in the same mode: more is a term, less comes off the slack.

    The share of the driver and NCCL is as measured.
    """
    same = [probe for probe in probes if probe.mode == mode and probe.ranks == ranks and probe.actual.gpu_reserved_bytes]
    if not same:
        return tuple(terms)
    more = max(probe.actual.gpu_reserved_bytes - probe.predicted.gpu_reserved_bytes for probe in same)
    outside = (
        max(probe.actual.gpu_device_bytes - probe.actual.gpu_reserved_bytes for probe in same if probe.actual.gpu_device_bytes)
        if any(probe.actual.gpu_device_bytes for probe in same)
        else 0
    )
    found = [_refined(term, more, outside) for term in terms]
    if more > 0:
        found.append(MemoryTerm(name=BEYOND, place="gpu", bytes=more, confidence="calibrated", formula="by a probe of this model here"))
    return tuple(found)


def _refined(term: MemoryTerm, more: int, outside: int) -> MemoryTerm:
    if term.name == "allocator slack" and more < 0:
        return replace(term, bytes=max(0, term.bytes + more), formula=f"{term.formula}, less by a probe")
    if term.name == "CUDA context" and outside:
        return replace(term, bytes=outside, formula="driver, kernels, NCCL, by a probe")
    if term.name == "NCCL buffers" and outside:
        return replace(term, bytes=0, formula="counted with the context")
    return term


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Measured over predicted; 1 where there is nothing to compare."""
    ratios = [actual / predicted for actual, predicted in pairs if actual > 0 and predicted > 0]
    return median(ratios) if ratios else 1.0
