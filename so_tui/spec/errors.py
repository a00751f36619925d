"""Errors that a user can fix, each with its exit code. The command line prints them; the screen shows them beside the field."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with the user's input."""

    code: str = ""
    """What is wrong, in kebab-case and independent of the wording: ``unknown-key``. Documented where it is raised."""
    field: str
    """Dotted name of the field (``offload.ratio``), or of the argument or thing at fault (``preset``, ``--machine``)."""
    value: str
    """The given value in the user's notation; empty when none was given."""
    message: str
    remedy: str
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        given = f" = {self.value}" if self.value else ""
        return f"{where}{self.field}{given}: {self.message}. {self.remedy}"


class Refusal(Struct, frozen=True):
    """One reason why a run cannot start here."""

    code: str
    """What stands in the way, in kebab-case and independent of the wording: ``gpu-in-use``. Documented where it is raised."""
    message: str
    """What stands in the way and what to do about it."""

    def __str__(self) -> str:
        return self.message


class SoTuiError(Exception):
    """Base of the errors that end a command with a clear message and no traceback."""

    exit_code = 1


class InputError(SoTuiError):
    """The arguments or the input are wrong: exit code 2. Nothing was started or written."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        """Keep the problems when the error is pickled for another process."""
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
    """Return the first line of another library's error message, or the error's type when the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
