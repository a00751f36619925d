"""The model of a run's newest checkpoint, exported as a Hugging Face folder by a helper process, with its progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from so_tui.launch.helpers import stream_tool
from so_tui.runs import RunDirectory
from so_tui.units import disk_size, thousands


class ExportProgress(Struct, frozen=True, kw_only=True):
    """How far an export is. First every tensor is read, then the files are written."""

    doing: Literal["reading", "writing"]
    done_bytes: int
    total_bytes: int
    done_tensors: int = 0
    total_tensors: int = 0
    """0 while files are written."""

    def __str__(self) -> str:
        sizes = f"{disk_size(self.done_bytes)} of {disk_size(self.total_bytes)}"
        if self.doing == "writing":
            return f"wrote {sizes}"
        return f"read {thousands(self.done_tensors)} of {thousands(self.total_tensors)} tensors, {sizes}"


def export_model(run: RunDirectory, folder: Path | str) -> Iterator[ExportProgress | str]:
    """Export a run's newest checkpoint, and yield how far it is, and what is worth saying, in words.

    Raises:
        InputError: The run has no checkpoint, or the folder holds something else.
        ToolError: It cannot be read or written.
    """
    for event in stream_tool("export", {"run": str(run.path), "to": str(folder)}):
        if progress := event.get("progress"):
            yield msgspec.convert(progress, ExportProgress)
        elif message := event.get("message"):
            yield str(message)


def in_steps(events: Iterator[ExportProgress | str], parts: int) -> Iterator[ExportProgress | str]:
    """Leave out progress within the same one of ``parts`` equal parts of reading, or of writing, as the one before."""
    last: tuple[str, int] | None = None
    for event in events:
        if isinstance(event, ExportProgress):
            part = event.doing, event.done_bytes * parts // max(1, event.total_bytes)
            if part == last:
                continue
            last = part
        yield event
