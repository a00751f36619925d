"""From the command line to a bound process: everything that must happen before torch is imported.

    deepspeed ... --module so_tui_trainer --run RUN --attempt N

Exit codes: 0 finished or stopped as requested, 1 failed.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from so_tui.plan.plan import Launch
from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.directory import LAUNCH_VARIABLE, own_launch
from so_tui.trust.decoding import decode_json
from so_tui_trainer import binding
from so_tui_trainer.hub import stay_offline_when_cut_off
from so_tui_trainer.recorder import Recorder


def main(arguments: Sequence[str] | None = None) -> int:
    """Train this rank.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        The exit code. May also leave the process with it.
    """
    parser = argparse.ArgumentParser(
        prog="so_tui_trainer",
        description="Train one rank of a run; started by DeepSpeed's launcher.",
    )
    parser.add_argument("--run", required=True, help="folder of the run")
    parser.add_argument(
        "--attempt", required=True, type=int, help="number of the attempt whose launch is used"
    )
    parser.add_argument(
        "--node",
        type=int,
        default=0,
        help="number of the node, of a run on several, whose launch is used",
    )
    parser.add_argument(
        "--local_rank",
        type=int,
        default=0,
        help="added by the launcher and ignored; LOCAL_RANK is used",
    )
    given = parser.parse_args(arguments)
    binding.die_with_parent()
    run = RunDirectory(Path(given.run).resolve())
    # The folder may have been exchanged since its supervisor read it: nothing else of it is used
    # before this.
    digest = os.environ.get(LAUNCH_VARIABLE, "")
    launch = decode_json(own_launch(run, given.attempt, given.node, digest), Launch)
    mine = binding.of_rank(launch.plan.binding, int(os.environ["RANK"]))
    report = binding.bind(mine)
    if not mine.adam_cpus:
        # OpenMP runtimes read it when they load. With an Adam worker, the launcher sets it.
        os.environ["OMP_NUM_THREADS"] = str(len(mine.main_cpus))
    stay_offline_when_cut_off()
    if launch.plan.binding[0].gpu is None:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if launch.plan.spec.train.deterministic:
        # cuBLAS reads it when it is loaded.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    writer = MetricsWriter(run, given.attempt) if report.rank == 0 else None
    recorder = Recorder(writer, given.attempt)
    recorder.phase("loading", "importing torch and DeepSpeed", stage="imports")

    from so_tui_trainer.session import Session  # imports them

    code = Session(run, launch, report, recorder).main()
    _leave(code)
    return code


def _leave(code: int) -> None:
    """End the process as an ordinary exit does, but without taking the interpreter apart: with
    torch's modules that takes seconds.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
