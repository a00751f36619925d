"""``[[model.parameters]]``: the generated table of a model's parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from so_tui.spec.sections.section import Section

TensorKind = Literal["linear", "expert", "embedding", "other"]


class Tensor(Struct, frozen=True, array_like=True):
    """One row of the generated parameter table, in TOML an array ``[name, shape, decay, kind, tied]``."""

    name: str
    """Name in the Hugging Face model; ``{i}`` stands for the index of the repetition."""
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    decay: bool
    """Whether weight decay applies."""
    kind: TensorKind
    """``linear``: used by every token; ``expert``: stacked, a token uses some; ``embedding``: looked up; ``other``: norms, biases."""
    tied: str = ""
    """Tensor that this one shares storage with. A tied tensor has no optimizer states."""


class ParameterBlock(Section, frozen=True):
    """Consecutive tensors that occur ``repeat`` times in a row, such as the layers of a model."""

    repeat: Annotated[int, Meta(ge=1, le=10_000)] = 1
    first: Annotated[int, Meta(ge=0, le=10_000)] = 0
    tensors: tuple[Tensor, ...] = ()


def is_matrix(name: str, dimensions: int) -> bool:
    """Return whether a parameter is a matrix or an embedding, and not a bias, norm or sink (one dimension)."""
    return dimensions > 1 and not name.endswith("bias")


def is_indexer(name: str) -> bool:
    """Return whether a parameter belongs to an indexer of sparse attention, by its name in transformers.

    An indexer chooses the tokens that attention reads. No gradient of a loss passes through that choice.
    """
    return ".indexer." in f".{name}"


def decays(name: str, dimensions: int) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, except those that get no gradient, which it would only shrink."""
    return is_matrix(name, dimensions) and not is_indexer(name)
