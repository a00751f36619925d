"""Writes the records of a run, without ever holding up training for the disk that they are on."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any, Literal

import msgspec

from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs.directory import write_run_file
from so_tui.runs.records import (
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    PhaseRecord,
    ResumedRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.spec import RunSpec, spec_tree
from so_tui.trust.files import read_bounded

# Write TensorBoard's event files without TensorBoard: length-prefixed, checksummed protocol
# buffers.
#
# Event {1: wall time, 2: step, 3: file version, 5: summary, 7: session log}, Summary {1: Value {1:
# tag, 2: float}}, SessionLog {1: status}.


_CASTAGNOLI = 0x82F63B78
_SESSION_START = b"\x08\x01"


class _EventFile:
    """One file of scalars; a later attempt adds another file to the folder. Every method raises
    OSError if the disk is full.
    """

    def __init__(self, folder: Path, *, purge_after: int | None = None) -> None:
        """Create a file.

        Args:
            folder: Where to create it.
            purge_after: The step that a resumed run continues from; TensorBoard then ignores later
                steps in earlier files.
        """
        folder.mkdir(exist_ok=True)
        now_s = time.time_ns() // 1_000_000_000
        name = f"events.out.tfevents.{now_s:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(time.time(), 0, _bytes(3, b"brain.Event:2"))
        if purge_after is not None:
            self._write(time.time(), purge_after + 1, _bytes(7, _SESSION_START))

    def scalars(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Write the values of a step.

        Args:
            values: Values by tag.
            step: The step.
            when: Unix time in seconds.
        """
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in values.items()
        )
        self._write(when, step, _bytes(5, summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, when: float, step: int, content: bytes) -> None:
        event = (
            b"\x09" + struct.pack("<d", when) + (b"\x10" + _varint(step) if step else b"") + content
        )
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_checksum(length) + event + _masked_checksum(event))


def _crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of ``data``."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked_checksum(data: bytes) -> bytes:
    """Return the checksum rotated and shifted, so that checksums of data that contain checksums
    stay meaningful.
    """
    value = _crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_CASTAGNOLI if value & 1 else 0)
    return value


_TABLE = tuple(map(_table_entry, range(256)))


# Weights & Biases and TensorBoard besides the run's own records. Each runs in a thread, and none
# of them can harm the run.
#
# A tracker that fails gets no more records; one that hangs only fills its queue. Either becomes
# one warning of the run.


QUEUE_RECORDS = 10_000
"""Records that may wait for a tracker."""
CLOSE_S = 20.0
"""Seconds that the end of a run waits for its trackers."""
_NOT_FIGURES = frozenset({"v", "attempt", "time", "step", "kind"})
"""Fields of records that are not logged."""

_Tracker = Callable[[Iterator[MetricRecord]], None]
"""Sends records to a service until there are no more. Runs in one thread; may raise anything and
take any time.
"""


def trackers_of(run: RunDirectory, spec: RunSpec) -> dict[str, _Tracker]:
    """Return the trackers that the spec asks for, by the name of their service."""
    found: dict[str, _Tracker] = {}
    if spec.tracking.wandb:
        found["Weights & Biases"] = partial(_log_to_wandb, run, spec)
    if spec.tracking.tensorboard:
        found["TensorBoard"] = partial(_log_to_tensorboard, run.path / "tensorboard")
    return found


class _Sidecar:
    """A tracker in its thread. Nothing but ``close`` ever waits.

    Attributes:
        trouble: What went wrong, with the tracker's name; emptied once it is reported. The
            tracker gets no more records then.
    """

    def __init__(self, name: str, tracker: _Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._queue: Queue[MetricRecord | None] = Queue(QUEUE_RECORDS)
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name} tracker", daemon=True)
        self._thread.start()

    def offer(self, record: MetricRecord) -> None:
        """Queue a record. It is dropped if the tracker has failed or does not keep up."""
        if self.trouble is not None:
            return
        try:
            self._queue.put_nowait(record)
        except Full:
            self.trouble = f"{self._name} has not answered for {QUEUE_RECORDS} records"

    def close(self, timeout_s: float) -> bool:
        """Let the tracker finish, for so many seconds, and return whether it did."""
        try:
            self._queue.put_nowait(None)
        except Full:
            return False
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self.trouble is None:
            self.trouble = f"{self._name} did not finish within {timeout_s:.0f} s"
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._tracker(iter(self._queue.get, None))
        # An error of other people's code or servers must not end the run.
        except Exception as error:  # noqa: BLE001
            message = (str(error).strip().splitlines() or ["no message"])[0]
            self.trouble = f"{self._name} {type(error).__name__}: {message}"


def _log_to_tensorboard(folder: Path, records: Iterator[MetricRecord]) -> None:
    """Write event files into the run's folder: ``tensorboard --logdir RUN/tensorboard``."""
    file = None  # made by the first record, which shows whether the run was resumed
    for record in records:
        if isinstance(record, ResumedRecord):
            file = _EventFile(folder, purge_after=record.step)
        elif isinstance(record, StepRecord | EvaluationRecord):
            file = file or _EventFile(folder)
            file.scalars(_figures(record), record.step, record.time)
    if file is not None:
        file.close()


def _log_to_wandb(run: RunDirectory, spec: RunSpec, records: Iterator[MetricRecord]) -> None:
    """Log all attempts to the same run on W&B. ``WANDB_*`` variables apply (account, offline
    mode).
    """
    import wandb

    path = run.path / "wandb.id"
    if not path.exists():
        write_run_file(run, path, uuid.uuid4().hex[:12].encode())
    session: Any = wandb.init(
        project=spec.tracking.project,
        id=read_bounded(path, 100).decode().strip(),
        name=run.name,
        resume="allow",
        dir=str(run.path),
        config=spec_tree(spec, full=False),
        settings=wandb.Settings(console="off"),
    )
    # Not W&B's own counter, which cannot decrease: a resumed run repeats steps.
    session.define_metric("step")
    session.define_metric("*", step_metric="step")
    for record in records:
        if isinstance(record, StepRecord | EvaluationRecord):
            session.log({"step": record.step, **_figures(record)})
    session.finish()


def _figures(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return the numbers of a record by tag (``train/loss``, ``evaluation/perplexity``), without
    those that are None.
    """
    group = "train" if isinstance(record, StepRecord) else "evaluation"
    values: Mapping[str, Any] = msgspec.structs.asdict(record)
    return {
        f"{group}/{name}": float(value)
        for name, value in values.items()
        if name not in _NOT_FIGURES and isinstance(value, int | float)
    }


class Recorder:
    """Writes records on rank 0, for the run and its trackers; does nothing on other ranks.

    A thread writes them in order. A disk that other files keep busy, or a file system over a
    network, can hold up a single line for seconds, and the step that wrote it would wait as long.
    """

    def __init__(self, writer: MetricsWriter | None, attempt: int) -> None:
        """Write with ``writer``, which is None on all ranks but 0."""
        self._writer = writer
        self._sidecars: list[_Sidecar] = []
        self.hanging = False
        """A tracker did not end: leaving the process the usual way might wait for it for ever."""
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

    def track(self, trackers: Mapping[str, _Tracker]) -> None:
        """Write later records to trackers, too. Their libraries are imported and log in then."""
        self._sidecars = [_Sidecar(name, tracker) for name, tracker in trackers.items()]

    def write(self, record: MetricRecord) -> None:
        """Write a record, soon. Records that a full disk does not take are lost, and counted in a
        later warning.

        An end record is written at once, after all others.

        Raises:
            OSError: An end record cannot be written.
        """
        if self._writer is None:
            return
        if self._error is not None:
            raise self._error
        for sidecar in self._sidecars:
            sidecar.offer(record)
        if isinstance(record, EndRecord):
            self.flush()
            self._append(self._writer, record)
        else:
            self._pending.put(record)
        self._record_tracker_errors()

    def phase(
        self, phase: Literal["loading", "training", "saving"], detail: str, **more: Any
    ) -> None:
        """Record what the run does now; ``more`` are other fields of ``PhaseRecord``."""
        self.write(
            PhaseRecord(attempt=self.attempt, time=time.time(), phase=phase, detail=detail, **more)
        )

    def warn(self, code: str, message: str, suggestion: str = "") -> None:
        """Record a warning."""
        self.write(self._warning(code, message, suggestion))

    def flush(self) -> None:
        """Wait until every record so far has been written, or is lost."""
        self._pending.join()
        if self._error is not None:
            raise self._error

    def end_tracking(self) -> None:
        """Let the trackers send what they have; what they cannot send becomes a warning."""
        deadline = time.monotonic() + CLOSE_S
        ended = [sidecar.close(max(0.1, deadline - time.monotonic())) for sidecar in self._sidecars]
        self.hanging = not all(ended)
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
            writer.append(
                self._warning(
                    "records-lost",
                    f"{self._lost} records could not be written ({self._lost_because}); training "
                    "continued",
                    "Free some space on the disk of the run directory; no training is lost",
                )
            )
            self._lost = 0
        writer.append(record)

    def _record_tracker_errors(self) -> None:
        for sidecar in self._sidecars:
            if trouble := sidecar.trouble:
                sidecar.trouble = ""
                self.warn(
                    "tracker-failed",
                    f"{trouble}; nothing more is sent there",
                    "The run's own records are complete; nothing else is lost",
                )

    def _warning(self, code: str, message: str, suggestion: str) -> WarningRecord:
        return WarningRecord(
            attempt=self.attempt,
            time=time.time(),
            code=code,
            message=message,
            suggestion=suggestion,
        )
