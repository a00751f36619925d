"""Records of a run, which rank 0 appends as lines of JSON, and ``state.json``. Samples of a host are in ``sample``.

Readers accept unknown fields and skip unknown kinds, so a newer writer does not break an older screen. Times are in Unix seconds.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from so_tui.runs.slowdown import Slowdown
from so_tui.structs import prepare

SCHEMA = 1

State = Literal[
    "created",
    "queued",
    "starting",
    "loading",
    "training",
    "saving",
    "finished",
    "stopped",
    "failed",
    "lost",
]
ENDING = "ending"
"""The stage in which a trainer has done everything, and its processes end."""
FINAL_STATES: frozenset[State] = frozenset({"finished", "stopped", "failed", "lost"})


class Record(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag=lambda name: name.removesuffix("Record").lower(),
):
    """Fields of every record."""

    v: int = SCHEMA
    attempt: int
    time: float


class StartRecord(Record, frozen=True, kw_only=True):
    """First record of an attempt: model, settings and hardware."""

    model: str
    mode: str
    ranks: int
    total_steps: int
    parameters: int
    gradient_accumulation_steps: int = 0
    """Micro-batches per optimizer step, which may follow from ``train.tokens_per_step``; 0 in records of older versions."""
    tokens_per_step: int = 0
    """Sequence positions of an optimizer step on all ranks."""
    hostnames: tuple[str, ...] = ()
    device_name: str = ""
    peak_tflops_per_gpu: float | None = None
    versions: dict[str, str] = {}


class PhaseRecord(Record, frozen=True, kw_only=True):
    """The trainer entered a phase; ``detail`` describes it in a few words."""

    phase: Literal["loading", "training", "saving"]
    detail: str = ""
    stage: str = ""
    """Part of loading: ``imports``, ``ranks``, ``data``, ``weights``, ``optimizer``, ``checkpoint``. ``ending`` once all is done and saved.
    Otherwise empty."""
    done: int = 0
    """Files of weights that have been read, of ``total``; both are 0 in other stages."""
    total: int = 0


class RankBindingReport(Struct, frozen=True, kw_only=True):
    """Cores and memory policy of one rank, at its start and after binding."""

    rank: int
    host: str
    pid: int
    gpu: int | None
    found_cpus: tuple[int, ...]
    """Cores at the start, as DeepSpeed's launcher set them."""
    cpus: tuple[int, ...]
    main_cpus: tuple[int, ...]
    adam_cpus: tuple[int, ...]
    found_memory_policy: str
    memory_policy: str
    corrected: bool
    problem: str = ""
    """Why the planned binding failed (such as a forbidden system call); empty if it succeeded."""


class BindingRecord(Record, frozen=True, kw_only=True):
    """The binding of all ranks."""

    ranks: tuple[RankBindingReport, ...]


class StepRecord(Record, frozen=True, kw_only=True):
    """One optimizer step. ``docs/metrics.md`` defines the fields."""

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
    adam_bytes_per_s: float | None = None
    """Host memory traffic of rank 0's Adam worker while it computes."""
    d2h_bytes_per_s: float | None = None
    """Rate of rank 0's copies of gradients to the host, while they run."""
    h2d_bytes_per_s: float | None = None
    """The same of new weights to the GPU."""
    router_loss: float | None = None
    """Load-balancing loss of mixture-of-experts models without its coefficient. ``loss`` does not include it."""
    kept_steps: int = 0
    """Steps of this attempt so far in which sub-groups were stepped before the gradient norm was known, and that was final."""
    redone_steps: int = 0
    """Those in which the norm exceeded the limit, so that the sub-groups were stepped again."""
    skipped_steps: int = 0
    """Steps of this attempt so far that were not taken, because a gradient was not finite."""


class CheckpointRecord(Record, frozen=True, kw_only=True):
    """A checkpoint was saved."""

    step: int
    path: str
    bytes: int
    seconds: float
    """From its beginning until it was proven readable."""
    paused_s: float | None = None
    """The part of ``seconds`` for which training stood still; None in records of older versions, which means all of it."""
    written_s: float | None = None
    """The part of ``seconds`` until every rank had its states on the disk: the rest verified it and removed older ones. None in records of
    older versions."""
    due_step: int | None = None
    """The step after which it fell due, if it had to wait for the one before to be written; None if it did not wait."""


class EvaluationRecord(Record, frozen=True, kw_only=True):
    """Loss on held-out documents after ``step`` steps."""

    step: int
    loss: float
    """Mean over their trained tokens on all ranks."""
    perplexity: float | None = None
    """exp(loss)"""
    tokens: int
    seconds: float = 0.0


class WarningRecord(Record, frozen=True, kw_only=True):
    """Something that the user should know, while training continues."""

    code: str = ""
    """What the warning is about, in kebab-case and independent of the wording; empty in older records."""
    message: str
    suggestion: str = ""


class ResumedRecord(Record, frozen=True, kw_only=True, tag="resumed_from_step"):
    """Training resumed from ``step``: later steps of earlier attempts are superseded."""

    step: int


class EndRecord(Record, frozen=True, kw_only=True):
    """How the trainer ended. Without this record, a run is not ``finished``."""

    state: Literal["finished", "stopped", "failed"]
    step: int
    code: str = ""
    """Why it ended, in kebab-case and independent of the wording: ``gpu-out-of-memory``; empty if it finished, and in older records."""
    reason: str = ""
    suggestion: str = ""
    saved: str = ""
    """Checkpoint of the last state; empty if nothing was saved."""
    summary: dict[str, float] = {}
    """Medians over the measured steps of a benchmark."""


MetricRecord = (
    StartRecord
    | PhaseRecord
    | BindingRecord
    | StepRecord
    | CheckpointRecord
    | EvaluationRecord
    | WarningRecord
    | ResumedRecord
    | EndRecord
)


class Process(Struct, frozen=True, kw_only=True):
    """A process, identified even if its pid is reused."""

    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat, in clock ticks since boot."""
    role: Literal["supervisor", "runner", "launcher", "rank", "adam", "other"] = "other"
    rank: int | None = None


class Alert(Struct, frozen=True, kw_only=True):
    """Something that the run's user wants to be told."""

    kind: str
    """``settings.types.AlertName``; newer versions may have more."""
    attempt: int
    time: float
    step: int
    value: float | None = None
    """What was measured: the loss, the free bytes, the seconds without a step."""
    bound: float | None = None


class RunState(Struct, frozen=True, kw_only=True):
    """Content of ``state.json``, which only the supervisor writes, atomically."""

    v: int = SCHEMA
    name: str
    state: State
    attempt: int = 0
    host: str = ""
    boot_id: str = ""
    """Identifies the host's last start (``/proc/sys/kernel/random/boot_id``); empty in older states."""
    pid_namespace: int = 0
    """In which pids are meant (inode of ``/proc/self/ns/pid``); 0 in older states."""
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
    """Duration of the attempts before this one, without the time between them."""
    checks_s: float | None = None
    """Duration of the checks before the attempt was started; None if there were none, and in older states."""
    heartbeat: int = 0
    """Counter that increases while the supervisor is alive; readers time it with their own clock."""
    exit_code: int | None = None
    """Exit code of the run (0, 1, 4); None while it is alive."""
    saved_step: int | None = None
    saved_at: float | None = None
    forced: bool = False
    """Whether the run was started with --force although it does not fit the plan."""
    supervisor: Process | None = None
    processes: tuple[Process, ...] = ()
    alerts: tuple[Alert, ...] = ()
    """The last alerts, of all attempts, oldest first."""
    slowdown: Slowdown | None = None
    """While the attempt is slower than its plan."""
    ending: bool = False
    """Whether the trainer has done everything, or has failed, and only its processes still end."""

    @property
    def shown(self) -> str:
        """The state as people are told it."""
        return ENDING if self.ending else self.state

    @property
    def took_s(self) -> float | None:
        """Duration of all attempts; None before the end."""
        since = self.attempt_started or self.started
        return (
            None
            if since is None or self.ended is None
            else self.earlier_s + max(0.0, self.ended - since)
        )


prepare(RunState)
