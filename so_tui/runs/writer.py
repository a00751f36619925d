"""The writing side of the metrics: rank 0 alone holds a MetricsWriter."""

from __future__ import annotations

import contextlib

from so_tui.runs.codec import encode_line
from so_tui.runs.directory import RunDirectory
from so_tui.runs.index import index_path, write_index
from so_tui.runs.records import MetricRecord
from so_tui.runs.segments import MEBIBYTE, SegmentWriter, segments


class MetricsWriter:
    """Appends the records of one attempt to ``metrics/``, and keeps the index of closed segments beside them.

    Every record is on disk for other processes when ``append`` returns (not synced to the device: what a power cut takes, the next
    attempt repeats from its checkpoint). Indexing a full segment of 4 MiB takes about 0.1 s, once in some 10,000 steps. For one thread.
    """

    def __init__(self, run: RunDirectory, attempt: int, *, segment_bytes: int = 4 * MEBIBYTE) -> None:
        """Makes ``metrics/`` and indexes what a killed attempt left without. Raises OSError."""
        self._attempt = attempt
        self._folder = run.metrics_dir
        self._segments = SegmentWriter(run.metrics_dir, limit_bytes=segment_bytes, on_closed=lambda _: self._index_closed())
        self._index_closed()

    def append(self, record: MetricRecord) -> None:
        """Writes one record. Raises ValueError for another attempt's record, OSError when the disk is full."""
        if record.attempt != self._attempt:
            raise ValueError(f"record of attempt {record.attempt} for the writer of attempt {self._attempt}")
        self._segments.append(encode_line(record))

    def close(self) -> None:
        """Closes and indexes the last segment. Raises OSError."""
        self._segments.close()

    def _index_closed(self) -> None:
        """Indexes what has no index; called while no segment is open."""
        for path in segments(self._folder).values():
            if not index_path(path).exists():
                # An index only saves the reader work: a disk too full for it must not cost the record that comes next, whose own
                # write tells of the disk. The next segment's end, or the next attempt, tries again.
                with contextlib.suppress(OSError):
                    write_index(path)
