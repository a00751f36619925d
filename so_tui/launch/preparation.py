"""From a spec and a machine to everything that starting needs, without touching anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from so_tui.launch import command, environment
from so_tui.launch.ds_config import ds_config
from so_tui.launch.environment import Variable
from so_tui.machine.types import Gpu, Machine
from so_tui.plan import make_plan, plan_tree
from so_tui.plan.types import Plan
from so_tui.spec import Refused, RunSpec

RUN_PLACEHOLDER = "RUN"


class Launch(Struct, frozen=True, kw_only=True):
    """A plan with what its start would be: the configuration, the command and the changes to the environment."""

    plan: Plan
    ds_config: dict[str, Any]
    argv: tuple[str, ...]
    env: tuple[Variable, ...]


def prepare(spec: RunSpec, machine: Machine, *, force: bool = False, inherited: Mapping[str, str] | None = None) -> Launch:
    """Plan the spec on the machine and derive the start.

    Raises InputError for a model that is not described well enough to plan, Refused when the run does not fit (``force`` goes on) or
    cannot run here at all. ``inherited`` is the environment to start from, by default this process's.
    """
    inherited = os.environ if inherited is None else inherited
    plan = make_plan(spec, machine)
    if not plan.possible or (not plan.fits and not force):
        raise Refused(plan.reason_texts, forceable=plan.possible)
    return Launch(
        plan=plan,
        ds_config=ds_config(plan),
        argv=command.argv(plan, run=RUN_PLACEHOLDER, attempt=1),
        env=environment.variables(plan, machine, inherited, run=RUN_PLACEHOLDER, attempt=1),
    )


def visible_machine(machine: Machine, inherited: Mapping[str, str]) -> Machine:
    """The machine with only the GPUs that CUDA_VISIBLE_DEVICES lets a program use (indices or UUIDs, as CUDA reads them).

    Raises Refused for MIG instances, which ZeRO-3 cannot be spread over.
    """
    given = inherited.get("CUDA_VISIBLE_DEVICES")
    if given is None or not machine.gpus:
        return machine
    entries = [entry.strip() for entry in given.split(",") if entry.strip()]
    if any(entry.startswith("MIG-") for entry in entries):
        raise Refused(["CUDA_VISIBLE_DEVICES names a MIG instance; so-tui trains on whole GPUs. Ask for a whole GPU"])
    visible = tuple(gpu for gpu in machine.gpus if any(_names(entry, gpu) for entry in entries))
    return msgspec.structs.replace(machine, gpus=visible)


def launch_json(launch: Launch) -> bytes:
    """What ``run --dry-run --json`` prints."""
    return msgspec.json.encode(
        {
            "argv": launch.argv,
            "env": environment.shown(launch.env),
            "ds_config": launch.ds_config,
            "binding": [
                {
                    "rank": rank.rank,
                    "gpu": rank.gpu,
                    "numa_node": rank.numa_node,
                    "cpus": rank.cpus,
                    "memory_policy": rank.memory_policy,
                    "deepspeed": rank.deepspeed,
                    "deepspeed_alone": rank.deepspeed_unlisted,
                }
                for rank in launch.plan.binding
            ],
            "plan": plan_tree(launch.plan),
        }
    )


def _names(entry: str, gpu: Gpu) -> bool:
    return entry == str(gpu.index) if entry.isdigit() else bool(gpu.uuid and gpu.uuid.startswith(entry))
