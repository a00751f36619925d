"""Errors a user can mend, each with the exit code of the contract. The command line prints them; the screen shows them beside the field."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with what the user gave."""

    code: str = ""
    """What is wrong, in kebab-case and independent of the wording: ``unknown-key``. Documented where it is raised."""
    field: str
    """Dotted name of the field (``offload.ratio``), or what stands for it (``preset``, ``--machine``)."""
    value: str
    """What was given, as the user would recognise it; empty when nothing was."""
    message: str
    remedy: str
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}: " if self.file else ""
        given = f" = {self.value}" if self.value else ""
        return f"{where}{self.field}{given}: {self.message}. {self.remedy}"


class SoTuiError(Exception):
    """Base of the errors that end a command with a clear message and no traceback."""

    exit_code = 1


class InputError(SoTuiError):
    """Usage or input is wrong: exit code 2, nothing was started or written."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        """Comes whole from another process."""
        return type(self), (self.problems,)


class Refused(SoTuiError):  # noqa: N818 - the word of the contract
    """The run does not fit or cannot run here: exit code 3. ``forceable`` where that is not certain to fail."""

    exit_code = 3

    def __init__(self, reasons: Sequence[str], *, forceable: bool = False) -> None:
        self.reasons = tuple(reasons)
        self.forceable = forceable
        super().__init__("\n".join(self.reasons))


def first_line(error: BaseException) -> str:
    """The first line of what somebody else's code says went wrong, to be put into a message; the error's kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
