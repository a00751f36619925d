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

from so_tui.runs import MetricsWriter, RunDirectory, read_state
from so_tui.runs.records import CheckpointRecord, EndRecord, PhaseRecord, StartRecord, StepRecord

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
    print(
        f"rank {RANK} of {os.environ['WORLD_SIZE']} on {sorted(os.sched_getaffinity(0))}",
        flush=True,
    )
    (arguments.run / f"rank{RANK}.pid").write_text(str(os.getpid()))
    run = RunDirectory(arguments.run)
    shared_memory(run).write_bytes(b"leftover")
    return train(run, arguments.attempt)


def train(run: RunDirectory, attempt: int) -> int:
    steps = next(
        (int(word.removeprefix("steps=")) for word in MANNERS if word.startswith("steps=")),
        1_000_000,
    )
    writer = MetricsWriter(run, attempt) if RANK == 0 else None
    if writer:
        writer.append(
            StartRecord(
                attempt=attempt,
                time=time.time(),
                model="fake",
                mode="zerooffload",
                ranks=2,
                total_steps=steps,
                parameters=1,
            )
        )
        writer.append(PhaseRecord(attempt=attempt, time=time.time(), phase="training"))
    for step in range(1, steps + 1):
        time.sleep(STEP_S)
        if writer:
            writer.append(step_record(attempt, step))
        if "forks" in MANNERS and RANK == 0 and step <= 20:
            os.system("true &")  # it ends at once, and nobody but its subreaper collects it
        if "crash" in MANNERS and RANK == 1 and step >= 3 and known(run):
            raise RuntimeError("the loss is a teapot")
        if (
            "mourns" in MANNERS
            and RANK == 1
            and step > 3
            and (run.path / "rank0.pid").exists()  # on a busy machine rank 0 may start later
            and not Path("/proc", (run.path / "rank0.pid").read_text(), "exe").exists()
        ):
            (run.attempt_dir(attempt) / "failure.rank1.json").write_text(
                '{"rank": 1, "reason": "another rank was lost"}'
            )
            raise ConnectionError("closed by peer")
        if (run.control_dir / "stop").exists() and "stubborn" not in MANNERS:
            return leave(writer, run, attempt, step, "stopped")
    while "held" in MANNERS and not (run.path / "released").exists():
        time.sleep(STEP_S)
    return leave(writer, run, attempt, steps, "finished")


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


def leave(
    writer: MetricsWriter | None, run: RunDirectory, attempt: int, step: int, state: str
) -> int:
    if writer:
        (run.checkpoints_dir / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
        writer.append(
            CheckpointRecord(
                attempt=attempt,
                time=time.time(),
                step=step,
                path=str(run.checkpoints_dir),
                bytes=1,
                seconds=0.0,
            )
        )
        writer.append(
            EndRecord(
                attempt=attempt,
                time=time.time(),
                state=state,  # type: ignore[arg-type]
                step=step,
                saved=str(run.checkpoints_dir),
            )
        )
        writer.close()
    shared_memory(run).unlink()
    if "lingers" in MANNERS:
        time.sleep(1)
    return 6 if "bad-exit" in MANNERS else 0


def step_record(attempt: int, step: int) -> StepRecord:
    return StepRecord(
        attempt=attempt,
        time=time.time() - (max(0.0, LONG_S - 5 * step) if "long-ago" in MANNERS else 0.0),
        step=step,
        loss=2.0 / step,
        learning_rate=1e-5,
        gradient_norm=None,
        useful_tokens=10,
        trained_tokens=5,
        useful_tokens_per_s_total=100.0,
        model_tflops_per_gpu=0.0,
        hw_tflops_per_gpu=0.0,
        seed_tflops_total=0.0,
        mfu=None,
        step_s=STEP_S,
        data_s=0.0,
        forward_s=0.0,
        backward_s=0.0,
        exposed_optimizer_s=0.0,
        other_s=STEP_S,
        gpu_memory_peak_bytes=None,
        host_memory_bytes=None,
        slowest_rank=0,
    )


if __name__ == "__main__":
    sys.exit(main())
