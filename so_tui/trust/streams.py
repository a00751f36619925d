"""Standard output and error through which no control sequence reaches the terminal, whatever is
printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from so_tui.trust.text import printable

if TYPE_CHECKING:
    from rich.console import Console


_WIDEST = 1000
"""Columns of a terminal that are used."""


class _PrintableStream:
    """A text stream that spells out control, bidirectional and invisible characters; it otherwise
    behaves like the stream beneath it.
    """

    def __init__(self, beneath: TextIO) -> None:
        self.beneath = beneath
        self.continues = ""
        """Name of the run that continues without output; empty: losing the output is an error."""
        self._told = False

    def write(self, text: str) -> int:
        """Write text, and return the number of its characters."""
        with self._despite_loss():
            self.beneath.write(printable(text))
        return len(text)

    def flush(self) -> None:
        """Write what is left."""
        with self._despite_loss():
            self.beneath.flush()

    @contextmanager
    def _despite_loss(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.continues:
                raise
            if not self._told:
                self._told = True
                with suppress(OSError):
                    message = f"output cannot be written ({error.strerror})"
                    print(f"so-tui: {message}; {self.continues} continues", file=sys.stderr)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def guard_output() -> None:
    """Guard sys.stdout and sys.stderr for the rest of this process: messages, usage errors and
    tracebacks all pass through them.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _PrintableStream):
            setattr(sys, name, cast(TextIO, _PrintableStream(stream)))


def outlive_output(what: str) -> None:
    """From now on, continue when sys.stdout cannot be written: its reader has ended, or its disk is
    full.

    Args:
        what: The name of what continues, for the message.
    """
    if isinstance(sys.stdout, _PrintableStream):
        sys.stdout.continues = what


def beneath(stream: TextIO) -> TextIO:
    """Return the unguarded stream, for a writer that sends control sequences and makes text
    printable itself.
    """
    return stream.beneath if isinstance(stream, _PrintableStream) else stream


def console(*, stderr: bool = False) -> Console:
    """Return a console whose styling reaches the terminal, and whose text is made printable before
    it is styled.

    Markup and emoji codes are off, because printed text often comes from elsewhere, such as
    exceptions and paths with brackets and colons.
    """
    from so_tui.trust.console import PrintableConsole

    made = PrintableConsole(
        file=beneath(sys.stderr if stderr else sys.stdout),
        highlight=False,
        markup=False,
        emoji=False,
    )
    # Every line of a table is filled up to the width, which COLUMNS may set to anything. Files and
    # pipes have none: their lines stay whole.
    whole = not made.is_terminal and "COLUMNS" not in os.environ
    made.width = _WIDEST if whole else min(made.width, _WIDEST)
    return made
