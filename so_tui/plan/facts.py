"""What a plan says, as values: why it fits or not, what would change that, what is worth knowing. ``messages`` turns them into words.

In JSON each fact carries a ``code``. Plans of runs that were saved before facts were values hold texts in their place, so consumers accept
``Fact | str``.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from so_tui.machine.types import Network
from so_tui.model.activations import Policy
from so_tui.spec.attention import AttentionBackend, Obstacle
from so_tui.spec.errors import Problem
from so_tui.spec.types import StatesFormat

Mode = Literal["superoffload", "zerooffload", "gpu"]
"""Offload modes once ``auto`` is decided."""
MemoryPool = Literal["gpu", "node", "limit", "shm", "unknown"]
"""Memory that may run short: of each GPU, of CPU nodes, within the session's limit, /dev/shm. ``unknown`` in older files."""


def _code(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class _Fact(Struct, frozen=True, tag_field="code", tag=_code):
    """A fact of a plan; its ``code`` is the class's name in kebab case."""


# Why a run can never start here.


class AmdGpu(_Fact, frozen=True):
    """A GPU of AMD's with memory of its own. Only APUs are planned for."""

    gpu: int
    name: str


class ModeNeedsGpu(_Fact, frozen=True):
    """``offload.mode = gpu`` on a machine without GPUs."""

    machine: str


class EngineNeedsGpu(_Fact, frozen=True):
    """DeepSpeed's SuperOffload on a machine without GPUs."""


class TooFewGpus(_Fact, frozen=True):
    machine: str
    asked: int
    present: int


class NoSuchGpu(_Fact, frozen=True):
    machine: str
    asked: tuple[int, ...]
    missing: int
    present: tuple[int, ...]


class SequencesNotShareable(_Fact, frozen=True):
    """``train.sequence_parallel`` with attention that takes no document boundaries, or with heads that the ranks do not divide."""

    ranks: int
    backend: AttentionBackend
    heads: int
    key_heads: int


class NotBindable(_Fact, frozen=True):
    """The ranks cannot be bound to cores or GPUs."""

    problems: tuple[Problem, ...]


# What memory says.


class Shortage(_Fact, frozen=True):
    """A memory pool in which the margin is not left free; ``fatal`` when the pool is too small."""

    needs: int
    """Bytes, as ``has``."""
    has: int
    fatal: bool
    pool: MemoryPool = "unknown"
    nodes: tuple[int, ...] = ()
    """CPU nodes that are equally short."""


class NodeNeed(Struct, frozen=True):
    """CPU nodes with the same figures; the fullest of them gives the bytes."""

    nodes: tuple[int, ...]
    needs: int
    has: int


class MemoryNeeded(_Fact, frozen=True):
    """Memory of a plan that may run."""

    gpu_bytes: int
    gpu_capacity_bytes: int | None
    hosts: tuple[NodeNeed, ...]


# What would fit.


class Change(Struct, frozen=True):
    """One key of the spec, and its value before and after."""

    key: str
    before: str | int | float
    after: str | int | float


class FitsHere(_Fact, frozen=True):
    """Changes with which the run fits on the same GPUs."""

    changes: tuple[Change, ...]


class CompactStatesFit(_Fact, frozen=True):
    """A format of the moments in host memory with which the run fits on the same GPUs. Losses differ slightly from those with fp32."""

    states: StatesFormat
    saved_bytes: int
    """Of host memory, on all ranks of this machine."""


class MoreGpusFit(_Fact, frozen=True):
    gpus: int
    micro_batch: int | None = None
    """The smaller micro-batch that it takes there; None where the given one fits."""


class LargerHostFits(_Fact, frozen=True):
    """As many GH200 parts with more host memory."""

    gpus: int
    host_bytes: int
    needs_bytes: int
    """On the fullest node."""
    micro_batch: int | None = None


class MoreMachinesFit(_Fact, frozen=True):
    machines: int
    gpus: int
    micro_batch: int | None = None


class OtherMachineNeeded(_Fact, frozen=True):
    """On a machine without GPUs, where no setting fits."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    """Changes that need less memory, and how much less by the plan's arithmetic."""

    changes: tuple[Change, ...]
    saves_bytes: int


class MemoryAdvice(_Fact, frozen=True):
    """After memory ran out: what would need less, the least painful first; on each GPU, or on the host for each rank."""

    pool: Literal["gpu", "node"]
    savings: tuple[MemorySaving, ...]


# Why settings were chosen.

AutoReason = Literal[
    "no-gpu", "gpu-memory-unknown", "fits-on-gpu", "less-recomputation", "overlaps", "offload-does-not-fit", "gpu-does-not-fit"
]


class AutoMode(_Fact, frozen=True):
    """What ``offload.mode = auto`` became."""

    mode: Mode
    why: AutoReason
    ratio: float | None = None
    """Offload ratio of the alternative that does not fit."""
    shortage: Shortage | None = None
    """Of the alternative; None where it fits."""


class AutoCheckpointing(_Fact, frozen=True):
    """What ``model.activation_checkpointing = auto`` became."""

    policy: Policy


class TokensReached(_Fact, frozen=True):
    """The accumulation that comes nearest to ``train.tokens_per_step``."""

    accumulation: int
    target: int
    tokens: int
    tokens_per_pass: int


class ModeWithoutGpu(_Fact, frozen=True):
    mode: Mode


class AllOnGpu(_Fact, frozen=True):
    """Mode ``gpu`` was recommended."""


class NothingOffloaded(_Fact, frozen=True):
    """SuperOffload at ratio 0 was recommended."""


class LeastGpuMemory(_Fact, frozen=True):
    """The ratio that takes the least of a GPU whose memory is not known."""

    ratio: float


class SmallestRatio(_Fact, frozen=True):
    """The smallest ratio that leaves the margin, or at least fits; with what the given ratio would be."""

    ratio: float
    keeps_margin: bool
    given_ratio: float | None = None
    """Where it is worse than the chosen one."""
    given_shortage: Shortage | None = None
    given_step_s: float | None = None
    step_s: float | None = None


class FasterRatio(_Fact, frozen=True):
    """A larger ratio than the smallest that fits: Adam on the host is hidden, and the GPU has less to step."""

    ratio: float
    step_s: float
    smallest_ratio: float
    smallest_step_s: float


class CheckpointingChosen(_Fact, frozen=True):
    policy: Policy
    step_s: float | None = None
    full_step_s: float | None = None
    """With ``full`` instead."""


class MicroBatchChosen(_Fact, frozen=True):
    micro_batch: int
    accumulation: int
    given_micro_batch: int
    given_shortage: Shortage | None = None
    given_slower: float | None = None
    """How much longer a step would take with the given one, as a share."""


class AdamCoresChosen(_Fact, frozen=True):
    adam_cores: int
    cores: int
    fraction: float
    raised: bool
    """Whether that is more than was given."""


class OneMemory(_Fact, frozen=True):
    """CPU and GPU have the same memory: what one of them holds counts once, and offloading frees none."""


class StepsEarly(_Fact, frozen=True):
    """Gradient clipping with our engine: how much is stepped before the gradient norm is known."""

    share: float
    """Of the offloaded parameters."""
    bytes: int
    """Host memory per rank for that."""
    why_none: Literal["memory", "budget", "slower"] = "memory"
    """If nothing is: the host has no memory left, ``offload.speculation_gib`` is less than a sub-group needs, or it would gain nothing."""
    held_back_step_s: float | None = None
    """How long a step takes whose norm exceeds the limit; None where no speed is known."""


class SavesBehind(_Fact, frozen=True):
    """Checkpoints are written while training goes on."""

    share: float
    """Of the states, how much can be copied; training waits until the rest is written."""
    bytes: int
    """Host memory per rank for copies that second states do not hold."""


class SequencesShared(_Fact, frozen=True):
    """Ranks share each sequence, which would not fit on one of them."""

    ranks: int
    given: int


class MlpTiled(_Fact, frozen=True):
    """Feed-forward blocks compute some tokens at a time."""

    tile_tokens: int


class InputsOnHost(_Fact, frozen=True):
    """Inputs of checkpointed layers are in host memory between forward and backward."""

    bytes: int
    """Host memory per rank for them."""


class AttentionFallsBack(_Fact, frozen=True):
    """The attention backend of a run whose model or settings the fastest one does not support."""

    backend: AttentionBackend
    fastest: AttentionBackend
    obstacle: Obstacle


class SpeedUnknown(_Fact, frozen=True):
    """No settings were compared, because no speed is known."""


class NextBest(_Fact, frozen=True):
    mode: Mode
    ratio: float
    micro_batch: int
    policy: Policy
    slower: float
    """How much longer its step takes, as a share."""


class AcrossHosts(_Fact, frozen=True):
    """Weights, gradients and optimizer states are sharded over the ranks of several hosts, and travel between them."""

    machines: int
    ranks: int
    bytes_per_step: int
    """That enter each host, and leave it."""
    network: Network
    """Of each host."""
    seconds: float | None
    """What the network needs for them; None where the speed of the machine is not known."""
    longer_s: float | None
    """How much shorter the step would be if hosts were joined as the GPUs within one are."""


class CheckpointInterval(_Fact, frozen=True):
    """How often saving costs the least, with what failures make a run repeat."""

    minutes: float
    pause_s: float
    """For which training stands still for a checkpoint."""
    gpus: int
    failure_hours: float
    """Mean time between failures of all of them together."""
    given_minutes: float | None
    """What the spec sets; None if nothing is saved before the end."""


class NoNextBest(_Fact, frozen=True):
    fits: bool
    """Whether the chosen settings leave the margin."""


# What is worth knowing.


class ClippingWaits(_Fact, frozen=True):
    """DeepSpeed's SuperOffload overlaps nothing while it clips."""

    seconds: float | None
    """Of a step."""


class FasterOffload(_Fact, frozen=True):
    """A smaller ratio, or no offload, fits too and is faster."""

    mode: Mode
    ratio: float
    step_s: float
    given_step_s: float


class FasterAttention(_Fact, frozen=True):
    """An attention backend that is not installed would make steps noticeably faster."""

    backend: AttentionBackend
    used: AttentionBackend
    step_s: float
    given_step_s: float


class NeverRun(_Fact, frozen=True):
    """A kind of GPU on which the project has run nothing: what is said of it follows from publications."""

    name: str


class DeepSpeedNvidiaOnly(_Fact, frozen=True):
    """DeepSpeed's own SuperOffload on a GPU of another vendor."""


class PcieOffload(_Fact, frozen=True):
    """The GPU is connected by PCIe, where offloading gains less."""


class GpuMemoryUnknown(_Fact, frozen=True):
    pass


class SlowWithoutGpu(_Fact, frozen=True):
    parameters: int


class BeyondPositions(_Fact, frozen=True):
    """Sequences have room for documents that are longer than the model was made for."""

    sequence_length: int
    positions: int
    """Of the model (``max_position_embeddings``), times ``model.rope_factor``."""


class PackingOff(_Fact, frozen=True):
    """Each document is a sequence of its own, and attention takes a mask, so that padding is computed."""

    padding_share: float | None
    """Padding of all computed positions; of all positions where rows are not known; None where the data are not known."""
    mixing: tuple[str, ...]
    """Kinds of the model's layers because of which its documents cannot be packed; none where they could be."""


class RemoteCode(_Fact, frozen=True):
    """Every rank runs Python code that comes with the model, with the rights of the user."""

    model: str
    revision: str
    """Branch, tag or commit; empty for a folder of this host."""


class Note(_Fact, frozen=True):
    """A text from elsewhere, such as the inspection of the machine."""

    text: str


class LargerSteps(_Fact, frozen=True):
    """More tokens in an optimizer step would train faster."""

    step_s: float
    exposed_optimizer_s: float
    times: int
    tokens: int
    key: str
    value: int
    faster: float
    """Tokens per second, as a multiple of now."""


class MoreGpusKeepMargin(_Fact, frozen=True):
    gpus: int


Blocker = AmdGpu | ModeNeedsGpu | EngineNeedsGpu | TooFewGpus | NoSuchGpu | SequencesNotShareable | NotBindable
Need = Shortage | MemoryNeeded
Remedy = FitsHere | CompactStatesFit | MoreGpusFit | LargerHostFits | MoreMachinesFit | OtherMachineNeeded
Choice = (
    AutoMode
    | AutoCheckpointing
    | TokensReached
    | ModeWithoutGpu
    | AllOnGpu
    | NothingOffloaded
    | LeastGpuMemory
    | SmallestRatio
    | FasterRatio
    | CheckpointingChosen
    | MicroBatchChosen
    | AdamCoresChosen
    | OneMemory
    | StepsEarly
    | SavesBehind
    | MlpTiled
    | InputsOnHost
    | SequencesShared
    | AttentionFallsBack
    | AcrossHosts
    | CheckpointInterval
    | SpeedUnknown
    | NextBest
    | NoNextBest
)
Slower = ClippingWaits | FasterOffload | FasterAttention | PcieOffload | SlowWithoutGpu | PackingOff | LargerSteps
Untried = NeverRun | DeepSpeedNvidiaOnly
Caution = Untried | RemoteCode | BeyondPositions | Slower | GpuMemoryUnknown | Note | MoreGpusKeepMargin
Reason = Blocker | Need | Remedy | Choice
Fact = Reason | Caution | MemoryAdvice
