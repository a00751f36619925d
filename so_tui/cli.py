"""The entry point: parses the command line, calls the command, and turns errors into messages and
exit codes.

A command's code is imported when it is called.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from so_tui.commands.parser import build_parser, unknown_arguments
from so_tui.trust.streams import guard_output

if TYPE_CHECKING:
    from so_tui.spec.errors import Problem


_FOR_PROGRAMS = ("supervise", "completion")
"""Functions of commands whose output is no text for the user of this terminal."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_LIMITS = {errno.EMFILE: "-n", errno.ENFILE: "-n", errno.EAGAIN: "-u", errno.ENOMEM: "-v"}
"""Options of ``ulimit`` by the error of what the system does not give."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed, so that the next file opened would take its place
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # without Unicode, a terminal or pipe gets question marks instead of a traceback
    guard_output()
    # The user keeps the rights to what is made, whatever the umask takes away.
    os.umask(os.umask(0o077) & 0o077)
    signals = _ended_by_signals()
    try:
        return _main(argv)
    except _Ended as ended:
        # Seen by whoever waits for this process, as if nothing had been cleaned up.
        (number,) = ended.args
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return 128 + int(number)  # the first process of a container ignores it
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


class _Ended(BaseException):
    """A signal, its argument, ends the command. Not an error, so that no ``except Exception`` stops
    it.
    """


def _ended_by_signals() -> list[signal.Signals]:
    """Have signals that end a process end the command like an error, so that it ends its helpers
    and removes what is unfinished. A second one ends it at once.

    Returns:
        The signals; none of those that are ignored (``nohup``).
    """
    if threading.current_thread() is not threading.main_thread():
        return []

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Ended(number)

    found = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in found:
        signal.signal(number, end)
    return found


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for words
        from so_tui.commands.completion import offer_words

        offer_words(parser)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # said with the usage of the command, and not with that of so-tui
        arguments.parser.error(unknown_arguments(arguments, unknown))
    if arguments.verbose:
        from so_tui.commands.common import log_to_stderr

        log_to_stderr()
    from so_tui.spec.errors import InputError, Refused, SoTuiError

    try:
        code = _call_asking(arguments)
        try:
            print(end="", flush=True)  # a full disk is reported below, not by Python at its exit
        except BrokenPipeError:
            _discard(sys.stdout)
        return code
    except Refused as error:
        _report(*(f"refused: {reason}" for reason in error.reasons))
        if error.forceable:
            _report("--force starts it anyway; the run records that")
        return error.exit_code
    except SoTuiError as error:
        _report(*(error.problems if isinstance(error, InputError) else (error,)))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard(sys.stdout)  # the reader, such as `head`, has ended
        return 0
    except OSError as error:
        problem = _problem_of(error)
        if problem is None:
            raise
        logging.getLogger(__name__).info("the error came from here:", exc_info=True)
        if problem.field == "output":
            _discard(sys.stdout)
        _report(problem)
        return InputError.exit_code


def _call_asking(arguments: Namespace) -> int:
    """Call the command; if it refuses code of a model, ask on the terminal whether to allow it, and
    call it again. Returns and raises as the command.
    """
    from so_tui.spec.errors import InputError

    while True:
        try:
            return _call(arguments)
        except InputError as error:
            from so_tui.commands.trust import asked_to_allow

            if not asked_to_allow(error):
                raise


def _call(arguments: Namespace) -> int:
    """Call the command of parsed arguments and return its exit code.

    Raises:
        InputError: ``--machine`` is given for a command that ignores it (code ``unused-option``);
            otherwise as the command.
    """
    from so_tui.commands.common import show_notes
    from so_tui.spec.errors import reject

    module, _, function = arguments.handler.partition(":")
    if arguments.machine and not arguments.takes_machine:
        raise reject(
            "unused-option",
            "--machine",
            arguments.machine,
            "has no effect on this command",
            "Leave it out. `inspect --json` shows the machine that runs start on.",
        )
    show_notes(not arguments.quiet)
    if not getattr(arguments, "json", False) and function not in _FOR_PROGRAMS:
        from so_tui.settings_file import load_settings
        from so_tui.units import show_memory_in

        loaded = load_settings()
        show_memory_in(loaded.settings.screen.units)
        if module != "settings":  # it lists them itself
            _report(*loaded.problems)
    return int(getattr(importlib.import_module(f"so_tui.commands.{module}"), function)(arguments))


def _report(*messages: object) -> None:
    for message in messages:
        try:
            print(f"so-tui: {message}", file=sys.stderr)
        except OSError:  # the exit code says it still
            _discard(sys.stderr)


def _problem_of(error: OSError) -> Problem | None:
    """Return the problem of a file or of the output; None for an error that concerns neither."""
    from so_tui.spec.errors import Problem, shown

    name, why = str(error.filename or ""), error.strerror
    if limit := _LIMITS.get(error.errno or 0):
        message = f"is too low for this command ({why})"
        remedy = "Raise it for this shell or job, or end other programs of yours."
        return Problem("system-limit", f"ulimit {limit}", "", message, remedy)
    if error.errno in _UNWRITABLE:
        remedy = (
            "Free some space there and try again."
            if name
            else "Free some space at its destination, or redirect it."
        )
        return Problem("not-writable", name or "output", "", f"cannot be written ({why})", remedy)
    if error.errno == errno.ENOENT and not name:
        message = "is gone: it was removed or replaced"
        return Problem("no-working-folder", "working folder", "", message, "Change to another.")
    if not name and error.errno != errno.ENAMETOOLONG:
        return None
    value = shown(name) if name else ""
    known = {
        errno.ENAMETOOLONG: Problem(
            "name-too-long", "path", value, "is too long for a file name", "Give a shorter one."
        ),
        errno.EACCES: Problem(
            "no-permission",
            "path",
            value,
            "may not be opened (Permission denied)",
            "Check its rights and those of the folders above it, or name another.",
        ),
    }
    usual = Problem(
        "file-not-usable",
        "path",
        value,
        f"cannot be used ({why})",
        "Check what is there, and that its file system answers.",
    )
    return known.get(error.errno or 0, usual)


def _discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null; Python would fail again when it flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
