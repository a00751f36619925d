"""What this process is busy with, noted for the command that started it, and the CPU time that a
row or a file may take.

The kernel ends the process beyond that (SIGXCPU), also in code that never returns to Python.
Processes that no command started as its helper have no limit.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

VARIABLE = "SO_TUI_HELPER"
"""Set for a helper: descriptor of the note, and CPU seconds for a row or a file."""
_BYTES_A_SECOND = 1_000_000
"""Size that adds a CPU second: the slowest tokenizers and readers take less."""
_NOTE_BYTES = 1 << 10

_state: dict[str, float] = {}
"""``note``, where there is one, and ``seconds``; empty without limits."""
_doing = [""]


def begin() -> None:
    """Take the limits of a helper. What it starts does not inherit them."""
    if found := os.environ.pop(VARIABLE, ""):
        note, _, seconds = found.partition(":")
        _state.update(note=int(note), seconds=float(seconds))


def row_seconds() -> float:
    """Return the CPU seconds for a row, to hand to a further process; 0 without a limit."""
    return _state.get("seconds", 0.0)


def begin_further(seconds: float) -> None:
    """Take the limit of a process that a helper started."""
    if seconds:
        _state["seconds"] = seconds


@contextmanager
def limited(what: str, size_bytes: int = 0) -> Iterator[None]:
    """Limit the CPU time of a step, which may lie within another.

    Args:
        what: What it works on, for messages: ``row 7 of rows.jsonl``.
        size_bytes: What it has to read; large ones may take longer.
    """
    if not _state:
        yield
        return
    outer, hard = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = _state["seconds"] + size_bytes / _BYTES_A_SECOND
    end = ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (end if hard < 0 else min(end, hard), hard))
    before, _doing[0] = _doing[0], what
    _write(what)
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise
    finally:
        _doing[0] = before
        _write(before)
        resource.setrlimit(resource.RLIMIT_CPU, (outer, hard))


def _write(what: str) -> None:
    if "note" in _state:
        text = what.encode(errors="replace")[:_NOTE_BYTES]
        os.pwrite(int(_state["note"]), text.ljust(_NOTE_BYTES, b"\0"), 0)
