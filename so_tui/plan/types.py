"""Results of planning: frozen, JSON-ready, the same for the table, the Configure screen, the dry run and the trainer."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from so_tui.machine.cpulist import cpu_ranges
from so_tui.spec.types import RunSpec
from so_tui.structs import prepare

Verdict = Literal["fits", "tight", "does not fit"]
Mode = Literal["superoffload", "zerooffload", "gpu"]
"""Offload modes once ``auto`` is decided."""
Place = Literal["gpu", "node", "shm", "disk"]
Confidence = Literal["exact", "calibrated", "estimate"]
"""Follows from the parameter table and the code; measured and kept as data; worked out from what the code is known to do."""
Phase = Literal["loss", "backward", "optimizer"]
"""The parts of a step that differ in what they hold."""


class MemoryPolicy(Struct, frozen=True, kw_only=True):
    """Where a rank's host memory may come from, in set_mempolicy(2) terms."""

    mode: Literal["bind", "preferred", "default"]
    nodes: tuple[int, ...] = ()


class DeepSpeedBinding(Struct, frozen=True, kw_only=True):
    """What DeepSpeed's launcher does for a rank under ``--bind_cores_to_rank``."""

    cpus: tuple[int, ...]
    numactl: tuple[str, ...]
    """The numactl prefix; empty where the launcher is started without ``--bind_cores_to_rank``."""
    omp_num_threads: int
    matches: bool
    """Whether that is already what the plan wants."""
    error: str = ""
    """Why the launcher would end instead of starting the ranks."""

    @property
    def in_words(self) -> str:
        """For a table: ``the same``, the numactl prefix, or what goes wrong."""
        if self.error:
            return f"ends: {self.error}"
        return "the same" if self.matches else " ".join(self.numactl) or f"unbound, cores {cpu_ranges(self.cpus)}"


class RankBinding(Struct, frozen=True, kw_only=True):
    rank: int
    gpu: int | None
    numa_node: int | None
    cpus: tuple[int, ...]
    main_cpus: tuple[int, ...]
    """Cores of the training process; part of ``cpus``."""
    adam_cpus: tuple[int, ...]
    """Cores of the Adam worker (superoffload); empty in the other modes, where ``main_cpus`` is all of ``cpus``."""
    memory_policy: MemoryPolicy
    deepspeed: DeepSpeedBinding
    """With the core list that we hand it."""
    alone: DeepSpeedBinding | None = None
    """Without it, as its own users start it: all physical cores of the machine, cut into equal slices."""


class MemoryTerm(Struct, frozen=True):
    """One term of the arithmetic. ``gpu`` and ``node`` terms are per rank; ``shm`` and ``disk`` for the whole host."""

    name: str
    place: Place
    bytes: int
    confidence: Confidence
    formula: str
    """The arithmetic in words and numbers, for people."""
    rank: int | None = None
    """The only rank that has this term; None when every rank does."""
    phase: Phase | None = None
    """The phase of a step that holds it; None for what is always there. A plan lists the terms of the fullest phase."""


class Workload(Struct, frozen=True, kw_only=True):
    """What of the data decides how long a step takes; the defaults are the most it can be."""

    attended_tokens: float = 0.0
    """Mean document length as attention feels it: the sum of squared lengths over the sum of lengths; 0: whole sequences."""
    trained_share: float = 1.0
    """Tokens that carry loss, of all positions."""
    useful_share: float = 1.0
    """Tokens that are no padding, of all positions."""


class StepTime(Struct, frozen=True, kw_only=True):
    """Predicted seconds of one optimizer step."""

    forward_s: float
    backward_s: float
    exposed_optimizer_s: float
    data_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.exposed_optimizer_s + self.data_s


class Shortage(Struct, frozen=True):
    """One place where the margin is not kept; ``fatal`` when the memory itself is not enough."""

    place: str
    needs: int
    """Bytes, as ``has``."""
    has: int
    fatal: bool


class Plan(Struct, frozen=True, kw_only=True):
    """A RunSpec on a Machine."""

    preset: str
    gpus: int
    mode: Mode
    ratio: float
    fits: bool
    verdict: Verdict
    possible: bool = True
    """False when it cannot run here whatever the memory (no such GPU, a mode this machine has not): forcing it is no help."""
    recommended: bool = False
    reasons: tuple[str, ...]
    """Why the verdict is what it is, most important first; with numbers, and the remedy where it does not fit."""
    remedies: tuple[str, ...] = ()
    """Those of the reasons that say what would make it fit, the least painful first."""
    warnings: tuple[str, ...]
    shortage: Shortage | None = None
    """The worst, where the margin is not kept."""
    gpu_bytes: int
    """Peak per GPU (0 on a machine without GPUs)."""
    gpu_reserved_bytes: int = 0
    """Of these, what torch's allocator reserves: all but the driver's and NCCL's share."""
    gpu_capacity_bytes: int | None
    host_bytes_per_node: dict[int, int]
    host_capacity_bytes_per_node: dict[int, int]
    shm_bytes: int
    disk_bytes: int
    """One checkpoint, with the export where one is asked for."""
    disk_peak_bytes: int = 0
    """What the run may take at once: the checkpoints it keeps, and the one being written."""
    breakdown: tuple[MemoryTerm, ...]
    step: StepTime | None
    """None where nothing is known of this machine's speed."""
    step_s: float | None
    tokens_per_step: int
    """Sequence positions of one optimizer step, all ranks."""
    useful_tokens_per_s_total: float | None
    model_tflops_per_gpu: float | None
    speed_source: str = ""
    """Where the constants behind the prediction come from; empty without one."""
    binding: tuple[RankBinding, ...]
    spec: RunSpec
    """The spec as it will run: mode resolved, the host's indices filled in."""


prepare(Plan)


class PlanRow(Struct, frozen=True, kw_only=True):
    """One line of the models x GPU counts table."""

    preset: str
    title: str
    parameters: int
    active_parameters: int
    """What a token meets; less than ``parameters`` in mixture-of-experts models."""
    sequence_length: int
    cells: dict[int, Plan]
    """GPU count (ranks on a machine without GPUs) -> the best plan there; ``recommended`` marks at most one of them."""
