"""The command that starts the training processes: an argument list, never a shell line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from so_tui.plan.binding import core_list, uses_numactl
from so_tui.plan.types import Plan

TRAINER_MODULE = "so_tui_trainer"
DEFAULT_PORT = 29500
"""DeepSpeed's own default, shown in dry runs; a run takes a free port instead."""


def argv(
    plan: Plan,
    *,
    run: str,
    attempt: int,
    port: int = DEFAULT_PORT,
) -> tuple[str, ...]:
    """DeepSpeed's launcher with the trainer, for this plan."""
    return (
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        # A path that is never a regular file: a /job/hostfile of the site would otherwise make this a run over ssh.
        *("--hostfile", "/dev/null"),
        *_devices(plan),
        *_binding(plan),
        *("--master_addr", "127.0.0.1", "--master_port", str(port)),
        *("--module", TRAINER_MODULE, "--run", run, "--attempt", str(attempt)),
    )


def _devices(plan: Plan) -> Sequence[str]:
    gpus = [rank.gpu for rank in plan.binding if rank.gpu is not None]
    if not gpus:
        return ("--num_gpus", str(len(plan.binding)))
    return ("--include", "localhost:" + ",".join(map(str, gpus)))


def _binding(plan: Plan) -> Sequence[str]:
    # Where numactl does not work the launcher would die of it; the trainer binds itself in any case.
    if not uses_numactl(plan.binding):
        return ()
    return ("--bind_cores_to_rank", "--bind_core_list", core_list(plan.binding))
