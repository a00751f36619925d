"""What a prediction of time rests on: rates, data, and the probes that corrected it."""

from __future__ import annotations

from typing import cast

from so_tui.plan.constants import SpeedSource
from so_tui.plan.corrections import correcting, corrects_passes
from so_tui.plan.fit import Target
from so_tui.plan.placement import keeps_weights_on_host
from so_tui.plan.workload import Workload
from so_tui.spec.sections.offload import Mode
from so_tui.spec.types import RunSpec


def speed_source_of(target: Target, spec: RunSpec) -> SpeedSource:
    """Return what a prediction of time for this spec rests on."""
    speed, mode = target.resources.speed, cast(Mode, spec.offload.mode)
    host_weights = keeps_weights_on_host(spec)
    near = correcting(mode, target.ranks, target.probes, host_weights=host_weights)
    passes = corrects_passes(near, host_weights=host_weights)
    near = [probe for probe in near if passes or probe.mode == mode]
    return SpeedSource(
        calibrated=speed.calibrated if speed else None,
        published=speed.source if speed else "",
        workload=None if target.workload == Workload() else target.workload,
        probed=bool(near),
        probed_modes=tuple(dict.fromkeys(probe.mode for probe in near)),
        probed_passes=passes or not near,
        probed_weights=""
        if not near or near[0].host_weights == host_weights
        else "gpu"
        if host_weights
        else "host",
    )
