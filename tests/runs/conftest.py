"""What the tests of the run directory share: a run, and records."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from so_tui.runs import RunDirectory, create_run
from so_tui.runs.records import StepRecord
from so_tui.spec.types import DataSpec, ModelSpec, RunSpec

SPEC = RunSpec(name="tiny", model=ModelSpec(id="some/model"), data=DataSpec(source="rows.json"))


@pytest.fixture
def spec() -> RunSpec:
    return SPEC


@pytest.fixture
def run() -> RunDirectory:
    return create_run(SPEC)


def step_record(step: int, *, attempt: int = 1, loss: float = 2.0, **others: object) -> StepRecord:
    values: dict[str, object] = {
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
    return StepRecord(attempt=attempt, time=1e9 + step, step=step, loss=loss, **(values | others))  # type: ignore[arg-type]


@pytest.fixture
def step() -> Callable[..., StepRecord]:
    return step_record
