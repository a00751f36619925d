"""The records of a run: what rank 0 and the supervisors append, one JSON object a line, and ``state.json``.

Readers accept unknown fields and skip unknown kinds, so a newer writer never breaks an older screen. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from so_tui.structs import prepare

SCHEMA = 1

State = Literal["created", "queued", "starting", "loading", "training", "saving", "finished", "stopped", "failed", "lost"]
FINAL_STATES: frozenset[State] = frozenset({"finished", "stopped", "failed", "lost"})


class Record(Struct, frozen=True, kw_only=True, tag_field="kind", tag=lambda name: name.removesuffix("Record").lower()):
    """What every record carries."""

    v: int = SCHEMA
    attempt: int
    time: float


class StartRecord(Record, frozen=True, kw_only=True):
    """The first record of an attempt: what is trained, on what."""

    model: str
    mode: str
    ranks: int
    total_steps: int
    parameters: int
    gradient_accumulation_steps: int = 0
    """Micro-steps of an optimizer step, where ``train.tokens_per_step`` may have chosen them; 0 in records of older versions."""
    tokens_per_step: int = 0
    """Sequence positions of an optimizer step, all ranks."""
    hostnames: tuple[str, ...] = ()
    device_name: str = ""
    peak_tflops_per_gpu: float | None = None
    versions: dict[str, str] = {}


class PhaseRecord(Record, frozen=True, kw_only=True):
    """The trainer entered a phase; ``detail`` says what it is doing in a few words."""

    phase: Literal["loading", "training", "saving"]
    detail: str = ""


class RankBindingReport(Struct, frozen=True, kw_only=True):
    """Where one rank found itself, and where it is now."""

    rank: int
    host: str
    pid: int
    gpu: int | None
    found_cpus: tuple[int, ...]
    """Cores on entry: what DeepSpeed's launcher did."""
    cpus: tuple[int, ...]
    main_cpus: tuple[int, ...]
    adam_cpus: tuple[int, ...]
    found_memory_policy: str
    memory_policy: str
    corrected: bool
    problem: str = ""
    """Why the plan's binding could not be had (a forbidden system call, say); empty when all is well."""


class BindingRecord(Record, frozen=True, kw_only=True):
    ranks: tuple[RankBindingReport, ...]


class StepRecord(Record, frozen=True, kw_only=True):
    """One optimizer step; the definitions stand in ``docs/metrics.md``."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    useful_tokens: int
    trained_tokens: int
    useful_tokens_per_s_total: float
    model_tflops_per_gpu: float
    hw_tflops_per_gpu: float
    seed_tflops_total: float
    mfu: float | None
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    exposed_optimizer_s: float
    other_s: float
    gpu_memory_peak_bytes: int | None
    host_memory_bytes: int | None
    slowest_rank: int
    adam_busy_s: float | None = None
    router_loss: float | None = None
    """Load-balancing loss of mixture-of-experts models, without its coefficient; ``loss`` does not contain it."""


class CheckpointRecord(Record, frozen=True, kw_only=True):
    step: int
    path: str
    bytes: int
    seconds: float


class EvaluationRecord(Record, frozen=True, kw_only=True):
    """The loss on documents that are not trained on, after ``step`` steps."""

    step: int
    loss: float
    """Mean over all their trained tokens, whichever rank worked on them."""
    perplexity: float | None = None
    """exp(loss)"""
    tokens: int
    seconds: float = 0.0


class WarningRecord(Record, frozen=True, kw_only=True):
    code: str = ""
    """What the warning is about, in kebab-case and independent of the wording; empty in older records."""
    message: str
    suggestion: str = ""


class ResumedRecord(Record, frozen=True, kw_only=True, tag="resumed_from_step"):
    """Steps of earlier attempts after this one are superseded, in readers and charts."""

    step: int


class EndRecord(Record, frozen=True, kw_only=True):
    """The trainer's own word on how it ended; without it a run is not ``finished``."""

    state: Literal["finished", "stopped", "failed"]
    step: int
    code: str = ""
    """Why it ended, in kebab-case and independent of the wording: ``gpu-out-of-memory``; empty if it finished, and in older records."""
    reason: str = ""
    suggestion: str = ""
    saved: str = ""
    """The checkpoint that holds the last state; empty when nothing was saved."""
    summary: dict[str, float] = {}
    """Benchmark mode: medians over the measured steps."""


MetricRecord = (
    StartRecord | PhaseRecord | BindingRecord | StepRecord | CheckpointRecord | EvaluationRecord | WarningRecord | ResumedRecord | EndRecord
)


class NodeSample(Struct, frozen=True, kw_only=True):
    id: int
    cores: tuple[int, ...]
    """Busy share of each of the node's CPUs in the interval, percent, in ascending CPU order."""
    memory_used_bytes: int
    memory_total_bytes: int
    file_cache_bytes: int


class GpuSample(Struct, frozen=True, kw_only=True):
    index: int
    busy_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    clock_mhz: int | None = None
    temperature_c: int | None = None
    c2c_to_gpu_bytes_per_s: float | None = None
    c2c_to_host_bytes_per_s: float | None = None


class Sample(Struct, frozen=True, kw_only=True):
    """One look at a host, about once a second."""

    v: int = SCHEMA
    attempt: int
    time: float
    interval_s: float
    nodes: tuple[NodeSample, ...]
    gpus: tuple[GpuSample, ...] = ()
    run_cpu_s: float = 0.0
    """CPU seconds that the run's own processes used in the interval."""
    run_memory_bytes: int | None = None
    """PSS of the run's process tree; measured less often, repeated in between."""
    run_memory_peak_bytes: int | None = None
    """The most that the run's processes needed so far, from the kernel's high-water marks: sees peaks of any length."""
    supervisor_cpu_s: float = 0.0


class Rollup(Struct, frozen=True, kw_only=True):
    """Several consecutive samples as one: the average and the highest of every figure; ``mean.time`` is the end of the interval."""

    v: int = SCHEMA
    samples: int
    """How many samples it stands for."""
    mean: Sample
    peak: Sample


class Process(Struct, frozen=True, kw_only=True):
    """A process identified beyond reuse of its pid."""

    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat, in clock ticks since boot."""
    role: Literal["supervisor", "runner", "launcher", "rank", "adam", "other"] = "other"
    rank: int | None = None


class RunState(Struct, frozen=True, kw_only=True):
    """``state.json``: written by the supervisor alone, replaced atomically."""

    v: int = SCHEMA
    name: str
    state: State
    attempt: int = 0
    host: str = ""
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    detail: str = ""
    reason: str = ""
    suggestion: str = ""
    code: str = ""
    """How it ended and why (``OutcomeCode``, or the trainer's own code); empty before the end and in older states."""
    started: float | None = None
    ended: float | None = None
    attempt_started: float | None = None
    earlier_s: float = 0.0
    """Seconds that the attempts before this one took; what lay between them is not counted."""
    heartbeat: int = 0
    """Counts up while the supervisor lives; readers time it with their own clock."""
    exit_code: int | None = None
    """The run's code of the contract (0, 1, 4); None while it lives."""
    saved_step: int | None = None
    saved_at: float | None = None
    forced: bool = False
    """Started with --force although the plan said it does not fit."""
    supervisor: Process | None = None
    processes: tuple[Process, ...] = ()

    @property
    def took_s(self) -> float | None:
        """Seconds of all attempts together; None before the end."""
        since = self.attempt_started or self.started
        return None if since is None or self.ended is None else self.earlier_s + max(0.0, self.ended - since)


prepare(RunState)
