"""Records of a run, which rank 0 appends as lines of JSON, and ``state.json``. Samples of a host
are in ``sample``.

Readers accept unknown fields and skip unknown kinds, so a newer writer does not break an older
screen. Times are in Unix seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from so_tui.trust.decoding import decoded, prepare

# That a run is slower than its plan, and why: values that a supervisor finds and ``state.json``
# carries.
#
# ``so_tui/launch/supervisor/slowness.py`` finds causes, ``so_tui/launch/supervisor/slowness.py``
# has the words.


class Cause(Struct, frozen=True, kw_only=True):
    """One thing that makes steps longer than planned."""

    code: str
    """A key of the remedies in ``slowness.py``; newer versions may have more."""
    seconds: float
    """Of a step, the most that it explains."""
    measured: float
    """In the unit of the code: misplaced ranks for ``binding``, a share of memory for
    ``memory-node``, a share of core time for ``foreign-load``, MHz for ``clocks``, a share of steps
    for ``clipping`` (planned: seconds of such a step), bytes per second for ``copies`` and
    ``adam``, seconds for ``data``.
    """
    planned: float
    rank: int = 0
    """Of ``binding`` and ``memory-node``: the first, or the worst, of the ranks that are
    misplaced.
    """
    processes: tuple[str, ...] = ()
    """Of ``foreign-load``: the names of the busiest, which their owners chose."""
    nice: int = 0
    """Of ``foreign-load``: the lowest priority of the run's processes, to which other processes are
    preferred.
    """


class Slowdown(Struct, frozen=True, kw_only=True):
    """Steps have taken noticeably longer than planned for a while."""

    step: int
    """The last step that was looked at."""
    step_s: float
    """Median over that while."""
    planned_s: float
    causes: tuple[Cause, ...] = ()
    """Most likely first; empty if nothing that is measured explains it."""


SCHEMA = 1
_MOST = 2**53
"""The largest integer of a record: larger ones are not exact as floats, with which charts are
drawn.
"""
_LATEST = 1e11
"""Unix seconds of the year 5138, before the years that Python's ``datetime`` cannot show."""
Count = Annotated[int, Meta(ge=0, le=_MOST)]
"""An integer that a run can have: readers compute with it."""
Time = Annotated[float, Meta(ge=0, lt=_LATEST)]
"""Seconds since the epoch that can be shown as a date."""

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


class _Record(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag=lambda name: name.removesuffix("Record").lower(),
):
    """Fields of every record."""

    v: Count = SCHEMA
    attempt: Count
    time: Time


class StartRecord(_Record, frozen=True, kw_only=True):
    """First record of an attempt: model, settings and hardware."""

    model: str
    mode: str
    ranks: Count
    total_steps: Count
    parameters: Count
    gradient_accumulation_steps: Count = 0
    """Micro-batches per optimizer step, which may follow from ``train.tokens_per_step``; 0 in
    records of older versions.
    """
    tokens_per_step: Count = 0
    """Sequence positions of an optimizer step on all ranks."""
    hostnames: tuple[str, ...] = ()
    device_name: str = ""
    peak_tflops_per_gpu: float | None = None
    versions: dict[str, str] = {}


class PhaseRecord(_Record, frozen=True, kw_only=True):
    """The trainer entered a phase; ``detail`` describes it in a few words."""

    phase: Literal["loading", "training", "saving"]
    detail: str = ""
    stage: str = ""
    """Part of loading: ``imports``, ``ranks``, ``data``, ``weights``, ``optimizer``,
    ``checkpoint``. ``ending`` once all is done and saved. Otherwise empty.
    """
    done: Count = 0
    """Files of weights that have been read, of ``total``; both are 0 in other stages."""
    total: Count = 0


Cpus = tuple[int, ...]


class RankBindingReport(Struct, frozen=True, kw_only=True):
    """Cores and memory policy of one rank, at its start and after binding."""

    rank: int
    host: str
    pid: int
    gpu: int | None
    found_cpus: Cpus
    """Cores at the start, as DeepSpeed's launcher set them."""
    cpus: Cpus
    main_cpus: Cpus
    adam_cpus: Cpus
    found_memory_policy: str
    memory_policy: str
    corrected: bool
    problem: str = ""
    """Why the planned binding failed (such as a forbidden system call); empty if it succeeded."""


class BindingRecord(_Record, frozen=True, kw_only=True):
    """The binding of all ranks."""

    ranks: tuple[RankBindingReport, ...]


class StepRecord(_Record, frozen=True, kw_only=True):
    """One optimizer step. ``docs/metrics.md`` defines the fields."""

    step: Count
    loss: float
    learning_rate: float
    gradient_norm: float | None
    useful_tokens: Count
    trained_tokens: Count
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
    gpu_memory_peak_bytes: Count | None
    host_memory_bytes: Count | None
    slowest_rank: Count
    adam_busy_s: float | None = None
    adam_bytes_per_s: float | None = None
    """Host memory traffic of rank 0's Adam worker while it computes."""
    d2h_bytes_per_s: float | None = None
    """Rate of rank 0's copies of gradients to the host, while they run."""
    h2d_bytes_per_s: float | None = None
    """The same of new weights to the GPU."""
    router_loss: float | None = None
    """Load-balancing loss of mixture-of-experts models without its coefficient. ``loss`` does not
    include it.
    """
    kept_steps: Count = 0
    """Steps of this attempt so far in which sub-groups were stepped before the gradient norm was
    known, and that was final.
    """
    redone_steps: Count = 0
    """Those in which the norm exceeded the limit, so that the sub-groups were stepped again."""
    skipped_steps: Count = 0
    """Steps of this attempt so far that were not taken, because a gradient was not finite."""


class CheckpointRecord(_Record, frozen=True, kw_only=True):
    """A checkpoint was saved."""

    step: Count
    path: str
    bytes: Count
    seconds: float
    """From its beginning until it was proven readable."""
    paused_s: float | None = None
    """The part of ``seconds`` for which training stood still; None in records of older versions,
    which means all of it.
    """
    written_s: float | None = None
    """The part of ``seconds`` until every rank had its states on the disk: the rest verified it and
    removed older ones. None in records of older versions.
    """
    due_step: Count | None = None
    """The step after which it fell due, if it had to wait for the one before to be written; None if
    it did not wait.
    """


class EvaluationRecord(_Record, frozen=True, kw_only=True):
    """Loss on held-out documents after ``step`` steps."""

    step: Count
    loss: float
    """Mean over their trained tokens on all ranks."""
    perplexity: float | None = None
    """exp(loss)"""
    tokens: Count
    seconds: float = 0.0


class WarningRecord(_Record, frozen=True, kw_only=True):
    """Something that the user should know, while training continues."""

    code: str = ""
    """What the warning is about, in kebab-case and independent of the wording; empty in older
    records.
    """
    message: str
    suggestion: str = ""


class ResumedRecord(_Record, frozen=True, kw_only=True, tag="resumed_from_step"):
    """Training resumed from ``step``: later steps of earlier attempts are superseded."""

    step: Count


class EndRecord(_Record, frozen=True, kw_only=True):
    """How the trainer ended. Without this record, a run is not ``finished``."""

    state: Literal["finished", "stopped", "failed"]
    step: Count
    code: str = ""
    """Why it ended, in kebab-case and independent of the wording: ``gpu-out-of-memory``; empty if
    it finished, and in older records.
    """
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


Role = Literal["supervisor", "runner", "launcher", "rank", "adam", "other"]


class Process(Struct, frozen=True, kw_only=True):
    """A process, identified even if its pid is reused."""

    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat, in clock ticks since boot."""
    role: Role = "other"
    rank: int | None = None


class Alert(Struct, frozen=True, kw_only=True):
    """Something that the run's user wants to be told."""

    kind: str
    """``settings.types.AlertName``; newer versions may have more."""
    attempt: Count
    time: Time
    step: Count
    value: float | None = None
    """What was measured: the loss, the free bytes, the seconds without a step."""
    bound: float | None = None


Alerts = tuple[Alert, ...]


class RunState(Struct, frozen=True, kw_only=True):
    """Content of ``state.json``, which only the supervisor writes, atomically."""

    v: int = SCHEMA
    name: str
    state: State
    attempt: Count = 0
    host: str = ""
    boot_id: str = ""
    """Identifies the host's last start (``/proc/sys/kernel/random/boot_id``); empty in older
    states.
    """
    pid_namespace: int = 0
    """In which pids are meant (inode of ``/proc/self/ns/pid``); 0 in older states."""
    step: Count = 0
    total_steps: Count = 0
    loss: float | None = None
    detail: str = ""
    reason: str = ""
    suggestion: str = ""
    code: str = ""
    """How it ended and why (``OutcomeCode``, or the trainer's own code); empty before the end and
    in older states.
    """
    started: Time | None = None
    ended: Time | None = None
    attempt_started: Time | None = None
    earlier_s: float = 0.0
    """Duration of the attempts before this one, without the time between them."""
    checks_s: float | None = None
    """Duration of the checks before the attempt was started; None if there were none, and in older
    states.
    """
    heartbeat: Count = 0
    """Counter that increases while the supervisor is alive; readers time it with their own
    clock.
    """
    exit_code: int | None = None
    """Exit code of the run (0, 1, 4); None while it is alive."""
    saved_step: Count | None = None
    saved_at: Time | None = None
    forced: bool = False
    """Whether the run was started with --force although it does not fit the plan."""
    supervisor: Process | None = None
    processes: tuple[Process, ...] = ()
    alerts: Alerts = ()
    """The last alerts, of all attempts, oldest first."""
    slowdown: Slowdown | None = None
    """While the attempt is slower than its plan."""
    disk_full: bool = False
    """Whether the disk takes no more: records of later steps are lost."""
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


# Where the ranks of a run really are: values that a supervisor measures.


class RankPlacement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one rank's processes really are."""

    rank: int
    cpus: Cpus
    """CPUs on which any thread of the training process may run."""
    adam_cpus: Cpus = ()
    """The same of its Adam worker; empty without one."""
    node_bytes: dict[int, int] = {}
    """NUMA node -> bytes of both, files not counted."""
    nice: int = 0
    """The lowest priority of both; 20 stands for the scheduling class ``idle``."""


Placements = tuple[RankPlacement, ...]


# Records of a host, which its supervisor appends as lines of JSON. As with ``records``, readers
# accept unknown fields.


class NodeSample(Struct, frozen=True, kw_only=True):
    """Load of one NUMA node."""

    id: int
    cores: tuple[int, ...]
    """Load of each CPU of the node in percent, in ascending order of CPUs."""
    memory_used_bytes: int
    memory_total_bytes: int
    file_cache_bytes: int


class GpuSample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load of one GPU; None, and absent from files, where the driver does not report a value."""

    index: int
    busy_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    clock_mhz: int | None = None
    temperature_c: int | None = None
    c2c_to_gpu_bytes_per_s: float | None = None
    c2c_to_host_bytes_per_s: float | None = None
    pcie_to_gpu_bytes_per_s: float | None = None
    pcie_to_host_bytes_per_s: float | None = None
    clock_max_mhz: int | None = None
    power_limit_w: float | None = None
    """What the driver enforces."""
    module_power_w: float | None = None
    """Of the whole superchip: on Grace Hopper, CPU and GPU share one limit."""
    module_power_limit_w: float | None = None
    throttling: tuple[str, ...] = ()
    """Why its clock is held below what it could be: ``power``, ``heat``, ``power-brake``,
    ``hardware``; newer versions may have more.
    """


class ForeignProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that computes on the host and does not belong to the run."""

    pid: int
    name: str
    """As the kernel has it, at most 15 bytes. Its owner chose it."""
    cores: float
    """CPU seconds per second."""
    cpu: int | None = None
    """The CPU that it ran on last."""
    own: bool = False
    """Whether it belongs to the user of the run."""


ForeignProcesses = tuple[ForeignProcess, ...]


class Sample(Struct, frozen=True, kw_only=True):
    """One measurement of a host, about once a second."""

    v: int = SCHEMA
    attempt: int
    time: Time
    interval_s: float
    nodes: tuple[NodeSample, ...]
    gpus: tuple[GpuSample, ...] = ()
    run_cpu_s: float = 0.0
    """CPU seconds that the processes of the run used in the interval."""
    run_memory_peak_bytes: int | None = None
    """Peak memory of the run's processes so far, from the kernel's high-water marks, which include
    peaks of any length.
    """
    supervisor_cpu_s: float = 0.0
    foreign: ForeignProcesses = ()
    """The busiest other processes, looked for less often than each second and only while others
    compute; the busiest first.
    """
    placement: Placements = ()
    """In one sample of several, as it is measured less often."""


class Rollup(Struct, frozen=True, kw_only=True):
    """Mean of several consecutive samples; ``mean.time`` is the end of the interval."""

    v: int = SCHEMA
    samples: int
    """Number of samples."""
    mean: Sample


# Encode records as lines and decode them.
#
# JSON has no NaN or infinity, but a diverged loss must be recorded: non-finite floats are written
# as the strings ``"nan"``, ``"inf"`` and ``"-inf"`` and read back as floats. ``null`` means that a
# value was not measured.


_encoder = msgspec.json.Encoder()
T = TypeVar("T")


def encode_line(record: msgspec.Struct) -> bytes:
    """Return a record as one JSON object with a newline."""
    line = _encoder.encode(record)
    if b"null" in line:  # msgspec writes non-finite floats as null, like None
        line = _encoder.encode(_spelled(msgspec.to_builtins(record)))
    return line + b"\n"


_SHORTEST_LINE = 16
"""Bytes of a record: its kind and its time take more."""


def _decoding(decoder: msgspec.json.Decoder[T]) -> Callable[[bytes], T | None]:
    """Return a function that decodes a line; None for an incomplete or implausible line or an
    unknown kind.
    """

    def decode(line: bytes) -> T | None:
        if len(line) < _SHORTEST_LINE:  # such as an empty one: failing costs ten times as much
            return None
        try:
            return decoded(decoder, line)
        except msgspec.DecodeError:
            return None

    return decode


_metrics: msgspec.json.Decoder[MetricRecord] = msgspec.json.Decoder(MetricRecord, strict=False)
decode_metric = _decoding(_metrics)
decode_sample = _decoding(msgspec.json.Decoder(Sample))
decode_rollup = _decoding(msgspec.json.Decoder(Rollup))


def _spelled(value: Any) -> Any:
    """Return the same value with every non-finite float as a string."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# Why runs end, as codes that do not depend on the wording beside them.
#
# The supervisor writes one into ``state.json``. A failure that the trainer reported keeps the
# trainer's code, which may also be that of a problem with the input (``Problem.code``) or one of a
# newer version.


class OutcomeCode(StrEnum):
    """How a run ended, and why."""

    FINISHED = "finished"
    STOPPED = "stopped"
    OUT_OF_GPU_MEMORY = "gpu-out-of-memory"
    OUT_OF_HOST_MEMORY = "host-out-of-memory"
    """An allocation failed."""
    KILLED_FOR_MEMORY = "killed-for-memory"
    """The kernel's out-of-memory killer ended a process."""
    DISK_FULL = "disk-full"
    NON_FINITE = "not-finite"
    """A loss or a gradient was not finite."""
    ADAM_WORKER_LOST = "adam-worker-lost"
    ADAM_TIMEOUT = "adam-timeout"
    """The Adam worker made no progress for too long."""
    RANK_LOST = "rank-lost"
    """A signal ended a rank."""
    LAUNCHER_LOST = "launcher-lost"
    RUNNER_LOST = "runner-lost"
    """The process that starts DeepSpeed's launcher."""
    UNEXPECTED = "unexpected"
    """A process ended with an error that has no code of its own."""
    ERROR = "error"
    """An error of so-tui or its engine that has no code of its own; its message says what to do."""
    MODULE_MISSING = "module-missing"
    NUMACTL_FAILED = "numactl-failed"
    PORT_IN_USE = "port-in-use"
    GPU_IN_USE = "gpu-in-use"
    HOST_DIFFERS = "host-differs"
    """The host is not the one that the launch was planned for."""
    FOLDER_EXCHANGED = "folder-exchanged"
    """Another folder got the name of the run directory."""
    NOT_STARTED = "not-started"
    """The processes could not be started for another reason."""
    STOP_OVERDUE = "stop-overdue"
    """A requested stop took longer than its grace time."""
    UNOBSERVED = "unobserved"
    """Everything was gone when a supervisor looked, without the trainer's end record."""
    OUT_OF_TIME = "out-of-time"
    """The scheduler ended the job at its time limit."""
    PREEMPTED = "preempted"
    """The scheduler ended the job in favour of another."""
    NODE_FAILED = "node-failed"
    NODE_LOST = "node-lost"
    """The supervisor of another node of the run gave no sign of life."""
    SLOW_NETWORK = "slow-network"
    """NCCL fell back to TCP sockets between nodes, where the site has a faster network."""
    JOB_CANCELLED = "job-cancelled"
    """Somebody took the job out of the scheduler's queue, or ended it."""
    JOB_FAILED = "job-failed"
    """The job ended before its supervisor could record why."""
    JOB_FORGOTTEN = "job-forgotten"
    """The scheduler does not know the job any more, and the run directory does not say how it
    ended.
    """
