"""The command that starts the training processes: an argument list, never a shell line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from so_tui.launch.placeholders import Placeholder, resolve
from so_tui.plan.binding import core_list, uses_numactl
from so_tui.plan.types import Plan

TRAINER_MODULE = "so_tui_trainer"


def argv(plan: Plan) -> tuple[str, ...]:
    """Return the arguments that start DeepSpeed's launcher with the trainer, with placeholders for the host's values."""
    return (
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        # A path that is never a regular file: a /job/hostfile of the site would otherwise make this a run over ssh.
        *("--hostfile", "/dev/null"),
        *_devices(plan),
        *_binding(plan),
        *("--module", TRAINER_MODULE, "--run", Placeholder.RUN.value, "--attempt", Placeholder.ATTEMPT.value),
    )


def resolved(arguments: Sequence[str], values: Mapping[Placeholder, str]) -> tuple[str, ...]:
    """Return the arguments with the host's values in place of the placeholders."""
    return tuple(resolve(argument, values) for argument in arguments)


def _devices(plan: Plan) -> Sequence[str]:
    gpus = [rank.gpu for rank in plan.binding if rank.gpu is not None]
    if not gpus:
        return ("--num_gpus", str(len(plan.binding)))
    return ("--include", "localhost:" + ",".join(map(str, gpus)))


def _binding(plan: Plan) -> Sequence[str]:
    # Without a working numactl the launcher would fail. The trainer binds itself in any case.
    if not uses_numactl(plan.binding):
        return ()
    return ("--bind_cores_to_rank", "--bind_core_list", core_list(plan.binding))
