"""Measure so-tui through the whole program: `plan` chooses the batch, `run` starts it, `watch`
waits, the run directory has the figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.comparison import processes
from benchmarks.comparison.figures import Step
from benchmarks.comparison.ground import Ground
from benchmarks.comparison.parts import Part, Shape, spec_changes
from so_tui.machine import inspect_machine
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.runs import RunDirectory, RunReader
from so_tui.runs.records import EndRecord, MetricRecord, StepRecord, WarningRecord
from so_tui.spec import Refusal, Refused, find_preset, with_values

PROGRAM = (sys.executable, "-m", "so_tui")
_MEDIANS = (
    "model_tflops_per_gpu",
    "hw_tflops_per_gpu",
    "data_s",
    "forward_s",
    "backward_s",
    "exposed_optimizer_s",
    "other_s",
)


@dataclass(frozen=True)
class Job:
    """Where and for how long so-tui runs, and the user's changes."""

    folder: Path
    environment: Mapping[str, str]
    limit_s: float
    changes: Mapping[str, str]

    @property
    def runs(self) -> tuple[str, str]:
        """Arguments that select the folder of runs."""
        return "--runs-dir", str(self.folder)


def measure(part: Part, shape: Shape, ground: Ground, job: Job) -> dict[str, Any]:
    """Return the part's row."""
    try:
        plan = recommended(part, shape, ground, job.changes)
        batch = {
            "train.micro_batch": plan.spec.train.micro_batch,
            "train.gradient_accumulation": plan.spec.train.gradient_accumulation,
        }
        settings = (
            spec_changes(part, shape, ground.rows, ground.tokenizer) | dict(job.changes) | batch
        )
        started = _started(shape, settings, job)
    except (Refused, subprocess.CalledProcessError) as error:
        told = (
            f"{error}\n{error.stdout[-500:]}{error.stderr[-1000:]}"
            if isinstance(error, subprocess.CalledProcessError)
            else str(error)
        )
        return {"error": told}
    run = RunDirectory(Path(started["path"]))
    ended = processes.run(
        [*PROGRAM, "watch", run.name, "--plain", *job.runs],
        job.environment,
        job.limit_s,
        lambda _: False,
    )
    if ended.late or ended.code != 0:
        # A run that is still going would share the machine with the next part. Has no effect on a
        # run that has ended.
        subprocess.run(
            [*PROGRAM, "stop", run.name, "--grace", "5", *job.runs],
            env=job.environment,
            check=False,
        )
        return {"error": ended.tail(job.limit_s)}
    chosen = {
        "settings": dict(job.changes),
        "micro_batch": plan.spec.train.micro_batch,
        "gradient_accumulation": plan.spec.train.gradient_accumulation,
        "activation_checkpointing": plan.spec.model.activation_checkpointing,
        "planned_gpu_gib": (plan.gpu_bytes or 0) / 2**30,
        "planned_step_s": plan.step_s,
    }
    return chosen | figures(read(run), part, shape)


def recommended(part: Part, shape: Shape, ground: Ground, changes: Mapping[str, str]) -> Plan:
    """Return the plan that fits and is predicted to be the fastest, among all ways to split the
    part's optimizer step into micro-batches.

    Args:
        part: The part.
        shape: The shape.
        ground: The inputs.
        changes: The user's changes; a micro-batch among them is used as it is.

    Raises:
        Refused: No plan fits.
    """
    machine = inspect_machine()
    sequences = part.sequences_per_step()
    wanted = changes.get("train.micro_batch")
    if wanted and sequences % int(wanted):
        message = f"a step of {sequences} sequences cannot be split into micro-batches of {wanted}"
        raise Refused([Refusal("indivisible-batch", message)])
    sizes = (
        [int(wanted)]
        if wanted
        else [sequences >> halving for halving in range(sequences.bit_length())]
    )
    plans = []
    for size in sizes:
        settings = spec_changes(part, shape, ground.rows, ground.tokenizer) | dict(changes)
        settings |= {
            "train.micro_batch": str(size),
            "train.gradient_accumulation": str(sequences // size),
        }
        plans.append(make_plan(with_values(find_preset(shape.preset).spec, settings), machine))
    fitting = [plan for plan in plans if plan.fits and plan.verdict == "fits"]
    if not fitting:
        raise Refused([Refusal("does-not-fit", reason) for reason in plans[-1].reason_texts])
    return min(fitting, key=lambda plan: plan.step_s or 0.0)


def read(run: RunDirectory) -> list[MetricRecord]:
    """Return every record of a run."""
    reader = RunReader(run)
    records: list[MetricRecord] = []
    while True:
        update = reader.poll()
        records += update.records
        if not update.more:
            return records


def figures(records: list[MetricRecord], part: Part, shape: Shape) -> dict[str, Any]:
    """Return the steps and medians of a run. Packed sequences are computed at full length, however
    full they are.
    """
    found = [record for record in records if isinstance(record, StepRecord)]
    counted = found[part.warmup :]
    begin = records[0].time
    ended = next((record for record in records if isinstance(record, EndRecord)), None)
    if ended is None or ended.state != "finished" or not counted:
        return {"error": ended.reason if ended else "the run has no end record"}
    positions = part.sequences_per_step() * shape.sequence_length
    return {
        "steps": [
            Step(step_s=step.step_s, useful_tokens=step.useful_tokens, positions=positions)
            for step in found
        ],
        "losses": [step.loss for step in found],
        "started_s": found[0].time - found[0].step_s - begin,
        "gpu_reserved_gib": (found[-1].gpu_memory_peak_bytes or 0) / 2**30,
        "warnings": [record.message for record in records if isinstance(record, WarningRecord)],
        "adam_busy_s": median(step.adam_busy_s or 0.0 for step in counted),
        "parts_of_steps": [
            {
                name: getattr(step, name)
                for name in ("forward_s", "backward_s", "exposed_optimizer_s", "adam_busy_s")
            }
            for step in found
        ],
        **{name: median(getattr(step, name) for step in counted) for name in _MEDIANS},
    }


def _started(shape: Shape, settings: Mapping[str, object], job: Job) -> dict[str, Any]:
    arguments = [
        argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")
    ]
    command = [
        *PROGRAM,
        "run",
        shape.preset,
        *arguments,
        "--detach",
        "--json",
        "--no-preflight",
        *job.runs,
    ]
    answer = subprocess.run(
        command, env=job.environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    return found
