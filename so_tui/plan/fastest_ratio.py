"""The offload ratio at which settings that fit are the fastest. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from so_tui.plan.fit import Assessment, assess, in_mode, step_with
from so_tui.plan.offload_ratio import RATIOS
from so_tui.spec.types import RunSpec

_COARSE = 3
"""Every third ratio is tried first."""
_SLOWER = 0.8
"""CPU Adam on a slow host over that on a fast one with the same processors: 3.9 and 4.7 G parameters a second on 16 cores."""
_ALIKE = 0.001
"""Two ratios of the same settings whose speeds differ by less than this count as equally fast."""


def rate(found: Assessment) -> float:
    """Return the sequences per second of one rank, of a shared one its part; 0 where no speed is known."""
    train = found.spec.train
    return (
        train.micro_batch
        * found.spec.gradient_accumulation_steps
        / train.sequence_parallel
        / found.step.total_s
        if found.step
        else 0.0
    )


def at_fastest_ratio(given: RunSpec, chosen: Assessment) -> Assessment:
    """Return the chosen settings at the ratio at which they are the fastest, of those that fit.

    The chosen ratio is the smallest that fits. A larger one is a little faster as long as Adam on the host is hidden, since the GPU then
    has less to step itself; from there on every sub-group more makes the step longer, and by much. Where that is depends on the rate of
    Adam: if it was not measured here, ratios are judged by the mean of a step at the rate of another host and of one at a slower host's.

    The ratios in between are tried coarsely, then closely around the best. Of ratios that are as good, the smallest stays, which takes the
    least host memory; otherwise the given one.
    """
    if (
        chosen.spec.offload.mode != "superoffload"
        or chosen.verdict != "fits"
        or chosen.step is None
    ):
        return chosen
    larger = [ratio for ratio in RATIOS if ratio > chosen.spec.offload.ratio]
    known = {chosen.spec.offload.ratio: chosen}
    seconds = {chosen.spec.offload.ratio: _expected_s(chosen)}

    def try_all(ratios: Iterable[float]) -> float:
        for ratio in set(ratios).difference(known):
            found = known[ratio] = assess(
                in_mode(chosen.spec, "superoffload", ratio), chosen.target
            )
            if found.verdict == "fits":
                seconds[ratio] = _expected_s(found)
        return min(seconds, key=lambda ratio: seconds[ratio])

    asked = max(chosen.spec.offload.ratio, given.offload.ratio)
    best = try_all([*larger[::_COARSE], *larger[-1:], asked])
    best = try_all(ratio for ratio in larger if abs(ratio - best) < _COARSE * RATIOS[1])
    alike = [ratio for ratio in seconds if seconds[ratio] <= (1 + _ALIKE) * seconds[best]]
    return known[
        next((ratio for ratio in (chosen.spec.offload.ratio, asked) if ratio in alike), best)
    ]


def _expected_s(found: Assessment) -> float:
    """Return the seconds of a step; where Adam's rate is that of another host, the mean of these and of those on a slower one."""
    target, speed = found.target, found.target.resources.speed
    if found.step is None:
        return float("inf")
    if speed is None or speed.calibrated or target.probes:
        return found.step.total_s
    slower = msgspec.structs.replace(
        speed,
        adam=tuple((cores, _SLOWER * rate) for cores, rate in speed.adam),
        adam_together=tuple((ranks, _SLOWER * rate) for ranks, rate in speed.adam_together),
        node_bytes_per_s=_SLOWER * speed.node_bytes_per_s,
    )
    there = step_with(
        found, found.spec, replace(target, resources=replace(target.resources, speed=slower))
    )
    return found.step.total_s if there is None else (found.step.total_s + there.total_s) / 2
