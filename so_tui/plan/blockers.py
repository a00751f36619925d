"""Why a spec can never run on some resources, whatever the memory. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from so_tui.plan.facts.blockers import AmdGpu, Blocker, EngineNeedsGpu, ModeNeedsGpu
from so_tui.plan.resources import Resources
from so_tui.plan.sequence_parallel import not_shareable
from so_tui.spec.types import RunSpec


def blockers(spec: RunSpec, resources: Resources) -> Iterator[Blocker]:
    """Yield why ``spec`` can never run on these resources, whatever the memory."""
    machine, offload = resources.machine, spec.offload
    if amd := next(
        (gpu for gpu in machine.gpus if gpu.vendor == "amd" and not gpu.shares_memory), None
    ):
        yield AmdGpu(gpu=amd.index, name=amd.name)
    if not machine.gpus and offload.mode == "gpu":
        yield ModeNeedsGpu(machine=machine.label)
    if not machine.gpus and offload.mode == "superoffload" and offload.engine == "deepspeed":
        yield EngineNeedsGpu()
    if (not_shared := not_shareable(spec, resources)) is not None:
        yield not_shared
    if resources.problem:
        yield resources.problem
