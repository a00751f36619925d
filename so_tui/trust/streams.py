"""Standard output and error through which no control sequence reaches the terminal, whatever is
printed.
"""

from __future__ import annotations

import sys
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

    def write(self, text: str) -> int:
        """Write text, and return the number of its characters."""
        self.beneath.write(printable(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

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
    # Every line of a table is filled up to the width, which COLUMNS may set to anything.
    made.width = min(made.width, _WIDEST)
    return made
