"""One metrics segment as a reader knows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from so_tui.runs.blocks import Columns
from so_tui.runs.codec import decode_metric
from so_tui.runs.index import SegmentIndex, SegmentSummary
from so_tui.runs.index_cache import fingerprint
from so_tui.runs.records import StepRecord
from so_tui.runs.segments import read_lines, read_span


class Segment:
    """A segment: known by its index, or read record by record up to ``offset``. Its records are not kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.index: SegmentIndex | None = None
        self.summary = SegmentSummary()
        self.name = ""
        """Its fingerprint before it was read; empty if it has none."""
        self.complete = False
        """Whether it was read to its end, or has an index."""

    @property
    def content(self) -> SegmentIndex | SegmentSummary:
        return self.index or self.summary

    @property
    def attempt(self) -> int:
        return self.content.attempt

    @property
    def step_is_newer(self) -> bool:
        return self.content.step_is_newer

    def take(self, index: SegmentIndex | None) -> bool:
        """Use an index from now on, if there is one. Return whether there is."""
        if index is None:
            return False
        self.index, self.summary, self.complete = index, SegmentSummary(), True
        return True

    def forget(self) -> None:
        """Begin again, without an index."""
        self.index, self.summary, self.offset, self.complete = None, SegmentSummary(), 0, False

    def remember_state(self) -> None:
        """Take note of what the file is before it is read."""
        try:
            self.name = fingerprint(self.path)
        except OSError:  # gone: its index is not kept
            self.name = ""

    def read_on(self, limit_bytes: int) -> bool:
        """Read about ``limit_bytes`` more of its records. Return whether there were any lines. Raises OSError."""
        lines, _ = read_lines(self.path, self.offset, limit_bytes)
        for line in lines:
            if (record := decode_metric(line)) is not None:
                self.summary.add(record, self.offset)
            self.offset += len(line) + 1
        return bool(lines)

    def records(self, positions: Columns, start: int, stop: int) -> Iterator[StepRecord]:
        """Yield the step records of the blocks ``[start, stop)``, as the summary has them. Raises OSError."""
        if start >= stop:
            return
        offsets = positions["offset"]
        end = self.offset if self.index is None else self.index.segment_bytes
        before = positions["first"][start] - 1
        for line in read_span(
            self.path, int(offsets[start]), int(offsets[stop]) if stop < len(offsets) else end
        ):
            record = decode_metric(line)
            if isinstance(record, StepRecord) and record.step > before:
                before = record.step
                yield record
