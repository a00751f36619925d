"""Why settings were chosen."""

from __future__ import annotations

from typing import Literal

from so_tui.machine.types import Network
from so_tui.model.activations import Policy
from so_tui.plan.facts.coded import CodedFact
from so_tui.plan.facts.memory import Shortage
from so_tui.spec.attention import AttentionBackend, Obstacle
from so_tui.spec.sections.offload import Mode

AutoReason = Literal[
    "no-gpu",
    "gpu-memory-unknown",
    "weights-on-host",
    "fits-on-gpu",
    "less-recomputation",
    "overlaps",
    "offload-does-not-fit",
    "gpu-does-not-fit",
]


Preference = Literal["no-offload", "given-micro-batch", "memory"]
"""What settings that are about as fast as others are preferred for: the first of these in which they differ."""


class AutoMode(CodedFact, frozen=True):
    """What ``offload.mode = auto`` became."""

    mode: Mode
    why: AutoReason
    ratio: float | None = None
    """Offload ratio of the alternative that does not fit."""
    shortage: Shortage | None = None
    """Of the alternative; None where it fits."""


class AutoCheckpointing(CodedFact, frozen=True):
    """What ``model.activation_checkpointing = auto`` became."""

    policy: Policy


class TokensReached(CodedFact, frozen=True):
    """The accumulation that comes nearest to ``train.tokens_per_step``."""

    accumulation: int
    target: int
    tokens: int
    tokens_per_pass: int


class ModeWithoutGpu(CodedFact, frozen=True):
    mode: Mode


class AllOnGpu(CodedFact, frozen=True):
    """Mode ``gpu`` was recommended."""


class NothingOffloaded(CodedFact, frozen=True):
    """SuperOffload at ratio 0 was recommended."""


class LeastGpuMemory(CodedFact, frozen=True):
    """The ratio that takes the least of a GPU whose memory is not known."""

    ratio: float


class SmallestRatio(CodedFact, frozen=True):
    """The smallest ratio that leaves the margin, or at least fits; with what the given ratio would be."""

    ratio: float
    keeps_margin: bool
    given_ratio: float | None = None
    """Where it is worse than the chosen one."""
    given_shortage: Shortage | None = None
    given_step_s: float | None = None
    step_s: float | None = None


class FasterRatio(CodedFact, frozen=True):
    """A larger ratio than the smallest that fits: Adam on the host is hidden, and the GPU has less to step."""

    ratio: float
    step_s: float
    smallest_ratio: float
    smallest_step_s: float
    alike: bool = False
    """Whether the two are about as fast: the difference is smaller than the error of such predictions."""
    more_gpu_bytes: int = 0
    """Memory of each GPU that it leaves beyond what the smallest does."""


class CheckpointingChosen(CodedFact, frozen=True):
    policy: Policy
    step_s: float | None = None
    full_step_s: float | None = None
    """With ``full`` instead."""


class MicroBatchChosen(CodedFact, frozen=True):
    micro_batch: int
    accumulation: int
    given_micro_batch: int
    given_shortage: Shortage | None = None
    given_slower: float | None = None
    """How much longer a step would take with the given one, as a share."""


class AdamCoresChosen(CodedFact, frozen=True):
    adam_cores: int
    cores: int
    fraction: float
    raised: bool
    """Whether that is more than was given."""


class OneMemory(CodedFact, frozen=True):
    """CPU and GPU have the same memory: what one of them holds counts once, and offloading frees none."""


class StepsEarly(CodedFact, frozen=True):
    """Gradient clipping with our engine: how much is stepped before the gradient norm is known."""

    share: float
    """Of the offloaded parameters."""
    bytes: int
    """Host memory per rank for that."""
    why_none: Literal["memory", "budget", "slower"] = "memory"
    """If nothing is: the host has no memory left, ``offload.speculation_gib`` is less than a sub-group needs, or it would gain nothing."""
    held_back_step_s: float | None = None
    """How long a step takes whose norm exceeds the limit; None where no speed is known."""


class SavesBehind(CodedFact, frozen=True):
    """Checkpoints are written while training goes on."""

    share: float
    """Of the states, how much can be copied; training waits until the rest is written."""
    bytes: int
    """Host memory per rank for copies that second states do not hold."""


class SequencesShared(CodedFact, frozen=True):
    """Ranks share each sequence, which would not fit on one of them."""

    ranks: int
    given: int


class MlpTiled(CodedFact, frozen=True):
    """Feed-forward blocks compute some tokens at a time."""

    tile_tokens: int


class InputsOnHost(CodedFact, frozen=True):
    """Inputs of checkpointed layers are in host memory between forward and backward, and attention's results where they are kept."""

    bytes: int
    """Host memory per rank for the inputs."""
    results_bytes: int = 0
    """Host memory per rank for attention's results."""
    out_s: float | None = None
    """Seconds of copying both to the host in the forward pass of a micro-batch, where the speed is known."""
    back_s: float | None = None
    """Seconds of copying both back in its backward pass."""
    exposed_s: float = 0.0
    """By how much that makes a step longer."""


class WeightsOnHost(CodedFact, frozen=True):
    """Weights are in host memory, and copied to the GPU layer by layer."""

    bytes: int
    """Host memory per rank for them."""
    fetched_s: float | None = None
    """Seconds of copying them once, where the speed is known."""
    pass_s: float | None = None
    """Seconds of the shorter of the two passes of a micro-batch, each of which copies them."""


class AttentionFallsBack(CodedFact, frozen=True):
    """The attention backend of a run whose model or settings the fastest one does not support."""

    backend: AttentionBackend
    fastest: AttentionBackend
    obstacle: Obstacle


class SpeedUnknown(CodedFact, frozen=True):
    """No settings were compared, because no speed is known."""


class AcrossHosts(CodedFact, frozen=True):
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


class CheckpointInterval(CodedFact, frozen=True):
    """How often saving costs the least, with what failures make a run repeat."""

    minutes: float
    pause_s: float
    """For which training stands still for a checkpoint."""
    gpus: int
    failure_hours: float
    """Mean time between failures of all of them together."""
    given_minutes: float | None
    """What the spec sets; None if nothing is saved before the end."""


class NextBest(CodedFact, frozen=True):
    """The fastest of the settings that were not chosen."""

    mode: Mode
    ratio: float
    micro_batch: int
    policy: Policy
    slower: float
    """How much longer its step takes, as a share; negative where it is the shorter one."""
    alike: bool = False
    """Whether the two are about as fast: the difference is smaller than the error of such predictions."""
    chosen_for: Preference | None = None
    """Where both are, why the chosen ones are preferred; None where that is their speed."""
    more_gpu_bytes: int = 0
    """Memory of each GPU that the chosen ones leave beyond what it does."""
    on_host: bool = False
    """Whether what layers keep is in host memory."""


class NoNextBest(CodedFact, frozen=True):
    fits: bool
    """Whether the chosen settings leave the margin."""


Recommended = (
    ModeWithoutGpu
    | AllOnGpu
    | NothingOffloaded
    | LeastGpuMemory
    | SmallestRatio
    | FasterRatio
    | CheckpointingChosen
    | MicroBatchChosen
    | AdamCoresChosen
    | SequencesShared
    | SpeedUnknown
    | NextBest
    | NoNextBest
)
"""What a search chose, for a recommendation."""
Settled = (
    AutoMode
    | AutoCheckpointing
    | TokensReached
    | OneMemory
    | StepsEarly
    | SavesBehind
    | MlpTiled
    | InputsOnHost
    | WeightsOnHost
    | AttentionFallsBack
    | AcrossHosts
    | CheckpointInterval
)
"""What became of what any spec leaves open, and what follows from it."""
Choice = Recommended | Settled
