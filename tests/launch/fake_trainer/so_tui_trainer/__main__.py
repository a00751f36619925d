"""Two ranks that pretend to step; what else they do is said by words in FAKE_TRAINER."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.records import (
    CheckpointRecord,
    EndRecord,
    MetricRecord,
    PhaseRecord,
    StartRecord,
    StepRecord,
)
from tests.support.records import step_record

STEP_S = 0.1
LONG_S = 150.0
"""How long ago the first step was where it was ``long-ago``; each later one is 5 s later, until
they have caught up.
"""
RANK = int(os.environ["RANK"])
MANNERS = os.environ.get("FAKE_TRAINER", "").split()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int)
    arguments = parser.parse_args()
    if "orphans" not in MANNERS:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if "deaf" in MANNERS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    cores = sorted(os.sched_getaffinity(0))
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']} on {cores}", flush=True)
    (arguments.run / f"rank{RANK}.pid").write_text(str(os.getpid()))
    run = RunDirectory(arguments.run)
    return train(run, arguments.attempt)


def train(run: RunDirectory, attempt: int) -> int:
    given = (word.removeprefix("steps=") for word in MANNERS if word.startswith("steps="))
    steps = int(next(given, 1_000_000))
    writer = MetricsWriter(run, attempt) if RANK == 0 else None

    def write(kind: type[MetricRecord], **values: Any) -> None:
        if writer is not None:
            writer.append(kind(**{"attempt": attempt, "time": time.time()} | values))

    sizes = {"ranks": 2, "total_steps": steps, "parameters": 1}
    write(StartRecord, model="fake", mode="zerooffload", **sizes)
    write(PhaseRecord, phase="training")
    for step in range(1, steps + 1):
        time.sleep(STEP_S)
        at = time.time() - (max(0.0, LONG_S - 5 * step) if "long-ago" in MANNERS else 0.0)
        values = {"attempt": attempt, "time": at, "loss": 2.0 / step, "step_s": STEP_S}
        write(StepRecord, **asdict(step_record(step)) | values)
        if "forks" in MANNERS and RANK == 0 and step <= 20:
            os.system("true &")  # it ends at once, and nobody but its subreaper collects it
        if "mourns" in MANNERS and RANK == 1 and step > 3 and rank_0_is_gone(run):
            (run.attempt_dir(attempt) / "failure.rank1.json").write_text(
                '{"rank": 1, "reason": "another rank was lost"}'
            )
            raise ConnectionError("closed by peer")
        if (run.control_dir / "stop").exists() and "stubborn" not in MANNERS:
            return leave(write, run, step, "stopped")
    while "held" in MANNERS and not (run.path / "released").exists():
        time.sleep(STEP_S)
    return leave(write, run, steps, "finished")


def rank_0_is_gone(run: RunDirectory) -> bool:
    """Return whether it started, on a busy machine perhaps later than this one, and has ended."""
    started = run.path / "rank0.pid"
    return started.exists() and not Path("/proc", started.read_text(), "exe").exists()


def leave(write: Callable[..., None], run: RunDirectory, step: int, state: str) -> int:
    (run.checkpoints_dir / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
    path = str(run.checkpoints_dir)
    write(CheckpointRecord, step=step, path=path, bytes=1, seconds=0.0)
    write(EndRecord, state=state, step=step, saved=path)
    if "lingers" in MANNERS:
        time.sleep(1)
    return 6 if "bad-exit" in MANNERS else 0


if __name__ == "__main__":
    sys.exit(main())
