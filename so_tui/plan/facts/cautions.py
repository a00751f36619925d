"""What is worth knowing of a plan that may run."""

from __future__ import annotations

from so_tui.plan.facts.coded import CodedFact
from so_tui.spec.attention import AttentionBackend
from so_tui.spec.sections.offload import Mode, StatesFormat


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
