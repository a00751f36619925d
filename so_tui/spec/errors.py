"""Errors that a user can correct, each with an exit code.

The command line prints them; the screen shows them next to the field.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from so_tui.trust.text import printable, printable_line, without_credentials


class Problem(Struct, frozen=True):
    """One invalid input: which field, what was given, what is wrong and how to correct it."""

    code: str
    """What is wrong, in kebab-case and independent of the wording: ``unknown-key``. Documented
    where it is raised.
    """
    field: str
    """Dotted name of the field (``offload.ratio``), or another name for the input (``preset``,
    ``--machine``).
    """
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
        return (
            f"{printable_line(f'{where}{self.field}{given}')}: {printable(self.message)}. "
            f"{printable(self.advice)}"
        )


Problems = Iterator[Problem]


class Refusal(Struct, frozen=True):
    """One reason why a run cannot start here."""

    code: str
    """What stands in the way, in kebab-case and independent of the wording: ``gpu-in-use``.
    Documented where it is raised.
    """
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


def reject(
    code: str,
    field: str,
    value: str,
    message: str,
    remedy: str,
    *,
    file: str = "",
) -> InputError:
    """Return the error of one problem, to raise; see ``Problem``."""
    return InputError([Problem(code, field, value, message, remedy, file=file)])


class Refused(SoTuiError):  # noqa: N818 - the documented name of this exit status
    """The run does not fit or cannot run here: exit code 3. ``forceable`` means that starting it
    anyway might succeed.
    """

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


def refuse(code: str, message: str, *, forceable: bool = False) -> Refused:
    """Return the error of one refusal, to raise; see ``Refusal`` and ``Refused``."""
    return Refused([Refusal(code, message)], forceable=forceable)


def first_line(error: BaseException) -> str:
    """Return the first line of a third-party error, to quote in a message; the name of its type if
    it has no text.

    It is that of its cause where the error itself names only a place ("Validation error for field
    'layer_types':").
    """
    first: str = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        first_line(error.__cause__)
        if first.endswith(":") and error.__cause__
        else without_credentials(first)
    )


# Wording that several error messages share.


_LONGEST = 60
_LONGEST_SEARCHED = 2000
_MOST_BEGUN = 4
_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxlong = _repr.maxstring = (
    _repr.maxother
) = 2 * _LONGEST


def nearest(word: str, known: tuple[str, ...]) -> str:
    """Return ``Did you mean `...`? `` for a misspelt word, or for the few that begin with it, or an
    empty string if no known word is similar.
    """
    if len(word) > _LONGEST:  # comparing takes time that is quadratic in the length
        return ""
    from difflib import get_close_matches

    begun = [name for name in known if len(word) > 2 and name.startswith(word.lower())]
    few = 0 < len(begun) <= _MOST_BEGUN
    found = begun if few else get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean {' or '.join(f'`{name}`' for name in found)}? " if found else ""


def some(names: Iterable[str], most: int = 40) -> str:
    """Return names, separated by commas; only the first ones of many."""
    first = list(islice(names, most + 1))
    return ", ".join(name[: _LONGEST + 1] for name in first[:most]) + (
        ", ..." if len(first) > most else ""
    )


def shown(value: Any) -> str:
    """Return a value as TOML writes it, on one line that is safe to show, without credentials, and
    shortened to fit in a message.
    """
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, dict):
        text = "{" + some(map(str, value), _LONGEST) + "}"
    elif isinstance(value, list | tuple | int):
        text = _repr.repr(
            value
        )  # str() of all of it may take long, and fails for integers of thousands of digits
    else:
        text = str(value)
    # Bounded before the search, which is not linear; credentials are hidden before the end of their
    # URL is cut off.
    text = printable_line(without_credentials(text[:_LONGEST_SEARCHED])[: _LONGEST + 1])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
