"""Writes the records of a run, without ever holding up training for the disk that they are on."""

from __future__ import annotations

import sys
import threading
import time
from queue import Queue

from so_tui.runs import MetricsWriter
from so_tui.runs.records import EndRecord, MetricRecord, WarningRecord
from so_tui_trainer.trackers import Sidecars, Tracker


class Recorder:
    """Writes records on rank 0, for the run and its trackers; does nothing on other ranks.

    A thread writes them in order. A disk that other files keep busy, or a file system over a network, can hold up a single line for
    seconds, and the step that wrote it would wait as long.
    """

    def __init__(
        self, writer: MetricsWriter | None, attempt: int, trackers: tuple[Tracker, ...] = ()
    ) -> None:
        """Write with ``writer`` (None on other ranks than 0) and to ``trackers``."""
        self._writer = writer
        self._sidecars = Sidecars(trackers)
        self.attempt = attempt
        self._lost, self._lost_because = 0, ""
        """Of the thread that writes; of others only while nothing is pending."""
        self._pending: Queue[MetricRecord] = Queue()
        self._error: Exception | None = None
        """What ended the thread; a defect, since a full disk does not."""
        if writer is not None:
            threading.Thread(
                target=self._write_pending, args=(writer,), name="records", daemon=True
            ).start()

    @property
    def hanging(self) -> bool:
        """Whether a tracker did not end."""
        return self._sidecars.hanging

    def write(self, record: MetricRecord) -> None:
        """Write a record, soon. Records that a full disk does not take are lost, and counted in a later warning.

        An end record is written at once, after all others.

        Raises:
            OSError: An end record cannot be written.
        """
        if self._writer is None:
            return
        if self._error is not None:
            raise self._error
        self._sidecars.offer(record)
        if isinstance(record, EndRecord):
            self.flush()
            self._append(self._writer, record)
        else:
            self._pending.put(record)
        self._record_tracker_errors()

    def flush(self) -> None:
        """Wait until every record so far has been written, or is lost."""
        self._pending.join()
        if self._error is not None:
            raise self._error

    def end_tracking(self) -> None:
        """Let the trackers send what they have; what they cannot send becomes a warning."""
        self._sidecars.close()
        self._record_tracker_errors()

    def close(self) -> None:
        """Close the file, after the last record."""
        if self._writer is not None:
            self.flush()
            self._writer.close()

    def _write_pending(self, writer: MetricsWriter) -> None:
        while True:
            record = self._pending.get()
            try:
                self._append(writer, record)
            except OSError as error:
                if not self._lost:
                    print(
                        f"records of the run cannot be written: {error}",
                        file=sys.stderr,
                        flush=True,
                    )
                self._lost, self._lost_because = self._lost + 1, error.strerror or str(error)
            except Exception as error:  # noqa: BLE001 -- raised again where records are written
                self._error = error
            finally:
                self._pending.task_done()

    def _append(self, writer: MetricsWriter, record: MetricRecord) -> None:
        """Write a record, after a warning about lost ones as soon as there is space again.

        Raises:
            OSError: There is still no space.
        """
        if self._lost:
            message = f"{self._lost} records could not be written ({self._lost_because}); training continued"
            writer.append(
                self._warning(
                    "records-lost",
                    message,
                    "Free some space on the disk of the run directory; no training is lost",
                )
            )
            self._lost = 0
        writer.append(record)

    def _record_tracker_errors(self) -> None:
        for trouble in self._sidecars.troubles():
            message = f"{trouble}; nothing more is sent there"
            self.write(
                self._warning(
                    "tracker-failed",
                    message,
                    "The run's own records are complete; nothing else is lost",
                )
            )

    def _warning(self, code: str, message: str, suggestion: str) -> WarningRecord:
        return WarningRecord(
            attempt=self.attempt,
            time=time.time(),
            code=code,
            message=message,
            suggestion=suggestion,
        )
