"""What a model is asked to write, and what it answers: the lines between so-tui and the helper
process that has the model.

The helper reads a ``LoadModel``, then ``Ask`` and ``Cancel`` in any order until its input ends. It
writes events.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from so_tui.spec.errors import Problem
from so_tui.trust.decoding import prepare

Side = Literal["tuned", "base"]
"""The model that was trained, or the one that its training began with."""
Device = Literal["auto", "cpu", "gpu"]
Ended = Literal["stop", "length", "context", "cancelled"]
"""By a stop token, at ``max_tokens``, at the longest sequence of the model, or on request."""


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen from the model's probabilities."""

    temperature: Annotated[float, Meta(ge=0, le=5)] = 0.7
    """What logits are divided by; 0 always takes the most probable token."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """Only the most probable tokens that together have this probability can be chosen."""
    max_tokens: Annotated[int, Meta(ge=1, le=32_768)] = 256
    """Tokens of an answer at most."""
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    """The same seed gives the same answer."""


class Turn(Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class LoadModel(Struct, frozen=True, kw_only=True, tag="load"):
    """Which model to load: a run's newest checkpoint, or a model's folder."""

    run: str = ""
    """Path of a run; empty for a folder."""
    folder: str = ""
    compare: bool = False
    """Also load the base model."""
    base: str = ""
    """Folder or hub id of the base model; if empty, the one that the run or the export names."""
    device: Device = "auto"


class Prompt(Struct, frozen=True, kw_only=True):
    """What one of the models is asked."""

    side: Side = "tuned"
    turns: tuple[Turn, ...] = ()
    """A conversation that ends with the user's turn; empty if ``text`` is to be continued."""
    text: str = ""
    """Text to continue as it is, without a chat template."""


class Ask(Struct, frozen=True, kw_only=True, tag="ask"):
    """Asks for answers, which are written at the same time."""

    number: Annotated[int, Meta(ge=1)]
    """Ascending; events say which they belong to."""
    prompts: tuple[Prompt, ...]
    """At most one for each side."""
    sampling: Sampling = Sampling()


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    """Ends the answers to everything that was asked up to ``number``."""

    number: int


class Progress(Struct, frozen=True, kw_only=True, tag="progress"):
    """What the helper does until the model is loaded."""

    message: str


class ModelFacts(Struct, frozen=True, kw_only=True):
    """A model that was loaded."""

    side: Side
    name: str
    """Name of the run, or the model's folder or hub id."""
    step: int | None = None
    """Of the checkpoint; None for a model that is not so-tui's."""
    parameters: int
    random: bool = False
    """Whether its training is known to have begun with random weights."""


class Loaded(Struct, frozen=True, kw_only=True, tag="loaded"):
    """The helper can be asked."""

    models: tuple[ModelFacts, ...]
    device: str
    """Name of the GPU, or ``CPU``."""
    layout: str
    """How conversations are written, for people."""


class Piece(Struct, frozen=True, kw_only=True, tag="piece"):
    """The next part of an answer."""

    number: int
    side: Side
    text: str


class Answer(Struct, frozen=True, kw_only=True, tag="answer"):
    """A complete answer."""

    number: int
    side: Side
    text: str
    tokens: int
    """Generated tokens, a stop token included."""
    seconds: float
    ended: Ended


class Rejected(Struct, frozen=True, kw_only=True, tag="rejected"):
    """A prompt that cannot be answered. The helper can be asked again."""

    number: int
    side: Side
    problem: Problem


Request = LoadModel | Ask | Cancel
Event = Progress | Loaded | Piece | Answer | Rejected

prepare(LoadModel, Ask, Cancel, Progress, Loaded, Piece, Answer, Rejected)
