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


def decays(name: str, dimensions: int) -> bool:
    """Return whether weight decay applies to a parameter: to matrices and embeddings, not to biases, norms and sinks (one dimension)."""
    return dimensions > 1 and not name.endswith("bias")
