"""The command that starts the training processes: an argument list, never a shell line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from so_tui.launch.placeholders import Placeholder, resolve
from so_tui.plan.binding import core_list, uses_numactl
from so_tui.plan.types import Plan

TRAINER_MODULE = "so_tui_trainer"


def argv(plan: Plan, *, start_over: bool = False) -> tuple[str, ...]:
    """Return the arguments that start DeepSpeed's launcher with the trainer, with placeholders for the host's values."""
    return (
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        *(_several_nodes(plan) if plan.spec.nodes > 1 else _one_node(plan)),
        *_binding(plan),
        *(
            "--module",
            TRAINER_MODULE,
            "--run",
            Placeholder.RUN.value,
            "--attempt",
            Placeholder.ATTEMPT.value,
        ),
        *(("--node", Placeholder.NODE.value) if plan.spec.nodes > 1 else ()),
        *(("--start-over",) if start_over else ()),
    )


def resolved(arguments: Sequence[str], values: Mapping[Placeholder, str]) -> tuple[str, ...]:
    """Return the arguments with the host's values in place of the placeholders."""
    return tuple(resolve(argument, values) for argument in arguments)


def _one_node(plan: Plan) -> Sequence[str]:
    # A path that is never a regular file: a /job/hostfile of the site would otherwise make this a run over ssh.
    no_hostfile = ("--hostfile", "/dev/null")
    gpus = [rank.gpu for rank in plan.binding if rank.gpu is not None]
    if not gpus:
        return (*no_hostfile, "--num_gpus", str(len(plan.binding)))
    return (*no_hostfile, "--include", "localhost:" + ",".join(map(str, gpus)))


def _several_nodes(plan: Plan) -> Sequence[str]:
    """Return the options of a launcher that a supervisor starts on each node. Launchers over ssh or srun would lose the binding."""
    return (
        *("--hostfile", Placeholder.HOSTFILE.value, "--include", Placeholder.DEVICES.value),
        *("--no_ssh", "--node_rank", Placeholder.NODE.value),
        *("--master_addr", Placeholder.ADDRESS.value, "--master_port", Placeholder.PORT.value),
    )


def _binding(plan: Plan) -> Sequence[str]:
    # Without a working numactl the launcher would fail. The trainer binds itself in any case.
    if not uses_numactl(plan.binding):
        return ()
    return ("--bind_cores_to_rank", "--bind_core_list", core_list(plan.binding))
