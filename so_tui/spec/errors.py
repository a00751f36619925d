"""Errors that a user can correct, each with an exit code.

The command line prints them; the screen shows them next to the field.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from so_tui.trust.printable import printable, printable_line
from so_tui.trust.secrets import without_credentials


class Problem(Struct, frozen=True, kw_only=True):
    """One invalid input: which field, what was given, what is wrong and how to correct it."""

    code: str
    """What is wrong, in kebab-case and independent of the wording: ``unknown-key``. Documented where it is raised."""
    field: str
    """Dotted name of the field (``offload.ratio``), or another name for the input (``preset``, ``--machine``)."""
    value: str
    """The input as the user wrote it; empty if nothing was given."""
    message: str
    """What is wrong, as a clause that follows the field and value; no full stop."""
    remedy: str
    """How to correct it, in whole sentences."""
    default: str = ""
    """Default of the field as TOML; empty if it has none."""
    file: str = ""
    """File in which the problem was found."""

    @property
    def advice(self) -> str:
        """The remedy and, if the field has one, its default."""
        return f"{self.remedy} The default is {self.default}." if self.default else self.remedy

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        given = f" = {self.value}" if self.value else ""
        return f"{printable_line(f'{where}{self.field}{given}')}: {printable(self.message)}. {printable(self.advice)}"


class Refusal(Struct, frozen=True):
    """One reason why a run cannot start here."""

    code: str
    """What stands in the way, in kebab-case and independent of the wording: ``gpu-in-use``. Documented where it is raised."""
    message: str
    """What stands in the way and what to do about it."""

    def __str__(self) -> str:
        return self.message


class SoTuiError(Exception):
    """Base class of errors that end a command with a message instead of a traceback."""

    exit_code = 1


class InputError(SoTuiError):
    """Invalid usage or input. Nothing was started or written; exit code 2."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        """Keep the problems when the error is pickled to another process."""
        return type(self), (self.problems,)


class Refused(SoTuiError):  # noqa: N818 - the documented name of this exit status
    """The run does not fit or cannot run here: exit code 3. ``forceable`` means that starting it anyway might succeed."""

    exit_code = 3

    def __init__(self, refusals: Sequence[Refusal], *, forceable: bool = False) -> None:
        self.refusals = tuple(refusals)
        self.forceable = forceable
        super().__init__("\n".join(self.reasons))

    @property
    def reasons(self) -> tuple[str, ...]:
        """The messages of the refusals."""
        return tuple(refusal.message for refusal in self.refusals)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the refusals."""
        return tuple(refusal.code for refusal in self.refusals)


def first_line(error: BaseException) -> str:
    """Return the first line of a third-party error, to quote in a message; the name of its type if it has no text.

    It is that of its cause where the error itself names only a place ("Validation error for field 'layer_types':").
    """
    first: str = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        first_line(error.__cause__)
        if first.endswith(":") and error.__cause__
        else without_credentials(first)
    )
