"""What a plan says, as values with words: what memory it needs, why it fits or not, what would
change that, why settings were chosen, and what is worth knowing.

``plan.reasons`` and ``plan.remedies`` find them. In JSON each fact carries its ``code``, and its
``message`` beside its values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any, Literal, dataclass_transform

from msgspec import Struct

from so_tui.machine.host import cpu_ranges
from so_tui.machine.types import Network
from so_tui.plan.rates import ALIKE, network_rate_text
from so_tui.spec.attention import MASKED_BACKENDS, OBSTACLES, AttentionBackend, Obstacle
from so_tui.spec.data_notes import Found, sentences
from so_tui.spec.errors import Problem
from so_tui.spec.run_spec import Mode, Policy, StatesFormat
from so_tui.trust.text import printable_line
from so_tui.units import disk_size, duration, interval, memory_size, plural, small_share, thousands


def _code(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


@dataclass_transform(frozen_default=True)
class Fact(Struct, frozen=True, tag_field="code", tag=_code):
    """A fact of a plan; its ``code`` is the class's name in kebab case."""

    @property
    def words(self) -> str:
        """The fact in words, with a remedy where there is one.

        Fields are in braces, each with its unit, or with what to say if it is true and if it is
        not: ``{size:memory}``, ``{raised:more|fewer}``. A clause in brackets is said only if all
        its fields are known.
        """
        return ""

    @property
    def message(self) -> str:
        """``words`` with this fact's fields in it."""

        def known(clause: re.Match[str]) -> str:
            names = [name.partition(".")[0] for _, name, _, _ in _WORDING.parse(clause[1]) if name]
            unknown = any(getattr(self, name) in (None, ()) for name in names)
            return "" if unknown else clause[1]

        return _WORDING.format(_CLAUSE.sub(known, self.words), self)


class _Wording(Formatter):
    """Formats the fields of a fact, as units or as Python does."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if "|" in format_spec:
            return format_spec.split("|")[0 if value else 1]
        unit = _UNITS.get(format_spec)
        return unit(value) if unit else str(super().format_field(value, format_spec))


_CLAUSE = re.compile(r"\[(.*?)\]")
_WORDING = _Wording()
_UNITS: dict[str, Callable[[Any], str]] = {
    "memory": lambda size: memory_size(size),  # in the units that the process shows
    "gb": lambda size: f"{size / 1e9:.0f} GB",
    "disk": disk_size,
    "millions": lambda number: f"{number / 1e6:.1f} M",
    "billions": lambda number: f"{number / 1e9:.1f} B",
    "thousands": thousands,
    "duration": duration,
    "line": printable_line,
    "network": network_rate_text,
    "ranges": cpu_ranges,
    "list": lambda numbers: str(list(numbers)),
    "listed": lambda texts: ", ".join(map(printable_line, texts)),
    "gpus": lambda number: plural(number, "GPU"),
    "number_of_gpus": lambda indices: plural(len(indices), "GPU"),
    "or_fewer": lambda number: "1" if number == 1 else f"{number} or fewer",
    "share": lambda share: f"{share:.0%}" if share >= 0.01 else "less than 1%",
    "slower": lambda share: f"{share:.1%} slower" if share > ALIKE else "about as fast",
    "dropouts": lambda found: _dropouts(found),
    "obstacle": lambda obstacle: OBSTACLES[obstacle],
    "recomputes": lambda policy: _RECOMPUTES[policy],
    "price": lambda states: _PRICE.format(_MANTISSA_BITS[states]),
    "problems": lambda found: "; ".join(f"{each.message}. {each.remedy}" for each in found),
    "settings": lambda changes: " with ".join(map(_setting, changes)),
    "keys": lambda pairs: ", ".join(_setting(Change(key, value, value)) for key, value in pairs),
}
"""How a value is written, by the name behind its colon."""


# What memory a plan needs, and where it runs short

MemoryPool = Literal["gpu", "node", "limit", "shm", "unknown"]
"""Memory that may run short: of each GPU, of CPU nodes, within the session's limit, /dev/shm.
``unknown`` in older files.
"""
_POOLS = {
    "gpu": "each GPU",
    "limit": "the host, within its memory limit,",
    "shm": "/dev/shm",
    "unknown": "the machine",
}


class Shortage(Fact):
    """A memory pool in which the margin is not left free; ``fatal`` when the pool is too small."""

    needs: int
    """Bytes, as ``has``."""
    has: int
    fatal: bool
    pool: MemoryPool = "unknown"
    nodes: tuple[int, ...] = ()
    """CPU nodes that are equally short."""

    @property
    def place(self) -> str:
        """The memory that is short: ``each GPU``, ``host node 0``, ``/dev/shm``."""
        return _nodes(self.nodes) if self.pool == "node" else _POOLS[self.pool]

    words = (
        "{place} needs {needs:memory}{fatal:, has| of} {has:memory}"
        "{fatal:|: little is left for what is not predicted exactly}"
    )


class NodeNeed(Struct, frozen=True):
    """CPU nodes with the same figures; the fullest of them gives the bytes."""

    nodes: tuple[int, ...]
    needs: int
    has: int


class MemoryNeeded(Fact):
    """Memory of a plan that may run."""

    gpu_bytes: int
    gpu_capacity_bytes: int | None
    hosts: tuple[NodeNeed, ...]

    @property
    def words(self) -> str:
        parts = []
        if self.gpu_bytes:
            of = f" of {memory_size(self.gpu_capacity_bytes)}" if self.gpu_capacity_bytes else ""
            parts.append(f"{memory_size(self.gpu_bytes)}{of} on each GPU")
        # The number of a node comes last: before an amount it would read as a part of it.
        parts += [
            f"{memory_size(host.needs)} of {memory_size(host.has)} on {_nodes(host.nodes)}"
            for host in self.hosts
        ]
        return "needs " + "; ".join(parts)


def _nodes(nodes: Sequence[int]) -> str:
    if len(nodes) == 1:
        return f"host node {nodes[0]}"
    return f"each of host nodes {', '.join(map(str, nodes))}"


Need = Shortage | MemoryNeeded


# Why a run can never start here


class AmdGpu(Fact):
    """A GPU of AMD's with memory of its own. Only APUs are planned for."""

    gpu: int
    name: str

    words = (
        "GPU {gpu} ({name}) is an AMD GPU, and of these so-tui plans for MI300A only. Use a "
        "machine with NVIDIA GPUs"
    )


class ModeNeedsGpu(Fact):
    """``offload.mode = gpu`` on a machine without GPUs."""

    machine: str

    words = "offload.mode = gpu needs a GPU, and {machine} has none. Use offload.mode = auto"


class EngineNeedsGpu(Fact):
    """DeepSpeed's SuperOffload on a machine without GPUs."""

    words = (
        "DeepSpeed's SuperOffload needs a CUDA GPU, and this machine has none. Use offload.engine"
        " = so-tui"
    )


_SPLIT = "[; GPU {split:ranges} is split by MIG or into compute partitions]"
_MAKE_WHOLE = (
    "Make one whole (`nvidia-smi -mig 0` or `amd-smi set --compute-partition SPX`, as root)"
)


class TooFewGpus(Fact):
    machine: str
    asked: int
    present: int
    """Whole ones."""
    split: tuple[int, ...] = ()
    """GPUs in parts, of which a rank would see one."""

    words = (
        f"gpus = {{asked}}: {{machine}} has {{present:gpus}}{_SPLIT}. "
        f"{{present:Ask for {{present:or_fewer}}|{_MAKE_WHOLE}}}"
    )


class NoSuchGpu(Fact):
    machine: str
    asked: tuple[int, ...]
    missing: int
    present: tuple[int, ...]
    """Whole ones."""
    split: tuple[int, ...] = ()
    """GPUs in parts, of which a rank would see one."""

    words = (
        "gpus = {asked:list}: there is no GPU {missing}, {machine} has {present:number_of_gpus}"
        f"{_SPLIT}. {{present:Choose from {{present:list}}|{_MAKE_WHOLE}}}"
    )


class SequencesNotShareable(Fact):
    """``train.sequence_parallel`` with attention that takes no document boundaries, or with heads
    that the ranks do not divide.
    """

    ranks: int
    backend: AttentionBackend
    heads: int
    key_heads: int

    @property
    def words(self) -> str:
        if self.backend in MASKED_BACKENDS:
            return (
                "train.sequence_parallel = {ranks} needs attention that takes document boundaries, "
                "and {backend} takes a mask. Set it to 1, or run on GPUs with another backend"
            )
        return (
            "train.sequence_parallel = {ranks} cannot divide the model's {heads} heads and "
            "{key_heads} key heads. Choose a divisor of both"
        )


class TooFewCores(Fact):
    """A machine without GPUs has fewer cores than ranks are asked for."""

    machine: str
    asked: int
    cores: int

    words = (
        "gpus = {asked}: without GPUs each rank takes a core, and so-tui may use {cores} of "
        "{machine}. Ask for {cores:or_fewer}"
    )


class NotBindable(Fact):
    """The ranks cannot be bound to cores or GPUs."""

    problems: tuple[Problem, ...]

    words = "{problems:problems}"


Blocker = (
    AmdGpu
    | ModeNeedsGpu
    | EngineNeedsGpu
    | TooFewGpus
    | NoSuchGpu
    | SequencesNotShareable
    | TooFewCores
    | NotBindable
)


# What would fit, and what would need less memory


Value = str | int | float


class Change(Struct, frozen=True):
    """One key of the spec, and its value before and after."""

    key: str
    before: Value
    after: Value


def _setting(change: Change) -> str:
    value = change.after
    return f"{change.key} = {value:.2f}" if isinstance(value, float) else f"{change.key} = {value}"


class FitsHere(Fact):
    """Changes with which the run fits on the same GPUs."""

    changes: tuple[Change, ...]

    words = "{changes:settings} fits here"


class CompactStatesFit(Fact):
    """A format of the moments in host memory with which the run fits on the same GPUs. Losses
    differ slightly from those with fp32.
    """

    states: StatesFormat
    saved_bytes: int
    """Of host memory, on all ranks of this machine."""

    words = (
        'offload.states = "{states}" fits here: {saved_bytes:memory} less host memory; its price:'
        " {states:price}"
    )


_MANTISSA_BITS: dict[StatesFormat, int] = {"bf16-moments": 8, "int8-moments": 4}
"""Of a moment; those of 8 bits share a scale in each block."""


_PRICE = "moments have {} bits of mantissa (fp32: 24), rounded at random, so losses differ slightly"


class MoreGpusFit(Fact):
    gpus: int
    micro_batch: int | None = None
    """The smaller micro-batch that it takes there; None where the given one fits."""

    words = "{gpus} GPUs of this machine fit the run[ with train.micro_batch = {micro_batch}]"


class LargerHostFits(Fact):
    """As many GH200 parts with more host memory."""

    gpus: int
    host_bytes: int
    needs_bytes: int
    """On the fullest node."""
    micro_batch: int | None = None

    words = (
        "{gpus} x GH200 with {host_bytes:gb} of host memory each would fit the run"
        "[ with train.micro_batch = {micro_batch}] ({needs_bytes:memory} needed per node)"
    )


class MoreMachinesFit(Fact):
    machines: int
    gpus: int
    micro_batch: int | None = None

    words = (
        "{machines} hosts like this one ({gpus} GPUs) would fit the run"
        "[ with train.micro_batch = {micro_batch}]; --nodes {machines} plans for them"
    )


class OtherMachineNeeded(Fact):
    """On a machine without GPUs, where no setting fits."""

    words = "use a machine with a GPU, a smaller model, or fewer ranks"


Remedy = (
    FitsHere
    | CompactStatesFit
    | MoreGpusFit
    | LargerHostFits
    | MoreMachinesFit
    | OtherMachineNeeded
)


class MemorySaving(Struct, frozen=True, kw_only=True):
    """Changes that need less memory, and how much less by the plan's arithmetic."""

    changes: tuple[Change, ...]
    saves_bytes: int


AdvicePool = Literal["gpu", "node"]


class MemoryAdvice(Fact):
    """After memory ran out: what would need less, the least painful first; on each GPU, or on the
    host for each rank.
    """

    pool: AdvicePool
    savings: tuple[MemorySaving, ...]

    @property
    def words(self) -> str:
        if not self.savings:
            return (
                "Use more GPUs, or a machine with more memory; `so-tui plan` shows what is needed"
            )
        where = "on each GPU" if self.pool == "gpu" else "of host memory a rank"
        parts = [
            f"{_changed(saving.changes)} needs {memory_size(saving.saves_bytes)} less {where}"
            for saving in self.savings
        ]
        return f"{'; or '.join(parts)} (predicted). `so-tui plan` shows the rest"


def _changed(changes: Sequence[Change]) -> str:
    """Return ``train.micro_batch 4 -> 2 with train.gradient_accumulation 2``."""
    first, *others = changes
    if first.key == "offload.mode":
        ratio = next(change.after for change in others if change.key == "offload.ratio")
        return f"{first.key} {first.before} -> {first.after} at offload.ratio {ratio:g}"
    text = f"{first.key} {_general(first.before)} -> {_general(first.after)}"
    return text + "".join(f" with {change.key} {_general(change.after)}" for change in others)


def _general(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# Why settings were recommended

_RECOMPUTES: dict[Policy, str] = {
    "none": "all activations fit, so backward recomputes nothing",
    "selective": (
        "results of matrix products and attention are stored, and only what is cheap is recomputed"
    ),
    "attention": "attention's results are stored, and everything else is recomputed",
    "full": "storing more than each layer's input would not fit, or cost more time than it saves",
}


class ModeWithoutGpu(Fact):
    mode: Mode

    @property
    def words(self) -> str:
        if self.mode == "superoffload":
            return (
                "superoffload: on a machine without GPUs the optimizer runs beside the model, on "
                "cores of its own"
            )
        return (
            "{mode}: DeepSpeed's SuperOffload needs a GPU; with offload.engine = so-tui the "
            "optimizer would have cores of its own"
        )


class AllOnGpu(Fact):
    """Mode ``gpu`` was recommended."""

    words = (
        "gpu: everything fits on the GPU, and offloading would not make steps noticeably shorter"
    )


class NothingOffloaded(Fact):
    """SuperOffload at ratio 0 was recommended."""

    words = (
        "ratio 0.00: everything stays on the GPU; SuperOffload needs less of it than mode gpu "
        "with its bf16 gradients"
    )


class LeastGpuMemory(Fact):
    """The ratio that takes the least of a GPU whose memory is not known."""

    ratio: float

    words = "ratio {ratio:.2f} takes the least of the GPU, whose memory is not known"


class GpusChosen(Fact):
    """Another number of GPUs than the preset's."""

    gpus: int
    given: int
    available: int
    """Those of the machine, or its cores for ranks without GPUs."""

    @property
    def words(self) -> str:
        if self.given > self.available:
            return "gpus = {gpus}: the preset says {given}, and this machine has {available}"
        return "gpus = {gpus}: the preset's {given} would not leave the margin with fp32 moments"


class StatesChosen(Fact):
    """Compact moments: with fp32 moments no settings would leave the margin."""

    states: StatesFormat

    words = (
        'offload.states = "{states}": with fp32 moments nothing would leave the margin; the price: '
        "{states:price}"
    )


class SetByPerson(Fact):
    """Keys that the machine would have decided."""

    settings: tuple[tuple[str, Value], ...]

    words = "kept as set: {settings:keys}"


class SmallestRatio(Fact):
    """The smallest ratio that leaves the margin, or at least fits."""

    ratio: float
    keeps_margin: bool

    words = (
        "ratio {ratio:.2f} is the smallest that {keeps_margin:leaves a margin on each GPU|each GPU "
        "can hold} with this micro-batch and recomputation"
    )


class FasterRatio(Fact):
    """A larger ratio than the smallest that fits: Adam on the host is hidden, and the GPU has less
    to step.
    """

    ratio: float
    step_s: float
    smallest_ratio: float
    smallest_step_s: float
    alike: bool = False
    """Whether predictions are not exact enough to tell which of the two is faster."""
    more_gpu_bytes: int = 0
    """Memory of each GPU that it leaves beyond what the smallest does."""

    @property
    def words(self) -> str:
        both = "{step_s:.2f} s a step instead of {smallest_step_s:.2f} s"
        if self.alike and self.more_gpu_bytes > 0:
            return (
                "ratio {ratio:.2f}: about as fast as {smallest_ratio:.2f}, which would fit too "
                f"({both}), and leaves {{more_gpu_bytes:memory}} more of each GPU"
            )
        return (
            "ratio {ratio:.2f}: {smallest_ratio:.2f} would fit too, but the GPU would step more "
            f"itself; {both}"
        )


class CheckpointingChosen(Fact):
    policy: Policy
    step_s: float | None = None
    full_step_s: float | None = None
    """With ``full`` instead."""

    words = (
        "activation checkpointing {policy}: {policy:recomputes}"
        "[; recomputing whole layers would take {full_step_s:.2f} s a step instead of "
        "{step_s:.2f} s]"
    )


class MicroBatchChosen(Fact):
    micro_batch: int
    accumulation: int
    given_micro_batch: int
    given_shortage: Shortage | None = None
    given_slower: float | None = None
    """How much longer a step would take with the given one, as a share."""

    words = (
        "micro-batch {micro_batch} with accumulation {accumulation} keeps the tokens of a step"
        "[; with micro-batch {given_micro_batch} {given_shortage.message}]"
        "[; micro-batch {given_micro_batch} would be {given_slower:slower}]"
    )


class AdamCoresChosen(Fact):
    adam_cores: int
    cores: int
    fraction: float
    raised: bool
    """Whether that is more than was given."""

    words = (
        "{adam_cores} of {cores} cores a rank run CPU Adam (fraction {fraction:.2f}): "
        "{raised:a step waits for Adam|more would not make it faster, because a step waits for the "
        "node's memory or the GPU}"
    )


class SequencesShared(Fact):
    """Ranks share each sequence, which would not fit on one of them."""

    ranks: int
    given: int

    words = (
        "{ranks} ranks share each sequence: with train.sequence_parallel = {given} it would not fit"
    )


class SpeedUnknown(Fact):
    """No settings were compared, because no speed is known."""

    words = "the speed of this machine is not known, so settings were not compared"


Preference = Literal["no-offload", "given-micro-batch", "memory"]
"""What settings that are about as fast as others are preferred for: the first of these in which
they differ.
"""
_PREFERRED = {"no-offload": "offloads nothing", "given-micro-batch": "keeps the given micro-batch"}
_NOTICEABLE_BYTES = 1 << 29
"""From here on a difference in memory is worth saying."""


class NextBest(Fact):
    """The fastest of the settings that were not chosen."""

    mode: Mode
    ratio: float
    micro_batch: int
    policy: Policy
    slower: float
    """How much longer its step takes, as a share; negative where it is the shorter one."""
    alike: bool = False
    """Whether predictions are not exact enough to tell which of the two is faster."""
    chosen_for: Preference | None = None
    """Where both are, why the chosen ones are preferred; None where that is their speed."""
    more_gpu_bytes: int = 0
    """Memory of each GPU that the chosen ones leave beyond what it does."""
    on_host: bool = False
    """Whether what layers keep is in host memory."""

    @property
    def words(self) -> str:
        """``next best: SETTINGS, 7.2% slower``, or what they are about as fast as and what speaks
        for those that were chosen.
        """
        where = "no offload" if self.mode == "gpu" else "{mode} at ratio {ratio:.2f}"
        settings = (
            f"{where}, micro-batch {{micro_batch}}, activation checkpointing "
            "{policy}{on_host: in host memory|}"
        )
        if not self.alike:
            return f"next best: {settings}, {_UNITS['slower'](self.slower)}"
        planned = f"planned {abs(self.slower):.1%} apart, less than plans are off"
        offers = [_PREFERRED[self.chosen_for]] if self.chosen_for in _PREFERRED else []
        if abs(self.more_gpu_bytes) >= _NOTICEABLE_BYTES:
            more = "more" if self.more_gpu_bytes > 0 else "less"
            offers.append(f"leaves {memory_size(abs(self.more_gpu_bytes))} {more} of each GPU")
        text = f"about as fast as {settings} ({planned})"
        return f"{text}: {', '.join(offers)}" if offers else text


class NoNextBest(Fact):
    fits: bool
    """Whether the chosen settings leave the margin."""

    words = (
        "next best: none; no{fits: other|} checkpointing policy or micro-batch leaves the margin"
    )


# What became of what any spec leaves open, and what follows from it

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
_WHY_MODE: dict[AutoReason, str] = {
    "no-gpu": "on a machine without GPUs",
    "offload-does-not-fit": "here: at ratio {ratio:.2f}[ {shortage.message}]",
    "gpu-does-not-fit": "here: without offload[ {shortage.message}]",
    "gpu-memory-unknown": "here: the GPU's memory is not known",
    "weights-on-host": 'here: offload.parameters = "cpu" needs an optimizer in host memory',
    "fits-on-gpu": (
        "here: everything fits on the GPU, and offloading would not make steps noticeably shorter"
    ),
    "overlaps": "here: the CPU steps beside backward, which leaves less of a step to wait for",
    "less-recomputation": (
        "here: the GPU memory that offloading frees saves more recomputation than the offload costs"
    ),
}


class AutoMode(Fact):
    """What ``offload.mode = auto`` became."""

    mode: Mode
    why: AutoReason
    ratio: float | None = None
    """Offload ratio of the alternative that does not fit."""
    shortage: Shortage | None = None
    """Of the alternative; None where it fits."""

    @property
    def words(self) -> str:
        return "auto is {mode} " + _WHY_MODE[self.why]


class AutoCheckpointing(Fact):
    """What ``model.activation_checkpointing = auto`` became."""

    policy: Policy

    words = "activation checkpointing auto is {policy} here: {policy:recomputes}"


class TokensReached(Fact):
    """The accumulation that comes nearest to ``train.tokens_per_step``."""

    accumulation: int
    target: int
    tokens: int
    tokens_per_pass: int

    words = (
        "accumulation {accumulation} comes nearest to {target:thousands} tokens a step: "
        "{tokens:thousands}, {tokens_per_pass:thousands} in each micro-batch of all ranks"
    )


class OneMemory(Fact):
    """CPU and GPU have the same memory: what one of them holds counts once, and offloading frees
    none.
    """

    words = (
        "CPU and GPU have one memory: states count once wherever they are stepped, and offloading"
        " frees none"
    )


_WHY_NOTHING_EARLY = {
    "memory": "the host has no memory left for second states",
    "budget": "offload.speculation_gib is less than the second states of one sub-group take",
    "slower": "second states would make no step faster here",
}


class StepsEarly(Fact):
    """Gradient clipping with our engine: how much is stepped before the gradient norm is known."""

    share: float
    """Of the offloaded parameters."""
    bytes: int
    """Host memory per rank for that."""
    why_none: Literal["memory", "budget", "slower"] = "memory"
    """If nothing is: the host has no memory left, ``offload.speculation_gib`` is less than a
    sub-group needs, or it would gain nothing.
    """
    held_back_step_s: float | None = None
    """How long a step takes whose norm exceeds the limit; None where no speed is known."""

    @property
    def words(self) -> str:
        if not self.share:
            why = _WHY_NOTHING_EARLY[self.why_none]
            return f"clipping: Adam waits for the gradient norm; {why}"
        of = "" if self.share == 1 else " for {share:share} of what is offloaded"
        return (
            f"clipping: Adam does not wait{of} for the gradient norm; second states, a "
            "spare copy, take {bytes:memory} a rank[. Steps that are clipped take "
            "{held_back_step_s:.2f} s]"
        )


class SavesEvery(Fact):
    """How often checkpoints are saved where no person said it."""

    minutes: float
    usual_minutes: float
    """What would be the interval if it did not cost too much."""
    cost_s: float
    """Of training, for each of them."""

    @property
    def words(self) -> str:
        share = small_share(self.cost_s / (60 * self.minutes))
        if self.minutes == self.usual_minutes:
            return (
                f"checkpoints: one every {interval(self.minutes)} by default; each costs about "
                f"{{cost_s:duration}} of training, {share} of the time"
            )
        return (
            f"checkpoints: one every {interval(self.minutes)} instead of every "
            f"{interval(self.usual_minutes)}; each costs about {{cost_s:duration}} of training, so "
            f"that is {share} of the time"
        )


class SavesBehind(Fact):
    """Checkpoints are written while training goes on."""

    share: float
    """Of the states, how much can be copied; training waits until the rest is written."""
    bytes: int
    """Host memory per rank for copies that second states do not hold."""

    @property
    def words(self) -> str:
        if not self.share:
            return (
                "checkpoints: training waits while they are written; the host has no memory left "
                "for copies of the states"
            )
        much, rest = "the states", ""
        if self.share != 1:
            much = f"{self.share:.0%} of the states"
            rest = f". Training waits until the other {1 - self.share:.0%} are written"
        copies = (
            "copies take {bytes:memory} a rank" if self.bytes else "second states hold the copies"
        )
        return f"checkpoints: {much} are written while training goes on; {copies}{rest}"


class MlpTiled(Fact):
    """Feed-forward blocks compute some tokens at a time."""

    tile_tokens: int

    words = "feed-forward blocks compute {tile_tokens:thousands} tokens at a time"


class InputsOnHost(Fact):
    """Inputs of checkpointed layers are in host memory between forward and backward, and
    attention's results where they are kept.
    """

    bytes: int
    """Host memory per rank for the inputs."""
    results_bytes: int = 0
    """Host memory per rank for attention's results."""
    out_s: float | None = None
    """Seconds of copying both to the host in the forward pass of a micro-batch, where the speed is
    known.
    """
    back_s: float | None = None
    """Seconds of copying both back in its backward pass."""
    exposed_s: float = 0.0
    """By how much that makes a step longer."""

    @property
    def words(self) -> str:
        kinds = (("layer inputs", self.bytes), ("attention's results", self.results_bytes))
        kept = " and ".join(name for name, size in kinds if size)
        size = memory_size(self.bytes + self.results_bytes)
        return (
            f"{kept} are in host memory between forward and backward: {size} a rank"
            "[. Copying them takes {out_s:duration} in forward and {back_s:duration} in backward, "
            "{exposed_s:which makes a step {exposed_s:duration} longer|beside the computation}]"
        )


class WeightsOnHost(Fact):
    """Weights are in host memory, and copied to the GPU layer by layer."""

    bytes: int
    """Host memory per rank for them."""
    fetched_s: float | None = None
    """Seconds of copying them once, where the speed is known."""
    pass_s: float | None = None
    """Seconds of the shorter of the two passes of a micro-batch, each of which copies them."""

    @property
    def words(self) -> str:
        fetched_s, pass_s = self.fetched_s, self.pass_s
        hides = fetched_s is not None and pass_s is not None and fetched_s < pass_s
        hidden = ", which hides it" if hides else ""
        return (
            "weights are in host memory: {bytes:memory} a rank[. Copying them takes "
            f"{{fetched_s:duration}} of the {{pass_s:duration}} of each pass{hidden}]"
        )


class AttentionFallsBack(Fact):
    """The attention backend of a run whose model or settings the fastest one does not support."""

    backend: AttentionBackend
    fastest: AttentionBackend
    obstacle: Obstacle

    words = "attention runs on {backend}: {fastest} {obstacle:obstacle}"


class AcrossHosts(Fact):
    """Weights, gradients and optimizer states are sharded over the ranks of several hosts, and
    travel between them.
    """

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

    words = (
        "{machines} hosts: weights, gradients and optimizer states are sharded over all {ranks} "
        "GPUs; {bytes_per_step:gb} enter and leave each host in a step, over a network of "
        "{network:network}[: {seconds:.1f} s, which makes the step {longer_s:.1f} s longer than if "
        "the GPUs were in one]"
    )


class CheckpointInterval(Fact):
    """How often saving costs the least: read in plans of earlier versions, no longer said."""

    minutes: float

    words = "checkpoints: one in {minutes:.0f} minutes costs the least time"


Choice = (
    GpusChosen
    | SetByPerson
    | StatesChosen
    | ModeWithoutGpu
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
    | AutoMode
    | AutoCheckpointing
    | TokensReached
    | OneMemory
    | StepsEarly
    | SavesEvery
    | SavesBehind
    | MlpTiled
    | InputsOnHost
    | WeightsOnHost
    | AttentionFallsBack
    | AcrossHosts
    | CheckpointInterval
)
"""Why settings were chosen."""


# What is worth knowing of a plan that may run


class NeverRun(Fact):
    """A kind of GPU on which the project has run nothing: what is said of it follows from
    publications.
    """

    name: str

    words = (
        "planned, never run: so-tui has not run on {name} yet; speeds follow from publications, "
        "and memory from runs on NVIDIA GPUs"
    )


class DeepSpeedNvidiaOnly(Fact):
    """DeepSpeed's own SuperOffload on a GPU of another vendor."""

    words = (
        "DeepSpeed says of its SuperOffload that it supports NVIDIA GPUs only; offload.engine = "
        "so-tui makes no such demand"
    )


_COMMIT = re.compile("[0-9a-f]{40}")


class RemoteCode(Fact):
    """Every rank runs Python code that comes with the model, with the rights of the user."""

    model: str
    revision: str
    """Branch, tag or commit; empty for a folder of this host."""

    @property
    def words(self) -> str:
        where = (
            "{model:line}, revision {revision:line},"
            if self.revision
            else "the folder {model:line}"
        )
        text = (
            f"model.trust_remote_code is on: Python code of {where} runs with your rights; launch "
            "it only if you have read that code"
        )
        if not self.revision or _COMMIT.fullmatch(self.revision):
            return text
        return f"{text}. Set model.revision to a commit: a branch or tag can change"


class BeyondPositions(Fact):
    """Sequences have room for documents that are longer than the model was made for."""

    sequence_length: int
    positions: int
    """Of the model (``max_position_embeddings``), times ``model.rope_factor``."""

    words = (
        "sequences of {sequence_length:thousands} tokens: documents of more than "
        "{positions:thousands} tokens are longer than the model was made for; its rotary "
        "positions are not scaled for them, so quality may suffer; model.rope_scaling = yarn "
        "scales them"
    )


class IndexersUntrained(Fact):
    """Sparse attention's indexers get no gradient: they stay as they are."""

    parameters: int

    words = (
        "{parameters:millions} parameters of the indexers, which choose what attention reads, get "
        "no gradient: they stay as they are, without weight decay, and are exported so"
    )


class Dropout(Struct, frozen=True):
    """A dropout that the model's configuration asks for."""

    key: str
    share: float


def _dropouts(found: Sequence[Dropout]) -> str:
    return ", ".join(f"{printable_line(each.key)} = {each.share:g}" for each in found)


class DropoutOff(Fact):
    """The model's configuration asks for dropout, and training has none."""

    found: tuple[Dropout, ...]

    words = (
        "the model's config.json asks for dropout ({found:dropouts}), and it is trained without: "
        "the kernels for packed documents have none"
    )


class ClippingWaits(Fact):
    """DeepSpeed's SuperOffload overlaps nothing while it clips."""

    seconds: float | None
    """Of a step."""

    words = (
        "gradient_clipping above 0 makes DeepSpeed's SuperOffload wait for the norm: nothing "
        "overlaps with backward[ (about {seconds:.1f} s a step)]. offload.engine = so-tui clips "
        "exactly"
    )


class FasterOffload(Fact):
    """A smaller ratio, or no offload, fits too and is faster. Only in older plans."""

    mode: Mode
    ratio: float
    step_s: float
    given_step_s: float

    @property
    def words(self) -> str:
        what = "offload.mode = gpu" if self.mode == "gpu" else "offload.ratio = {ratio:.2f}"
        return (
            what + " fits too and would take {step_s:.2f} s a step instead of {given_step_s:.2f} s"
        )


class FasterWithout(Fact):
    """Keys that a person set, without which faster settings would be chosen."""

    changes: tuple[Change, ...]
    """The keys, with what would be chosen."""
    step_s: float
    given_step_s: float

    words = (
        "slower by what you set: with {changes:settings} a step would take {step_s:.2f} s instead "
        "of {given_step_s:.2f} s (predicted); the value `auto` leaves a key to so-tui"
    )


class SettingsReplaced(Fact):
    """What was chosen again, because the run's own settings do not fit on its new machine."""

    changes: tuple[Change, ...]
    shortage: Shortage | None = None

    words = (
        "the settings so far do not fit on this machine[ ({shortage.message})]; changed for it: "
        "{changes:settings}"
    )


class CompactStatesOption(Fact, tag="faster-states"):
    """A smaller format of the moments, which leaves the host memory for more second states. It is
    an option and not a faster way to train the same: losses differ slightly.
    """

    states: StatesFormat
    step_s: float
    given_step_s: float
    early_share: float
    """Of the offloaded parameters, those that would be stepped before the gradient norm is
    known.
    """
    given_early_share: float

    words = (
        'an option, chosen only where nothing more exact fits: offload.states = "{states}", whose '
        "{states:price}; a step is predicted to take {step_s:.2f} s then, and {given_step_s:.2f} s "
        "with these, since {early_share:.0%} of what is offloaded, not {given_early_share:.0%}, is "
        "stepped before the gradient norm is known"
    )


class FasterAttention(Fact):
    """An attention backend that is not installed would make steps noticeably faster."""

    backend: AttentionBackend
    used: AttentionBackend
    step_s: float
    given_step_s: float

    words = (
        "attention runs on {used}; with {backend} installed it would take {step_s:.2f} s a step "
        "instead of {given_step_s:.2f} s (predicted)"
    )


class PcieOffload(Fact):
    """The GPU is connected by PCIe, where offloading gains less."""

    words = "the GPU is connected by PCIe: offloading gains less than over NVLink-C2C"


class SlowWithoutGpu(Fact):
    parameters: int

    words = "{parameters:billions} parameters without a GPU: one step may take hours"


class OneCheckpointKept(Fact):
    """The disk holds two checkpoints and no more, so the older one goes once a new one is valid."""

    folder: str
    free_bytes: int
    needed_bytes: int
    """For as many as are kept otherwise, and one more while it is written."""
    kept: int
    """How many that is."""

    words = (
        "one checkpoint is kept instead of {kept}: {folder:line} has {free_bytes:disk} free, and "
        "{kept} and the one being written would need {needed_bytes:disk}"
    )


class PackingOff(Fact):
    """Each document is a sequence of its own, and attention takes a mask, so that padding is
    computed.
    """

    padding_share: float | None
    """Padding of all computed positions; of all positions where rows are not known; None where the
    data are not known.
    """
    mixing: tuple[str, ...]
    """Kinds of the model's layers because of which its documents cannot be packed; none where they
    could be.
    """

    words = (
        "packing is off[, since layers of {mixing:listed} would mix the documents]: padding"
        "[, up to {padding_share:.0%} of all positions with these data,] is computed but counts "
        "for nothing"
    )


class LargerSteps(Fact):
    """More tokens in an optimizer step would train faster."""

    step_s: float
    exposed_optimizer_s: float
    times: int
    tokens: int
    key: str
    value: int
    faster: float
    """Tokens per second, as a multiple of now."""

    words = (
        "a step of {step_s:.2f} s waits {exposed_optimizer_s:.2f} s for the optimizer: with "
        "{times} times the tokens in a step ({tokens:thousands}; {key} = {value}) {faster:.1f} "
        "times as many tokens a second would be trained"
    )


class GpuMemoryUnknown(Fact):
    words = "the GPU's memory size is not known, nor whether the run fits there"


class Note(Fact):
    """A text from elsewhere, such as the inspection of the machine."""

    text: str

    words = "{text}"


class DataFound(Fact):
    """A kind of rows that the same data had when they were last prepared."""

    kind: str
    """As ``so_tui.spec.data_notes`` names it."""
    rows: int
    first: int
    """The first row, from 1."""
    detail: str = ""
    source: str = ""
    """Where that row is; empty where there is one source only."""

    @property
    def sentence(self) -> str:
        found = Found(self.rows, self.first, self.detail, self.source)
        (text,) = sentences({self.kind: found})
        return text

    words = "data: {sentence:line}"


class MoreGpusKeepMargin(Fact):
    gpus: int

    words = "{gpus} GPUs of this machine leave the margin"


Caution = (
    NeverRun
    | DeepSpeedNvidiaOnly
    | RemoteCode
    | BeyondPositions
    | IndexersUntrained
    | DropoutOff
    | ClippingWaits
    | FasterOffload
    | FasterWithout
    | SettingsReplaced
    | CompactStatesOption
    | FasterAttention
    | PcieOffload
    | SlowWithoutGpu
    | PackingOff
    | LargerSteps
    | GpuMemoryUnknown
    | Note
    | DataFound
    | MoreGpusKeepMargin
    | OneCheckpointKept
)

Reason = Blocker | Need | Remedy | Choice
AnyFact = Reason | Caution | MemoryAdvice
