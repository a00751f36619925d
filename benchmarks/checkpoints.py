"""Measure what checkpoints cost that are written while training goes on, through the whole program,
and whether a kill spoils one.

    PYTHONPATH=.:trainer python benchmarks/checkpoints.py --gpus 2 --folder /scratch --out
        checkpoints.json
    PYTHONPATH=.:trainer python benchmarks/checkpoints.py --shape tiny --gpus 2 --bytes-per-s 2e6
        # without a GPU, on a slow disk

One run, random weights, ``keep = 1``. First a few steps without checkpoints, then one checkpoint,
whose writing is timed, then one after the other at ``--interval`` times that time. While the last
one is written, every process of the run is killed with SIGKILL. Two checkpoints are on disk at a
time.

The row has the mean step with and without checkpoints, by the wall clock, pauses included; the
longest step; what is on disk after the kill; and every step, with what was done for a checkpoint
meanwhile:

    copy      the first step after a checkpoint has begun: the pause, and the Adam worker copies
              states beside its steps
    write     states are written to disk
    complete  all ranks have written; the checkpoint is verified and the one before removed
    (nothing) no checkpoint is in progress

and how much of the host's page cache waited for the disk then. With ``--out`` it is appended to a
file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.planner_settings import SHAPES
from so_tui.launch.launch import prepare
from so_tui.launch.lifecycle import start
from so_tui.machine import inspect_machine
from so_tui.plan.plan import Plan
from so_tui.runs import RunDirectory, alive, read_state
from so_tui.runs import state as control
from so_tui.runs.directory import checkpoints_folder, run_id
from so_tui.runs.reader import RunReader
from so_tui.runs.records import FINAL_STATES, CheckpointRecord, PhaseRecord, StepRecord
from so_tui.spec import find_preset, with_values
from so_tui.spec.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer")]


SLOW_DISK = """
import os, time
_write = os.pwrite
def _slow(descriptor, data, offset):
    time.sleep(len(data) / float(os.environ["SO_TUI_BENCHMARK_BYTES_PER_S"]))
    return _write(descriptor, data, offset)
os.pwrite = _slow
"""
"""States are the only thing that the trainer writes with this function."""
_POLL_S = 0.05
_TIMES = (
    "step_s",
    "forward_s",
    "backward_s",
    "exposed_optimizer_s",
    "data_s",
    "other_s",
    "adam_busy_s",
)


class Watched:
    """A run, and the records of it that have been read so far.

    Attributes:
        unwritten_bytes: By step: the most that waited for the disk while it was the last one
            recorded.
    """

    def __init__(self, run: RunDirectory, limit_s: float) -> None:
        self.run = run
        self.steps: list[StepRecord] = []
        self.saved: list[CheckpointRecord] = []
        self.writing = ""
        """What is being written now, in the trainer's words."""
        self.unwritten_bytes: dict[int, int] = {}
        self._reader, self._end = RunReader(run), time.monotonic() + limit_s

    def until(self, done: Callable[[], bool]) -> None:
        """Follow the run until ``done``. Raises RuntimeError if it ends before, or takes too
        long.
        """
        while not done():
            update = self._reader.poll()
            if self.steps:
                step = self.steps[-1].step + 1  # the one that is being computed
                self.unwritten_bytes[step] = max(
                    self.unwritten_bytes.get(step, 0), _unwritten_bytes()
                )
            for record in update.records:
                match record:
                    case StepRecord():
                        self.steps.append(record)
                    case CheckpointRecord():
                        self.saved.append(record)
                    case PhaseRecord():
                        self.writing = record.detail if record.phase == "training" else ""
            if update.state is not None and update.state.state in FINAL_STATES:
                raise RuntimeError(
                    f"the run ended: {update.state.reason}; its folder is {self.run.path}"
                )
            if time.monotonic() > self._end:
                raise RuntimeError(f"the time is over; the run's folder is {self.run.path}")
            time.sleep(_POLL_S)

    def save(self) -> None:
        """Request a checkpoint and wait until it is complete."""
        count = len(self.saved)
        control.request(self.run, "checkpoint")
        self.until(lambda: len(self.saved) > count)
        saved, last = self.saved[-1], self.steps[-1]
        times = f"{saved.seconds:.1f} s, paused {saved.paused_s or 0:.3f} s"
        print(
            f"checkpoint of step {saved.step}: {times}; step {last.step}: {last.step_s:.2f} s",
            file=sys.stderr,
            flush=True,
        )

    def kill(self) -> None:
        """Kill every process of the run."""
        state = read_state(self.run)
        for process in (state.supervisor, *state.processes):
            if process is not None and alive(process):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def main() -> int:
    """Measure, and print the row; return the exit code."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)  # or the run would go on without this program
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="so-tui-checkpoints-", dir=arguments.folder))
    if arguments.bytes_per_s:
        (folder / "sitecustomize.py").write_text(SLOW_DISK)
        os.environ["SO_TUI_BENCHMARK_BYTES_PER_S"] = str(arguments.bytes_per_s)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(folder), os.environ.get("PYTHONPATH")])
        )
    watched: Watched | None = None
    try:
        launch = prepare(_spec(arguments), inspect_machine())
        watched = Watched(start(launch, runs_dir=folder / "runs"), arguments.limit_s)
        row = _measure(watched, launch.plan, arguments)
    except RuntimeError:
        print(
            *(
                path.read_text(errors="replace")[-3000:]
                for path in folder.glob("runs/*/attempts/*/output.*.log")
            ),
            sep="\n",
            flush=True,
        )
        raise
    finally:
        if watched is not None:
            watched.kill()
        shutil.rmtree(folder, ignore_errors=True)
    print(
        json.dumps(
            {name: value for name, value in row.items() if name != "steps_with_checkpoints"},
            indent=1,
        )
    )
    for step in row["steps_with_checkpoints"]:
        print(*(f"{name}={value}" for name, value in step.items() if value), file=sys.stderr)
    if arguments.out:
        rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
        arguments.out.write_text(json.dumps([*rows, row], indent=1) + "\n")
    return 0 if row["damaged"] == 0 and row["left_by_the_kill"] == row["last_recorded"] else 1


def _interrupt(number: int, _frame: object) -> None:
    raise RuntimeError(f"ended by signal {number}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="4b")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs, or ranks on a machine without")
    parser.add_argument(
        "--folder", type=Path, help="where the run is, on a disk with room for two checkpoints"
    )
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument(
        "--baseline", type=int, default=15, help="steps without checkpoints, after five more"
    )
    parser.add_argument("--checkpoints", type=int, default=3, help="how many are measured")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.25,
        help="from one to the next, in multiples of one's writing time",
    )
    parser.add_argument(
        "--bytes-per-s",
        type=float,
        default=0.0,
        help="write states no faster than this, on each rank",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="A.B=VALUE", help="more keys of the spec"
    )
    parser.add_argument("--limit-s", type=float, default=1800.0)
    return parser.parse_args()


def _spec(arguments: argparse.Namespace) -> RunSpec:
    from so_tui_trainer.tools.presets import parameter_table

    values = {
        "gpus": str(arguments.gpus),
        "train.steps": "1000000",
        "offload.mode": "superoffload",
        # none by the clock, but the plan makes room for copies
        "checkpoint.every_minutes": "100000",
        "checkpoint.keep": "1",
        "benchmark.warmup_steps": "0",
        "benchmark.measured_steps": "0",
    }
    if arguments.shape == "tiny":
        values |= {"data.sequence_length": "128", "train.micro_batch": "1"}
    spec = find_preset("qwen3-4b-random").spec
    if SHAPES[arguments.shape]:
        model = msgspec.structs.replace(
            spec.model, config=spec.model.config | SHAPES[arguments.shape], parameters=()
        )
        spec = msgspec.structs.replace(
            spec, model=msgspec.structs.replace(model, parameters=parameter_table(model))
        )
    return with_values(spec, values | dict(setting.split("=", 1) for setting in arguments.set))


def _measure(watched: Watched, plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    watched.until(lambda: len(watched.steps) > 5 + arguments.baseline)
    baseline = _step_times(watched.steps[5:])
    watched.save()
    writing_s = watched.saved[0].seconds
    first, begin = len(watched.steps), time.monotonic()
    for number in range(arguments.checkpoints):
        # If it took longer than the interval, the next one is due at once.
        watched.until(
            lambda due=begin + number * arguments.interval * writing_s: time.monotonic() >= due  # type: ignore[misc]
        )
        watched.save()
    watched.until(
        lambda: time.monotonic() >= begin + arguments.checkpoints * arguments.interval * writing_s
    )
    last = len(watched.steps)
    control.request(watched.run, "checkpoint")
    watched.until(lambda: watched.writing.startswith("writing"))
    time.sleep(writing_s / 2)
    watched.kill()
    with_checkpoints = _step_times(watched.steps[first - 1 : last])
    return {
        "shape": arguments.shape,
        "gpus": arguments.gpus,
        "spec": arguments.set,
        "bytes_per_s": arguments.bytes_per_s,
        "copies_bytes": sum(term.bytes for term in plan.breakdown if term.kind == "copies"),
        "second_states_bytes": sum(
            term.bytes for term in plan.breakdown if term.kind == "second-states"
        ),
        "checkpoint_bytes": watched.saved[0].bytes,
        "writing_s": [round(saved.seconds, 2) for saved in watched.saved],
        "paused_s": [round(saved.paused_s or 0.0, 3) for saved in watched.saved],
        "interval_s": round(arguments.interval * writing_s, 2),
        "step_s": round(statistics.mean(baseline), 4),
        "longest_step_s": round(max(baseline), 3),
        "steps": len(with_checkpoints),
        "step_with_checkpoints_s": round(statistics.mean(with_checkpoints), 4),
        "longest_step_with_checkpoints_s": round(max(with_checkpoints), 3),
        "by_work": _by_work(steps := _steps(watched, first, last)),
        "lost": round(1 - statistics.mean(baseline) / statistics.mean(with_checkpoints), 4),
        "last_recorded": watched.saved[-1].step,
        **_left(watched.run),
        "command": " ".join(sys.argv[1:]),
        "steps_with_checkpoints": steps,
    }


def _steps(watched: Watched, first: int, last: int) -> list[dict[str, Any]]:
    """Return every step from one position among those recorded to another."""
    begun = {step.step: step.time for step in watched.steps}
    return [
        {
            "step": step.step,
            "work": work_during(before, step, watched.saved, begun),
            "wall_s": round(step.time - before.time, 3),
            **{name: round(getattr(step, name) or 0.0, 3) for name in _TIMES},
            "kept_steps": step.kept_steps,
            "unwritten_bytes": watched.unwritten_bytes.get(step.step, 0),
        }
        for before, step in pairwise(watched.steps[first - 1 : last])
    ]


def work_during(
    before: StepRecord, step: StepRecord, saved: list[CheckpointRecord], begun: dict[int, float]
) -> str:
    """Return what was done for a checkpoint between two steps' records: what took longest.

    Args:
        before: The step before.
        step: The step.
        saved: All checkpoints.
        begun: When each step's record was written. A checkpoint begins right after that of its
            step.
    """
    shares = {"": 1e-3}
    for record in saved:
        if record.step == before.step:
            return "copy"
        begin, end = begun[record.step], begun[record.step] + record.seconds
        written = end if record.written_s is None else begin + record.written_s
        shares["write"] = max(shares.get("write", 0.0), _overlap(before, step, begin, written))
        shares["complete"] = max(shares.get("complete", 0.0), _overlap(before, step, written, end))
    return max(shares, key=lambda work: shares[work])


def _overlap(before: StepRecord, step: StepRecord, begin: float, end: float) -> float:
    return max(0.0, min(step.time, end) - max(before.time, begin))


def _by_work(steps: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how many steps there were of each kind, their mean and the longest."""
    found = {}
    for work in ("", "copy", "write", "complete"):
        times = [step["wall_s"] for step in steps if step["work"] == work]
        if times:
            found[work or "nothing"] = {
                "steps": len(times),
                "mean_s": round(statistics.mean(times), 4),
                "longest_s": max(times),
            }
    return found


def _unwritten_bytes() -> int:
    """Return the host's memory that is to be written to a disk, or is on its way."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("Dirty:", "Writeback:"))
    )


def _step_times(steps: list[StepRecord]) -> list[float]:
    """Return the time from each step's record to the next one's, by the wall clock: pauses between
    steps count.
    """
    return [after.time - before.time for before, after in pairwise(steps)]


def _left(run: RunDirectory) -> dict[str, int | None]:
    """Return what the kill left: the step of the newest valid checkpoint, and how many are
    damaged.
    """
    from so_tui.runs import read_spec
    from so_tui_trainer import checkpoint_folder

    found = checkpoint_folder.newest(checkpoints_folder(run, read_spec(run)), run_id(run))
    return {
        "left_by_the_kill": found.manifest.step if found else None,
        "damaged": len(found.damaged) if found else 0,
    }


if __name__ == "__main__":
    sys.exit(main())
