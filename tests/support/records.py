"""Records of imaginary runs, and what is written into them."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from so_tui.runs import (
    MetricsWriter,
    RunDirectory,
    SampleWriter,
    create_run,
    read_state,
    write_state,
)
from so_tui.runs.directory import write_manifest
from so_tui.runs.records import EvaluationRecord, MetricRecord, Sample, StepRecord
from so_tui.spec import RunSpec


def named_run(spec: RunSpec, runs_dir: Path | None, name: str) -> RunDirectory:
    """Create a run and rename it, for ``create_run`` ends each name with random letters."""
    made = create_run(spec, runs_dir).path
    run = RunDirectory(made.rename(made.with_name(name)))
    change_state(run, name=name)
    write_manifest(run)
    return run


def append_records(run: RunDirectory, *records: MetricRecord, attempt: int = 1) -> None:
    writer = MetricsWriter(run, attempt)
    for record in records:
        writer.append(record)
    writer.close()


def append_samples(run: RunDirectory, host: str, *samples: Sample) -> None:
    writer = SampleWriter(run, host)
    for sample in samples:
        writer.append(sample)
    writer.close()


def change_state(run: RunDirectory, **changes: object) -> None:
    write_state(run, replace(read_state(run), **changes))


def step_record(step: int, *, attempt: int = 1, loss: float = 2.0, **others: object) -> StepRecord:
    """Return a plausible step record; ``others`` replaces any of its fields."""
    values: dict[str, object] = {
        "attempt": attempt,
        "time": 1e9 + step,
        "loss": loss,
        "learning_rate": 1e-5,
        "gradient_norm": 1.5,
        "useful_tokens": 1000,
        "trained_tokens": 400,
        "useful_tokens_per_s_total": 500.0,
        "model_tflops_per_gpu": 400.0,
        "hw_tflops_per_gpu": 500.0,
        "seed_tflops_total": 450.0,
        "mfu": 0.4,
        "step_s": 2.0,
        "data_s": 0.1,
        "forward_s": 0.6,
        "backward_s": 1.2,
        "exposed_optimizer_s": 0.05,
        "other_s": 0.05,
        "gpu_memory_peak_bytes": None,
        "host_memory_bytes": 1 << 30,
        "slowest_rank": 0,
    }
    return StepRecord(step=step, **(values | others))  # type: ignore[arg-type]


def evaluation_record(step: int, loss: float) -> EvaluationRecord:
    return EvaluationRecord(attempt=1, time=1e9 + step, step=step, loss=loss, tokens=1000)
