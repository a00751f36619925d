"""Write metrics. Only rank 0 has a MetricsWriter."""

from __future__ import annotations

import contextlib

from so_tui.runs.codec import encode_line
from so_tui.runs.directory import RunDirectory
from so_tui.runs.index import index_path, write_index
from so_tui.runs.records import MetricRecord
from so_tui.runs.segments import MEBIBYTE, SegmentWriter, cut_incomplete_line, segments


class MetricsWriter:
    """Appends the records of one attempt to ``metrics/`` and writes an index for each closed segment.

    Other processes can read a record when ``append`` returns. It is not synced to the device: the next attempt repeats the steps that a
    power failure loses. Indexing a full segment of 4 MiB takes about 0.1 s, once in about 10,000 steps. For one thread.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, *, segment_bytes: int = 4 * MEBIBYTE
    ) -> None:
        """Create ``metrics/`` and index the segments of killed attempts. Raises OSError."""
        self._attempt = attempt
        self._folder = run.metrics_dir
        self._segments = SegmentWriter(
            run.metrics_dir, limit_bytes=segment_bytes, on_closed=lambda _: self._index_closed()
        )
        self._index_closed()

    def append(self, record: MetricRecord) -> None:
        """Write one record. Raises ValueError for a record of another attempt, OSError if the disk is full."""
        if record.attempt != self._attempt:
            raise ValueError(
                f"record of attempt {record.attempt} for the writer of attempt {self._attempt}"
            )
        self._segments.append(encode_line(record))

    def close(self) -> None:
        """Close and index the last segment. Raises OSError."""
        self._segments.close()

    def _index_closed(self) -> None:
        """Index all segments without an index. No segment may be open."""
        for path in segments(self._folder).values():
            if not index_path(path).exists():
                cut_incomplete_line(path)
                # An index is optional, so a full disk must not lose the next record because of it. Writing that record reports the
                # full disk, and the index is tried again after the next segment or in the next attempt.
                with contextlib.suppress(OSError):
                    write_index(path)
