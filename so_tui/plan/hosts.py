"""What the network between several hosts does to a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from so_tui.plan.facts.choices import AcrossHosts
from so_tui.plan.fit import Assessment, step_model
from so_tui.plan.timing import StepModel

_COLLECTIVES = 3
"""For each micro-batch: weights are all-gathered for forward and for backward, and gradients are reduced."""


def across_hosts(found: Assessment) -> Iterator[AcrossHosts]:
    """Yield what travels between the hosts of a run in a step, and how long that takes; nothing for one host."""
    target, layout = found.target, found.layout
    if target.hosts == 1:
        return
    times = _COLLECTIVES * found.spec.gradient_accumulation_steps
    gathered = 2 * layout.parameters * (layout.ranks - 1) // layout.ranks
    model = step_model(found.placement, target)
    yield AcrossHosts(
        machines=target.hosts,
        ranks=layout.ranks,
        bytes_per_step=times * gathered,
        network=target.resources.network,
        seconds=times * model.passes.all_gather_s if model else None,
        longer_s=model.step_time().total_s - _on_one_host(model).step_time().total_s
        if model
        else None,
    )


def _on_one_host(model: StepModel) -> StepModel:
    return replace(model, passes=replace(model.passes, between_hosts_bytes_per_s=None))
