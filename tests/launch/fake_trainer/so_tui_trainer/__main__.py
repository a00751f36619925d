"""Two ranks that pretend to step ten times a second; what they do otherwise is said by FAKE_TRAINER
(space-separated words).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from so_tui.runs import MetricsWriter, RunDirectory, read_state
from so_tui.runs.records import (
    CheckpointRecord,
    EndRecord,
    MetricRecord,
    PhaseRecord,
    StartRecord,
    StepRecord,
)

STEP_S = 0.1
LONG_S = 150.0
"""How long ago the first step was where it was ``long-ago``; each later one is 5 s later, until
they have caught up.
"""
RANK = int(os.environ["RANK"])
MANNERS = os.environ.get("FAKE_TRAINER", "").split()


class Records:
    """Writes the records of an attempt; those of rank 1 go nowhere, as in the trainer."""

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self._attempt = attempt
        self._writer = MetricsWriter(run, attempt) if RANK == 0 else None

    def write(self, kind: type[MetricRecord], *, ago_s: float = 0.0, **values: Any) -> None:
        if self._writer:
            self._writer.append(kind(attempt=self._attempt, time=time.time() - ago_s, **values))


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
    shared_memory(run).write_bytes(b"leftover")
    return train(run, arguments.attempt)


def train(run: RunDirectory, attempt: int) -> int:
    given = (word.removeprefix("steps=") for word in MANNERS if word.startswith("steps="))
    steps = int(next(given, 1_000_000))
    records = Records(run, attempt)
    sizes = {"ranks": 2, "total_steps": steps, "parameters": 1}
    records.write(StartRecord, model="fake", mode="zerooffload", **sizes)
    records.write(PhaseRecord, phase="training")
    for step in range(1, steps + 1):
        time.sleep(STEP_S)
        write_step(records, step)
        if "forks" in MANNERS and RANK == 0 and step <= 20:
            os.system("true &")  # it ends at once, and nobody but its subreaper collects it
        if "crash" in MANNERS and RANK == 1 and step >= 3 and known(run):
            raise RuntimeError("the loss is a teapot")
        if "mourns" in MANNERS and RANK == 1 and step > 3 and rank_0_is_gone(run):
            (run.attempt_dir(attempt) / "failure.rank1.json").write_text(
                '{"rank": 1, "reason": "another rank was lost"}'
            )
            raise ConnectionError("closed by peer")
        if (run.control_dir / "stop").exists() and "stubborn" not in MANNERS:
            return leave(records, run, step, "stopped")
    while "held" in MANNERS and not (run.path / "released").exists():
        time.sleep(STEP_S)
    return leave(records, run, steps, "finished")


def shared_memory(run: RunDirectory) -> Path:
    """Return this process's file in /dev/shm, named as torch names its own. The end of the name is
    the run's alone: pids are reused.
    """
    return Path(f"/dev/shm/torch_{os.getpid()}_{run.path.name}")


def known(run: RunDirectory) -> bool:
    """Return whether the supervisor has seen this process. A real rank imports for seconds before
    it can fail; this one does not.
    """
    return any(process.pid == os.getpid() for process in read_state(run).processes)


def rank_0_is_gone(run: RunDirectory) -> bool:
    """Return whether it started, on a busy machine perhaps later than this one, and has ended."""
    started = run.path / "rank0.pid"
    return started.exists() and not Path("/proc", started.read_text(), "exe").exists()


def leave(records: Records, run: RunDirectory, step: int, state: str) -> int:
    (run.checkpoints_dir / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
    path = str(run.checkpoints_dir)
    records.write(CheckpointRecord, step=step, path=path, bytes=1, seconds=0.0)
    records.write(EndRecord, state=state, step=step, saved=path)
    shared_memory(run).unlink()
    if "lingers" in MANNERS:
        time.sleep(1)
    return 6 if "bad-exit" in MANNERS else 0


def write_step(records: Records, step: int) -> None:
    unmeasured = ("data", "forward", "backward", "exposed_optimizer")
    rates = ("model_tflops_per_gpu", "hw_tflops_per_gpu", "seed_tflops_total")
    unknown = ("gradient_norm", "mfu", "gpu_memory_peak_bytes", "host_memory_bytes")
    records.write(
        StepRecord,
        ago_s=max(0.0, LONG_S - 5 * step) if "long-ago" in MANNERS else 0.0,
        step=step,
        loss=2.0 / step,
        learning_rate=1e-5,
        useful_tokens=10,
        trained_tokens=5,
        useful_tokens_per_s_total=100.0,
        step_s=STEP_S,
        other_s=STEP_S,
        slowest_rank=0,
        **{f"{part}_s": 0.0 for part in unmeasured},
        **dict.fromkeys(rates, 0.0),
        **dict.fromkeys(unknown),
    )


if __name__ == "__main__":
    sys.exit(main())
