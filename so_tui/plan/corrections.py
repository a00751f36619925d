"""How far predictions were off by probes of the same model, taken into account: of a step, part by part, and of GPU memory.

Alternatives that share a part of the step share its correction, so that they can be compared. Forward and backward are the GPU's work in
any mode, and whether it fetches weights or has them. How long fetching takes is corrected by probes that waited for it, and the exposed
optimizer by those of the same mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from msgspec.structs import replace

from so_tui.plan.calibration import Passes, Probe
from so_tui.plan.terms import MemoryTerm, TermKind
from so_tui.plan.types import StepTime
from so_tui.spec.sections.offload import Mode

PassName = Literal["forward_s", "backward_s"]
_NAMES: tuple[PassName, ...] = ("forward_s", "backward_s")
_WAITS = 1.001
"""Predicted seconds of a pass that fetches weights, over those without fetching, from which on it waits for them: more than rounding."""


class Fetching(NamedTuple):
    """What is predicted of a step whose passes fetch weights from host memory."""

    computing: Passes
    """As if the GPU had the weights."""
    copies_s: float
    """Of each pass's copies, over all micro-batches."""


def correcting(
    mode: Mode, ranks: int, probes: Sequence[Probe], *, host_weights: bool = False
) -> list[Probe]:
    """Return the probes by which a plan is corrected: those that kept weights where it does, else the others.

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
    same = [
        probe
        for probe in correcting(mode, ranks, probes, host_weights=fetching is not None)
        if probe.mode == mode
    ]
    exposed_s = _corrected_exposed_s(step.exposed_optimizer_s, mode, same)
    return replace(step, forward_s=forward_s, backward_s=backward_s, exposed_optimizer_s=exposed_s)


def _fetching_pass_s(
    name: PassName,
    step: StepTime,
    fetching: Fetching,
    having: Sequence[Probe],
    fetched: Sequence[Probe],
) -> float:
    """Return the corrected seconds of a pass that fetches weights: it takes as long as computing, or as fetching if that takes longer.

    Args:
        name: The pass.
        step: As predicted.
        fetching: What is predicted of fetching.
        having: Probes whose GPUs had the weights, which correct what is computed where no other one does.
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


def _tells_computing(probe: Probe) -> bool:
    """Return whether a pass of a probe was predicted to take as long as its computation, whatever it fetched."""
    return not all(_waited(name, probe) for name in _NAMES)


def corrects_passes(near: Sequence[Probe], *, host_weights: bool) -> bool:
    """Return whether these probes say anything of the passes of a plan, which keeps its weights in host memory or not."""
    return host_weights or any(_tells_computing(probe) for probe in near)


def _shared_error(fetched: Sequence[Probe]) -> float:
    """Return what probes that fetched weights say of passes that do not: measured over predicted seconds of what is computed.

    A pass takes at least as long as its computation, so that each of the two is a bound from above, and the lower one counts. Where both
    passes were predicted to wait, nothing is known.
    """
    bounds = []
    for probe in fetched:
        if (computing := probe.computing) is None or not _tells_computing(probe):
            continue
        pairs = [(getattr(probe.actual, name), getattr(computing, name)) for name in _NAMES]
        if ratios := [
            actual / predicted for actual, predicted in pairs if actual > 0 and predicted > 0
        ]:
            bounds.append(min(ratios))
    return median(bounds) if bounds else 1.0


def _corrected_exposed_s(exposed_s: float, mode: Mode, probes: Sequence[Probe]) -> float:
    """Return the exposed optimizer corrected by probes of the same mode.

    What SuperOffload exposes is what is left of Adam when other work has hidden the rest, so that a small error of Adam can multiply it.
    There it is scaled too, but not changed by more seconds than the probe was off.
    """
    corrected = []
    for actual, predicted in (
        (probe.actual.exposed_optimizer_s, probe.predicted.exposed_optimizer_s) for probe in probes
    ):
        if actual <= 0 or predicted <= 0:
            continue
        scaled, most = exposed_s * actual / predicted, abs(actual - predicted)
        corrected.append(
            max(exposed_s - most, min(exposed_s + most, scaled))
            if mode == "superoffload"
            else scaled
        )
    return median(corrected) if corrected else exposed_s


def _error(name: PassName, probes: Sequence[Probe]) -> float:
    """Return measured over predicted seconds of a pass (median); 1 where there is nothing to compare."""
    pairs = ((getattr(probe.actual, name), getattr(probe.predicted, name)) for probe in probes)
    ratios = [actual / predicted for actual, predicted in pairs if actual > 0 and predicted > 0]
    return median(ratios) if ratios else 1.0


def corrected_terms(
    terms: Sequence[MemoryTerm], mode: Mode, ranks: int, probes: Sequence[Probe]
) -> tuple[MemoryTerm, ...]:
    """Return GPU memory terms corrected by probes of the same model, as ``correcting`` returns them.

    What the allocator reserved beyond the prediction becomes a term, and what it reserved less is taken off its slack. The share of the
    driver and NCCL is as measured. Where no probe was of this mode, all that carries over is what every probed mode took beyond its
    prediction: that is most likely of parts that they share, such as activations.
    """
    near = [probe for probe in probes if probe.ranks == ranks and probe.actual.gpu_reserved_bytes]
    same = [probe for probe in near if probe.mode == mode]
    if not same:
        shared = min((max(map(_excess, alike)) for alike in _by_mode(near).values()), default=0)
        formula = f"by a probe of this model here, with {' and '.join(_by_mode(near))}"
        return (
            *terms,
            *(
                [MemoryTerm(TermKind.PROBE_EXCESS, "gpu", shared, "estimate", formula)]
                if shared > 0
                else []
            ),
        )
    more = max(map(_excess, same))
    outside = max(
        (
            probe.actual.gpu_device_bytes - probe.actual.gpu_reserved_bytes
            for probe in same
            if probe.actual.gpu_device_bytes
        ),
        default=0,
    )
    found = [_corrected(each, more, outside) for each in terms]
    if more > 0:
        found.append(
            MemoryTerm(
                TermKind.PROBE_EXCESS, "gpu", more, "calibrated", "by a probe of this model here"
            )
        )
    return tuple(found)


def _excess(probe: Probe) -> int:
    """Return what the allocator reserved beyond the prediction."""
    return probe.actual.gpu_reserved_bytes - probe.predicted.gpu_reserved_bytes


def _by_mode(probes: Sequence[Probe]) -> dict[Mode, list[Probe]]:
    return {
        mode: [probe for probe in probes if probe.mode == mode]
        for mode in dict.fromkeys(probe.mode for probe in probes)
    }


def _corrected(found: MemoryTerm, more: int, outside: int) -> MemoryTerm:
    if found.kind is TermKind.ALLOCATOR_SLACK and more < 0:
        return replace(
            found, bytes=max(0, found.bytes + more), formula=f"{found.formula}, less by a probe"
        )
    if found.kind is TermKind.CUDA_CONTEXT and outside:
        return replace(found, bytes=outside, formula="driver, kernels, NCCL, by a probe")
    if found.kind is TermKind.NCCL_BUFFERS and outside:
        return replace(found, bytes=0, formula="counted with the context")
    return found
