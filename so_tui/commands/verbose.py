"""``--verbose``: what so-tui decides and calls, as modules log it, on stderr."""

from __future__ import annotations

import logging

from so_tui.trust.printable import printable_line


class _OneLine(logging.Formatter):
    """Makes each message one printable line, whoever wrote what is in it."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_line(super().format(record))


def log_to_stderr() -> None:
    """Show the messages of so-tui's own loggers from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(name)s: %(message)s"))
    logger = logging.getLogger("so_tui")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
