"""Why settings were chosen, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, assert_never

from msgspec import Struct

from so_tui.machine.types import Network
from so_tui.model.profile import Policy
from so_tui.plan.rates import ALIKE, network_rate_text
from so_tui.spec.attention import MASKED_BACKENDS, OBSTACLES, AttentionBackend, Obstacle
from so_tui.spec.errors import Problem
from so_tui.spec.run_spec import Mode, StatesFormat
from so_tui.trust.text import printable_line
from so_tui.units import duration, memory_size, plural, thousands

# The base of facts: in JSON each carries a ``code``.


def _code(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class CodedFact(Struct, frozen=True, tag_field="code", tag=_code):
    """A fact of a plan; its ``code`` is the class's name in kebab case."""


# Why a run can never start here.


class AmdGpu(CodedFact, frozen=True):
    """A GPU of AMD's with memory of its own. Only APUs are planned for."""

    gpu: int
    name: str


class ModeNeedsGpu(CodedFact, frozen=True):
    """``offload.mode = gpu`` on a machine without GPUs."""

    machine: str


class EngineNeedsGpu(CodedFact, frozen=True):
    """DeepSpeed's SuperOffload on a machine without GPUs."""


class TooFewGpus(CodedFact, frozen=True):
    machine: str
    asked: int
    present: int


class NoSuchGpu(CodedFact, frozen=True):
    machine: str
    asked: tuple[int, ...]
    missing: int
    present: tuple[int, ...]


class SequencesNotShareable(CodedFact, frozen=True):
    """``train.sequence_parallel`` with attention that takes no document boundaries, or with heads that the ranks do not divide."""

    ranks: int
    backend: AttentionBackend
    heads: int
    key_heads: int


class NotBindable(CodedFact, frozen=True):
    """The ranks cannot be bound to cores or GPUs."""

    problems: tuple[Problem, ...]


Blocker = (
    AmdGpu
    | ModeNeedsGpu
    | EngineNeedsGpu
    | TooFewGpus
    | NoSuchGpu
    | SequencesNotShareable
    | NotBindable
)


# What is worth knowing of a plan that may run.


class NeverRun(CodedFact, frozen=True):
    """A kind of GPU on which the project has run nothing: what is said of it follows from publications."""

    name: str


class DeepSpeedNvidiaOnly(CodedFact, frozen=True):
    """DeepSpeed's own SuperOffload on a GPU of another vendor."""


Untried = NeverRun | DeepSpeedNvidiaOnly


class ClippingWaits(CodedFact, frozen=True):
    """DeepSpeed's SuperOffload overlaps nothing while it clips."""

    seconds: float | None
    """Of a step."""


class FasterOffload(CodedFact, frozen=True):
    """A smaller ratio, or no offload, fits too and is faster."""

    mode: Mode
    ratio: float
    step_s: float
    given_step_s: float


class FasterAttention(CodedFact, frozen=True):
    """An attention backend that is not installed would make steps noticeably faster."""

    backend: AttentionBackend
    used: AttentionBackend
    step_s: float
    given_step_s: float


class FasterStates(CodedFact, frozen=True):
    """A smaller format of the moments makes steps faster: the host has memory for more second states then. Losses differ slightly."""

    states: StatesFormat
    step_s: float
    given_step_s: float
    early_share: float
    """Of the offloaded parameters, those that would be stepped before the gradient norm is known."""
    given_early_share: float


class PcieOffload(CodedFact, frozen=True):
    """The GPU is connected by PCIe, where offloading gains less."""


class SlowWithoutGpu(CodedFact, frozen=True):
    parameters: int


class PackingOff(CodedFact, frozen=True):
    """Each document is a sequence of its own, and attention takes a mask, so that padding is computed."""

    padding_share: float | None
    """Padding of all computed positions; of all positions where rows are not known; None where the data are not known."""
    mixing: tuple[str, ...]
    """Kinds of the model's layers because of which its documents cannot be packed; none where they could be."""


class LargerSteps(CodedFact, frozen=True):
    """More tokens in an optimizer step would train faster."""

    step_s: float
    exposed_optimizer_s: float
    times: int
    tokens: int
    key: str
    value: int
    faster: float
    """Tokens per second, as a multiple of now."""


Slower = (
    ClippingWaits
    | FasterOffload
    | FasterStates
    | FasterAttention
    | PcieOffload
    | SlowWithoutGpu
    | PackingOff
    | LargerSteps
)


class RemoteCode(CodedFact, frozen=True):
    """Every rank runs Python code that comes with the model, with the rights of the user."""

    model: str
    revision: str
    """Branch, tag or commit; empty for a folder of this host."""


class BeyondPositions(CodedFact, frozen=True):
    """Sequences have room for documents that are longer than the model was made for."""

    sequence_length: int
    positions: int
    """Of the model (``max_position_embeddings``), times ``model.rope_factor``."""


class IndexersUntrained(CodedFact, frozen=True):
    """Sparse attention's indexers get no gradient: they stay as they are."""

    parameters: int


class GpuMemoryUnknown(CodedFact, frozen=True):
    pass


class Note(CodedFact, frozen=True):
    """A text from elsewhere, such as the inspection of the machine."""

    text: str


class MoreGpusKeepMargin(CodedFact, frozen=True):
    gpus: int


Caution = (
    Untried
    | RemoteCode
    | BeyondPositions
    | IndexersUntrained
    | Slower
    | GpuMemoryUnknown
    | Note
    | MoreGpusKeepMargin
)


# What memory a plan needs, and where it runs short.


MemoryPool = Literal["gpu", "node", "limit", "shm", "unknown"]
"""Memory that may run short: of each GPU, of CPU nodes, within the session's limit, /dev/shm. ``unknown`` in older files."""


class Shortage(CodedFact, frozen=True):
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


class MemoryNeeded(CodedFact, frozen=True):
    """Memory of a plan that may run."""

    gpu_bytes: int
    gpu_capacity_bytes: int | None
    hosts: tuple[NodeNeed, ...]


Need = Shortage | MemoryNeeded


# Why settings were chosen.


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


# What would fit, and what would need less memory.


class Change(Struct, frozen=True):
    """One key of the spec, and its value before and after."""

    key: str
    before: str | int | float
    after: str | int | float


class FitsHere(CodedFact, frozen=True):
    """Changes with which the run fits on the same GPUs."""

    changes: tuple[Change, ...]


class CompactStatesFit(CodedFact, frozen=True):
    """A format of the moments in host memory with which the run fits on the same GPUs. Losses differ slightly from those with fp32."""

    states: StatesFormat
    saved_bytes: int
    """Of host memory, on all ranks of this machine."""


class MoreGpusFit(CodedFact, frozen=True):
    gpus: int
    micro_batch: int | None = None
    """The smaller micro-batch that it takes there; None where the given one fits."""


class LargerHostFits(CodedFact, frozen=True):
    """As many GH200 parts with more host memory."""

    gpus: int
    host_bytes: int
    needs_bytes: int
    """On the fullest node."""
    micro_batch: int | None = None


class MoreMachinesFit(CodedFact, frozen=True):
    machines: int
    gpus: int
    micro_batch: int | None = None


class OtherMachineNeeded(CodedFact, frozen=True):
    """On a machine without GPUs, where no setting fits."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    """Changes that need less memory, and how much less by the plan's arithmetic."""

    changes: tuple[Change, ...]
    saves_bytes: int


class MemoryAdvice(CodedFact, frozen=True):
    """After memory ran out: what would need less, the least painful first; on each GPU, or on the host for each rank."""

    pool: Literal["gpu", "node"]
    savings: tuple[MemorySaving, ...]


Remedy = (
    FitsHere
    | CompactStatesFit
    | MoreGpusFit
    | LargerHostFits
    | MoreMachinesFit
    | OtherMachineNeeded
)


# What a plan says, as values, a module for each kind: why it fits or not, what would change that,
# why settings were chosen, what is worth knowing.
#
# ``plan.blockers``, ``verdict``, ``remedies``, ``choices`` and ``cautions`` find them.
# ``messages`` turns them into words, in modules of the same names as here.
#
# Plans of runs that were saved before facts were values hold texts in their place, so consumers
# accept ``Fact | str``.


Reason = Blocker | Need | Remedy | Choice
Fact = Reason | Caution | MemoryAdvice


# Why a run can never start here, in words.


def blocker_text(fact: Blocker) -> str:
    """Return why a run can never start here, with what to change."""
    match fact:
        case AmdGpu():
            return f"GPU {fact.gpu} ({fact.name}) is an AMD GPU, and of these so-tui plans for MI300A only. Use a machine with NVIDIA GPUs"
        case ModeNeedsGpu():
            return f"offload.mode = gpu needs a GPU, and {fact.machine} has none. Use offload.mode = auto"
        case EngineNeedsGpu():
            return "DeepSpeed's SuperOffload needs a CUDA GPU, and this machine has none. Use offload.engine = so-tui"
        case TooFewGpus():
            most = "1" if fact.present == 1 else f"{fact.present} or fewer"
            return f"gpus = {fact.asked}: {_has(fact.machine, fact.present)}. Ask for {most}"
        case NoSuchGpu():
            there = _has(fact.machine, len(fact.present))
            return f"gpus = {list(fact.asked)}: there is no GPU {fact.missing}, {there}. Choose from {list(fact.present)}"
        case SequencesNotShareable() if fact.backend in MASKED_BACKENDS:
            return (
                f"train.sequence_parallel = {fact.ranks} needs attention that takes document boundaries, and {fact.backend} takes a mask. "
                "Set it to 1, or run on GPUs with another backend"
            )
        case SequencesNotShareable():
            heads = f"{fact.heads} heads and {fact.key_heads} key heads"
            return f"train.sequence_parallel = {fact.ranks} cannot divide the model's {heads}. Choose a divisor of both"
        case NotBindable():
            return "; ".join(f"{found.message}. {found.remedy}" for found in fact.problems)
    assert_never(fact)


def _has(machine: str, gpus: int) -> str:
    return f"{machine} has {gpus} GPU" + ("s" if gpus > 1 else "")


# What compact moments cost, in words.


_MANTISSA_BITS: dict[StatesFormat, int] = {"fp32": 24, "bf16-moments": 8, "int8-moments": 4}
"""Of a moment; those of 8 bits share a scale in each block."""


def price_of(states: StatesFormat) -> str:
    """Return what a format of the moments costs in exactness."""
    bits = f"{_MANTISSA_BITS[states]} bits of mantissa (fp32: {_MANTISSA_BITS['fp32']})"
    return f"moments have {bits}, rounded at random, so losses differ slightly"


# What is worth knowing of a plan that may run, in words.


_COMMIT = re.compile("[0-9a-f]{40}")


def caution_text(fact: Caution) -> str:
    """Return what is worth knowing, with a remedy where there is one."""
    match fact:
        case NeverRun():
            known = "speeds follow from publications, and memory from runs on NVIDIA GPUs"
            return f"planned, never run: so-tui has not run on {fact.name} yet; {known}"
        case DeepSpeedNvidiaOnly():
            return "DeepSpeed says of its SuperOffload that it supports NVIDIA GPUs only; offload.engine = so-tui makes no such demand"
        case ClippingWaits():
            text = "gradient_clipping above 0 makes DeepSpeed's SuperOffload wait for the norm: nothing overlaps with backward"
            text += "" if fact.seconds is None else f" (about {fact.seconds:.1f} s a step)"
            return f"{text}. offload.engine = so-tui clips exactly"
        case FasterOffload():
            what = (
                "offload.mode = gpu" if fact.mode == "gpu" else f"offload.ratio = {fact.ratio:.2f}"
            )
            return f"{what} fits too and would take {fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s"
        case BeyondPositions():
            longest = f"documents of more than {thousands(fact.positions)} tokens are longer than the model was made for"
            remedy = "its rotary positions are not scaled for them, so quality may suffer; model.rope_scaling = yarn scales them"
            return f"sequences of {thousands(fact.sequence_length)} tokens: {longest}; {remedy}"
        case IndexersUntrained():
            size = f"{fact.parameters / 1e6:.1f} M parameters of the indexers, which choose what attention reads"
            return f"{size}, get no gradient: they stay as they are, without weight decay, and are exported so"
        case FasterAttention():
            steps = f"{fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s (predicted)"
            return f"attention runs on {fact.used}; with {fact.backend} installed it would take {steps}"
        case FasterStates():
            return _faster_states(fact)
        case PcieOffload():
            return "the GPU is connected by PCIe: offloading gains less than over NVLink-C2C"
        case GpuMemoryUnknown():
            return "the GPU's memory size is not known, nor whether the run fits there"
        case SlowWithoutGpu():
            return (
                f"{fact.parameters / 1e9:.1f} B parameters without a GPU: one step may take hours"
            )
        case PackingOff():
            return _packing_off(fact)
        case RemoteCode():
            return _remote_code(fact)
        case Note():
            return fact.text
        case LargerSteps():
            waits = f"a step of {fact.step_s:.2f} s waits {fact.exposed_optimizer_s:.2f} s for the optimizer"
            larger = f"{fact.times} times the tokens in a step ({thousands(fact.tokens)}; {fact.key} = {fact.value})"
            return f"{waits}: with {larger} {fact.faster:.1f} times as many tokens a second would be trained"
        case MoreGpusKeepMargin():
            return f"{fact.gpus} GPUs of this machine leave the margin"
    assert_never(fact)


def _faster_states(fact: FasterStates) -> str:
    steps = f"{fact.step_s:.2f} s a step instead of {fact.given_step_s:.2f} s (predicted)"
    early = f"{fact.early_share:.0%} of what is offloaded, not {fact.given_early_share:.0%}, is stepped before the gradient norm is known"
    return f'offload.states = "{fact.states}" would take {steps}, since {early}; its price: {price_of(fact.states)}'


def _remote_code(fact: RemoteCode) -> str:
    model = printable_line(fact.model)
    where = (
        f"{model}, revision {printable_line(fact.revision)},"
        if fact.revision
        else f"the folder {model}"
    )
    text = f"model.trust_remote_code is on: Python code of {where} runs with your rights; launch it only if you have read that code"
    pinned = not fact.revision or _COMMIT.fullmatch(fact.revision)
    return text if pinned else f"{text}. Set model.revision to a commit: a branch or tag can change"


def _packing_off(fact: PackingOff) -> str:
    why = (
        f", since layers of {', '.join(map(printable_line, fact.mixing))} would mix the documents"
        if fact.mixing
        else ""
    )
    share = (
        "padding"
        if fact.padding_share is None
        else f"padding, up to {fact.padding_share:.0%} of all positions with these data,"
    )
    return f"packing is off{why}: {share} is computed but counts for nothing"


# What memory a plan needs, and where it runs short, in words.


def need_text(fact: Need) -> str:
    """Return where memory is short, or what a plan that may run needs."""
    return shortage_text(fact) if isinstance(fact, Shortage) else _memory_needed(fact)


def shortage_text(short: Shortage) -> str:
    """Return ``host node 0 needs 226 GiB, has 105 GiB``."""
    if short.fatal:
        return f"{pool_name(short)} needs {memory_size(short.needs)}, has {memory_size(short.has)}"
    return f"{pool_name(short)} needs {memory_size(short.needs)} of {memory_size(short.has)}: little is left for what is not predicted exactly"


def pool_name(short: Shortage) -> str:
    """Return the memory that is short: ``each GPU``, ``host node 0``, ``/dev/shm``."""
    match short.pool:
        case "gpu":
            return "each GPU"
        case "node":
            return _nodes(short.nodes)
        case "limit":
            return "the host, within its memory limit,"
        case "shm":
            return "/dev/shm"
        case "unknown":
            return "the machine"
    assert_never(short.pool)


def _nodes(nodes: Sequence[int]) -> str:
    return (
        f"host node {nodes[0]}"
        if len(nodes) == 1
        else f"each of host nodes {', '.join(map(str, nodes))}"
    )


def _memory_needed(fact: MemoryNeeded) -> str:
    parts = []
    if fact.gpu_bytes:
        of = f" of {memory_size(fact.gpu_capacity_bytes)}" if fact.gpu_capacity_bytes else ""
        parts.append(f"{memory_size(fact.gpu_bytes)}{of} on each GPU")
    # The number of a node comes last: before an amount it would read as a part of it.
    parts += [_host_needed(host) for host in fact.hosts]
    return "needs " + "; ".join(parts)


def _host_needed(host: NodeNeed) -> str:
    return f"{memory_size(host.needs)} of {memory_size(host.has)} on {_nodes(host.nodes)}"


_WHY_NOTHING_EARLY = {
    "memory": "the host has no memory left for second states",
    "budget": "offload.speculation_gib is less than the second states of one sub-group take",
    "slower": "second states would make no step faster here",
}
_PREFERRED = {"no-offload": "offloads nothing", "given-micro-batch": "keeps the given micro-batch"}
_NOTICEABLE_BYTES = 1 << 29
"""From here on a difference in memory is worth saying."""
_RECOMPUTES: dict[Policy, str] = {
    "none": "all activations fit, so backward recomputes nothing",
    "selective": "results of matrix products and attention are stored, and only what is cheap is recomputed",
    "attention": "attention's results are stored, and everything else is recomputed",
    "full": "storing more than each layer's input would not fit, or cost more time than it saves",
}


def choice_text(fact: Choice) -> str:
    """Return why a setting was chosen."""
    return _recommended(fact) if isinstance(fact, Recommended) else _settled(fact)


def _settled(fact: Settled) -> str:
    match fact:
        case AutoMode():
            return _auto_mode(fact)
        case AutoCheckpointing():
            return (
                f"activation checkpointing auto is {fact.policy} here: {_RECOMPUTES[fact.policy]}"
            )
        case OneMemory():
            return "CPU and GPU have one memory: states count once wherever they are stepped, and offloading frees none"
        case StepsEarly(share=0.0):
            return (
                f"clipping: Adam waits for the gradient norm; {_WHY_NOTHING_EARLY[fact.why_none]}"
            )
        case StepsEarly():
            share = f"{fact.share:.0%}" if fact.share >= 0.01 else "less than 1%"
            much = (
                "Adam does not wait"
                if fact.share == 1
                else f"Adam does not wait for {share} of what is offloaded"
            )
            text = f"clipping: {much} for the gradient norm; second states take {memory_size(fact.bytes)} a rank"
            return (
                f"{text}. Steps above the limit take {fact.held_back_step_s:.2f} s"
                if fact.held_back_step_s
                else text
            )
        case SavesBehind(share=0.0):
            return "checkpoints: training waits while they are written; the host has no memory left for copies of the states"
        case SavesBehind():
            rest = (
                ""
                if fact.share == 1
                else f". Training waits until the other {1 - fact.share:.0%} are written"
            )
            copies = (
                f"copies take {memory_size(fact.bytes)} a rank"
                if fact.bytes
                else "second states hold the copies"
            )
            much = "the states" if fact.share == 1 else f"{fact.share:.0%} of the states"
            return f"checkpoints: {much} are written while training goes on; {copies}{rest}"
        case MlpTiled():
            return f"feed-forward blocks compute {thousands(fact.tile_tokens)} tokens at a time"
        case InputsOnHost():
            return _inputs_on_host(fact)
        case WeightsOnHost():
            times = ""
            if fact.fetched_s is not None and fact.pass_s is not None:
                hidden = ", which hides it" if fact.fetched_s < fact.pass_s else ""
                times = f". Copying them takes {duration(fact.fetched_s)} of the {duration(fact.pass_s)} of each pass{hidden}"
            return f"weights are in host memory: {memory_size(fact.bytes)} a rank{times}"
        case AttentionFallsBack():
            return f"attention runs on {fact.backend}: {fact.fastest} {OBSTACLES[fact.obstacle]}"
        case CheckpointInterval():
            return _checkpoint_interval(fact)
        case AcrossHosts():
            return _across_hosts(fact)
        case TokensReached():
            each = f"{thousands(fact.tokens)}, {thousands(fact.tokens_per_pass)} in each micro-batch of all ranks"
            return f"accumulation {fact.accumulation} comes nearest to {thousands(fact.target)} tokens a step: {each}"
    assert_never(fact)


def _recommended(fact: Recommended) -> str:
    match fact:
        case SequencesShared():
            return f"{fact.ranks} ranks share each sequence: with train.sequence_parallel = {fact.given} it would not fit"
        case ModeWithoutGpu(mode="superoffload"):
            return "superoffload: on a machine without GPUs the optimizer runs beside the model, on cores of its own"
        case ModeWithoutGpu():
            own = "with offload.engine = so-tui the optimizer would have cores of its own"
            return f"{fact.mode}: DeepSpeed's SuperOffload needs a GPU; {own}"
        case AllOnGpu():
            return "gpu: everything fits on the GPU, and offloading would not make steps noticeably shorter"
        case NothingOffloaded():
            return "ratio 0.00: everything stays on the GPU; SuperOffload needs less of it than mode gpu with its bf16 gradients"
        case LeastGpuMemory():
            return f"ratio {fact.ratio:.2f} takes the least of the GPU, whose memory is not known"
        case SmallestRatio():
            return _smallest_ratio(fact)
        case FasterRatio():
            both = f"{fact.step_s:.2f} s a step instead of {fact.smallest_step_s:.2f} s"
            if fact.alike and fact.more_gpu_bytes > 0:
                alike = f"about as fast as {fact.smallest_ratio:.2f}, which would fit too ({both})"
                return f"ratio {fact.ratio:.2f}: {alike}, and leaves {memory_size(fact.more_gpu_bytes)} more of each GPU"
            return f"ratio {fact.ratio:.2f}: {fact.smallest_ratio:.2f} would fit too, but the GPU would step more itself; {both}"
        case CheckpointingChosen():
            text = f"activation checkpointing {fact.policy}: {_RECOMPUTES[fact.policy]}"
            if fact.step_s is None or fact.full_step_s is None:
                return text
            return f"{text}; recomputing whole layers would take {fact.full_step_s:.2f} s a step instead of {fact.step_s:.2f} s"
        case MicroBatchChosen():
            return _micro_batch(fact)
        case AdamCoresChosen():
            cores = f"{fact.adam_cores} of {fact.cores} cores a rank run CPU Adam (fraction {fact.fraction:.2f})"
            if fact.raised:
                return f"{cores}: a step waits for Adam"
            return f"{cores}: more would not make it faster, because a step waits for the node's memory or the GPU"
        case SpeedUnknown():
            return "the speed of this machine is not known, so settings were not compared"
        case NextBest():
            return _next_best(fact)
        case NoNextBest():
            return f"next best: none; {'no other' if fact.fits else 'no'} checkpointing policy or micro-batch leaves the margin"
    assert_never(fact)


def _inputs_on_host(fact: InputsOnHost) -> str:
    kept = " and ".join(
        name
        for name, size in (
            ("layer inputs", fact.bytes),
            ("attention's results", fact.results_bytes),
        )
        if size
    )
    text = f"{kept} are in host memory between forward and backward: {memory_size(fact.bytes + fact.results_bytes)} a rank"
    if fact.out_s is None or fact.back_s is None:
        return text
    hidden = (
        f"which makes a step {duration(fact.exposed_s)} longer"
        if fact.exposed_s
        else "beside the computation"
    )
    return f"{text}. Copying them takes {duration(fact.out_s)} in forward and {duration(fact.back_s)} in backward, {hidden}"


def _auto_mode(fact: AutoMode) -> str:
    match fact.why:
        case "no-gpu":
            return f"auto is {fact.mode} on a machine without GPUs"
        case "gpu-memory-unknown":
            why = "the GPU's memory is not known"
        case "weights-on-host":
            why = 'offload.parameters = "cpu" needs an optimizer in host memory'
        case "fits-on-gpu":
            why = (
                "everything fits on the GPU, and offloading would not make steps noticeably shorter"
            )
        case "overlaps":
            why = "the CPU steps beside backward, which leaves less of a step to wait for"
        case "less-recomputation":
            why = "the GPU memory that offloading frees saves more recomputation than the offload costs"
        case "offload-does-not-fit":
            why = f"at ratio {fact.ratio:.2f} {_shortage(fact.shortage)}"
        case "gpu-does-not-fit":
            why = f"without offload {_shortage(fact.shortage)}"
    return f"auto is {fact.mode} here: {why}"


def _shortage(short: Shortage | None) -> str:
    return shortage_text(short) if short else "it fits"


def _smallest_ratio(fact: SmallestRatio) -> str:
    margin = "leaves a margin on each GPU" if fact.keeps_margin else "each GPU can hold"
    text = f"ratio {fact.ratio:.2f} is the smallest that {margin} with this micro-batch and recomputation"
    if fact.given_shortage is not None:
        return f"{text}; the given {fact.given_ratio:.2f} would not fit: {shortage_text(fact.given_shortage)}"
    if fact.given_step_s is not None:
        return f"{text}; the given {fact.given_ratio:.2f} would take {fact.given_step_s:.2f} s a step instead of {fact.step_s:.2f} s"
    return text


def _micro_batch(fact: MicroBatchChosen) -> str:
    text = f"micro-batch {fact.micro_batch} with accumulation {fact.accumulation} keeps the tokens of a step"
    if fact.given_shortage is not None:
        return f"{text}; with micro-batch {fact.given_micro_batch} {shortage_text(fact.given_shortage)}"
    return (
        text
        if fact.given_slower is None
        else f"{text}; micro-batch {fact.given_micro_batch} would be {_slower(fact.given_slower)}"
    )


def _settings(fact: NextBest) -> str:
    """Return ``superoffload at ratio 0.35, micro-batch 4, activation checkpointing selective``."""
    where = "no offload" if fact.mode == "gpu" else f"{fact.mode} at ratio {fact.ratio:.2f}"
    on_host = " in host memory" if fact.on_host else ""
    return (
        f"{where}, micro-batch {fact.micro_batch}, activation checkpointing {fact.policy}{on_host}"
    )


def _slower(share: float) -> str:
    return f"{share:.1%} slower" if share > ALIKE else "about as fast"


def _next_best(fact: NextBest) -> str:
    """Return ``next best: SETTINGS, 7.2% slower``, or what they are about as fast as and what speaks for those that were chosen."""
    if not fact.alike:
        return f"next best: {_settings(fact)}, {_slower(fact.slower)}"
    difference = f"planned {abs(fact.slower):.1%} {'slower' if fact.slower > 0 else 'faster'}, less than plans are off"
    text = f"about as fast as {_settings(fact)} ({difference})"
    offers = [_PREFERRED[fact.chosen_for]] if fact.chosen_for in _PREFERRED else []
    if abs(fact.more_gpu_bytes) >= _NOTICEABLE_BYTES:
        offers.append(
            f"leaves {memory_size(abs(fact.more_gpu_bytes))} {'more' if fact.more_gpu_bytes > 0 else 'less'} of each GPU"
        )
    return f"{text}: {', '.join(offers)}" if offers else text


def _checkpoint_interval(fact: CheckpointInterval) -> str:
    minutes = max(1, round(fact.minutes))
    held_up = f"each holds training up for about {duration(fact.pause_s)}"
    failures = f"{plural(fact.gpus, 'GPU')} can be expected to fail once in {plural(max(1, round(fact.failure_hours / 24)), 'day')}"
    best = f"checkpoints: one in {duration(60 * minutes)} costs the least time (Young and Daly): {held_up}, and {failures}"
    if fact.given_minutes is None:
        return f"{best}. Nothing is saved before the end; checkpoint.every_minutes={minutes} changes that"
    return f"{best}; these settings save one in {duration(60 * fact.given_minutes)}"


def _across_hosts(fact: AcrossHosts) -> str:
    spread = f"{fact.machines} hosts: weights, gradients and optimizer states are sharded over all {fact.ranks} GPUs"
    moved = f"{fact.bytes_per_step / 1e9:.0f} GB enter and leave each host in a step, over a network of {network_rate_text(fact.network)}"
    if fact.seconds is None or fact.longer_s is None:
        return f"{spread}; {moved}"
    return f"{spread}; {moved}: {fact.seconds:.1f} s, which makes the step {fact.longer_s:.1f} s longer than if the GPUs were in one"


# What would fit, and what would need less memory, in words.


def remedy_text(fact: Remedy) -> str:
    """Return what would fit: settings, GPUs, other hosts."""
    match fact:
        case FitsHere():
            return (
                " with ".join(f"{change.key} = {_setting(change)}" for change in fact.changes)
                + " fits here"
            )
        case CompactStatesFit():
            saved = f"{memory_size(fact.saved_bytes)} less host memory"
            return f'offload.states = "{fact.states}" fits here: {saved}; its price: {price_of(fact.states)}'
        case MoreGpusFit():
            return (
                f"{fact.gpus} GPUs of this machine fit the run{_with_micro_batch(fact.micro_batch)}"
            )
        case LargerHostFits():
            parts = f"{fact.gpus} x GH200 with {fact.host_bytes / 1e9:.0f} GB of host memory each"
            return f"{parts} would fit the run{_with_micro_batch(fact.micro_batch)} ({memory_size(fact.needs_bytes)} needed per node)"
        case MoreMachinesFit():
            machines = f"{fact.machines} hosts like this one ({fact.gpus} GPUs)"
            return f"{machines} would fit the run{_with_micro_batch(fact.micro_batch)}; --nodes {fact.machines} plans for them"
        case OtherMachineNeeded():
            return "use a machine with a GPU, a smaller model, or fewer ranks"
    assert_never(fact)


def _setting(change: Change) -> str:
    return f"{change.after:.2f}" if isinstance(change.after, float) else str(change.after)


def _with_micro_batch(micro_batch: int | None) -> str:
    return "" if micro_batch is None else f" with train.micro_batch = {micro_batch}"


def advice_text(fact: MemoryAdvice) -> str:
    """Return what would need less memory after it ran out."""
    if not fact.savings:
        return "Use more GPUs, or a machine with more memory; `so-tui plan` shows what is needed"
    where = "on each GPU" if fact.pool == "gpu" else "of host memory a rank"
    parts = [
        f"{_changed(saving.changes)} needs {memory_size(saving.saves_bytes)} less {where}"
        for saving in fact.savings
    ]
    return f"{'; or '.join(parts)} (predicted). `so-tui plan` shows the rest"


def _changed(changes: Sequence[Change]) -> str:
    """Return ``train.micro_batch 4 -> 2 with train.gradient_accumulation 2``."""
    first, *others = changes
    if first.key == "train.gradient_accumulation":
        return f"{first.key} {first.after}"
    if first.key == "offload.mode":
        ratio = next(change.after for change in others if change.key == "offload.ratio")
        return f"{first.key} {first.before} -> {first.after} at offload.ratio {ratio:g}"
    text = f"{first.key} {_general(first.before)} -> {_general(first.after)}"
    return text + "".join(f" with {change.key} {_general(change.after)}" for change in others)


def _general(value: str | int | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# The words of a plan: the one place where facts become text, for command line, screen and JSON.
# Each kind of facts has a module of its own, named like that of the facts.


def message(fact: Fact | str) -> str:
    """Return a fact in words. A text from an older plan is returned as it is."""
    if isinstance(fact, str):
        return fact
    if isinstance(fact, Need):
        return need_text(fact)
    if isinstance(fact, MemoryAdvice):
        return advice_text(fact)
    if isinstance(fact, Blocker):
        return blocker_text(fact)
    if isinstance(fact, Remedy):
        return remedy_text(fact)
    if isinstance(fact, Choice):
        return choice_text(fact)
    return caution_text(fact)


def messages(found: Iterable[Fact | str]) -> tuple[str, ...]:
    """Return facts in words, in order."""
    return tuple(map(message, found))
