"""The entry point: parses the command line, calls the command, and turns errors into messages and
exit codes.

A command's code is imported when it is called.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from so_tui.commands.parser import build_parser
from so_tui.trust.streams import guard_output

if TYPE_CHECKING:
    from so_tui.spec.errors import Problem


_FOR_PROGRAMS = ("supervise", "completion")
"""Functions of commands whose output is no text for the user of this terminal."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # without Unicode, a terminal or pipe gets question marks instead of a traceback
    guard_output()
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for words
        from so_tui.commands.completion import offer_words

        offer_words(parser)
    arguments = parser.parse_args(argv)
    if arguments.verbose:
        from so_tui.commands.common import log_to_stderr

        log_to_stderr()
    from so_tui.spec.errors import InputError, Refused, SoTuiError

    try:
        code = _call(arguments)
        try:
            print(
                end="", flush=True
            )  # so that a full disk is reported below, and not by Python at its exit
        except BrokenPipeError:
            _discard_output()
        return code
    except Refused as error:
        _report(*(f"refused: {reason}" for reason in error.reasons))
        if error.forceable:
            _report("--force starts it anyway; the run records that")
        return error.exit_code
    except InputError as error:
        _report(*map(str, error.problems))
        return error.exit_code
    except SoTuiError as error:
        _report(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()  # the reader, such as `head`, has ended
        return 0
    except OSError as error:
        problem = _problem_of(error)
        if problem is None:
            raise
        if problem.field == "output":
            _discard_output()
        _report(str(problem))
        return InputError.exit_code


def _call(arguments: argparse.Namespace) -> int:
    """Call the command of parsed arguments and return its exit code.

    Raises:
        InputError: ``--machine`` is given for a command that ignores it (code ``unused-option``);
            otherwise as the command.
    """
    from so_tui.spec.errors import InputError, Problem

    module, _, function = arguments.handler.partition(":")
    if arguments.machine and not arguments.takes_machine:
        message, remedy = (
            "has no effect on this command",
            "Leave it out. `inspect --json` shows the machine that runs start on.",
        )
        raise InputError(
            [
                Problem(
                    code="unused-option",
                    field="--machine",
                    value=arguments.machine,
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    if not getattr(arguments, "json", False) and function not in _FOR_PROGRAMS:
        _use_units_of_the_user()
    return int(getattr(importlib.import_module(f"so_tui.commands.{module}"), function)(arguments))


def _use_units_of_the_user() -> None:
    from so_tui.settings_file import load_settings
    from so_tui.units import show_memory_in

    show_memory_in(load_settings().settings.screen.units)


def _report(*messages: str) -> None:
    for message in messages:
        print(f"so-tui: {message}", file=sys.stderr)


def _problem_of(error: OSError) -> Problem | None:
    """Return the problem if the user can fix it: a name that is too long, no permission, or a full
    disk. None for any other error.
    """
    from so_tui.spec.errors import Problem, shown

    if error.errno == errno.ENAMETOOLONG:
        value = shown(str(error.filename)) if error.filename else ""
        message, remedy = "is too long for a file name", "Give a shorter one."
        return Problem(
            code="name-too-long", field="path", value=value, message=message, remedy=remedy
        )
    if error.errno == errno.EACCES and error.filename:
        message, remedy = (
            "may not be opened (Permission denied)",
            "Check its rights and those of the folders above it, or name another.",
        )
        return Problem(
            code="no-permission",
            field="path",
            value=shown(str(error.filename)),
            message=message,
            remedy=remedy,
        )
    if error.errno not in _UNWRITABLE:
        return None
    field = str(error.filename) if error.filename else "output"
    remedy = (
        "Free some space there and try again."
        if error.filename
        else "Free some space at its destination, or redirect it."
    )
    return Problem(
        code="not-writable",
        field=field,
        value="",
        message=f"cannot be written ({error.strerror})",
        remedy=remedy,
    )


def _discard_output() -> None:
    """Redirect stdout to /dev/null, because Python would fail again when it flushes stdout at
    exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
