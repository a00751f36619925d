"""What was said so far to each model. Models are asked the same, and each goes on from its own answers."""

from __future__ import annotations

import msgspec

from so_tui.spec import InputError, Problem
from so_tui.spec.generation import Prompt, Sampling, Side, Turn


class Conversation:
    """The turns of one conversation with one or two models."""

    def __init__(self, system: str = "") -> None:
        self._begin = (Turn("system", system),) if system else ()
        self._turns: dict[Side, tuple[Turn, ...]] = {}

    def ask(self, side: Side, text: str) -> Prompt:
        """Add a question, and return what the model is asked."""
        self._turns[side] = (*self._turns.get(side, self._begin), Turn("user", text))
        return Prompt(side=side, turns=self._turns[side])

    def answered(self, side: Side, text: str) -> None:
        """Add an answer."""
        self._turns[side] = (*self._turns[side], Turn("assistant", text))

    def take_back(self, side: Side) -> None:
        """Remove the last question, which was not answered."""
        self._turns[side] = self._turns[side][:-1]


def sampling_text(sampling: Sampling) -> str:
    """Return sampling as text that a user can edit."""
    return "  ".join(
        f"{name.replace('_', '-')}={value:g}"
        for name, value in msgspec.structs.asdict(sampling).items()
    )


def read_sampling(text: str) -> Sampling:
    """Return the sampling that a user typed; what is left out has its default.

    Raises:
        InputError: A name is unknown or a value out of range (``sampling``).
    """
    pairs = dict(word.partition("=")[::2] for word in text.split())
    try:
        values = {name.replace("-", "_"): value for name, value in pairs.items()}
        return msgspec.convert(values, Sampling, strict=False)
    except msgspec.ValidationError as error:
        message, remedy = (
            f"cannot be used ({error})",
            f"Write, for example: {sampling_text(Sampling())}",
        )
        raise InputError(
            [Problem(code="sampling", field="sampling", value=text, message=message, remedy=remedy)]
        ) from error
