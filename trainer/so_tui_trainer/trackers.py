"""Weights & Biases and TensorBoard besides the run's own records. Each runs in a thread, and none of them can harm the run.

A tracker that fails gets no more records; one that hangs only fills its queue. Either becomes one warning of the run.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from so_tui.runs import RunDirectory
from so_tui.runs.records import EvaluationRecord, MetricRecord, ResumedRecord, StepRecord
from so_tui.spec import RunSpec, spec_tree
from so_tui_trainer.tensorboard import EventFile

QUEUE_RECORDS = 10_000
"""Records that may wait for a tracker."""
CLOSE_S = 20.0
"""Seconds that the end of a run waits for its trackers."""
_NOT_FIGURES = frozenset({"v", "attempt", "time", "step", "kind"})
"""Fields of records that are not logged."""


class Tracker(Protocol):
    """A service that takes records. Used from one thread; may raise anything and take any time."""

    name: str

    def start(self) -> None:
        """Connect to the service."""

    def write(self, record: MetricRecord) -> None:
        """Send a record."""

    def close(self) -> None:
        """Send what is left."""


def trackers_of(run: RunDirectory, spec: RunSpec) -> tuple[Tracker, ...]:
    """Return the trackers that the spec asks for."""
    found: list[Tracker] = []
    if spec.tracking.wandb:
        found.append(WeightsAndBiases(run, spec))
    if spec.tracking.tensorboard:
        found.append(TensorBoard(run.path / "tensorboard"))
    return tuple(found)


class Sidecar:
    """A tracker in its thread. ``offer`` and ``trouble`` never wait."""

    def __init__(self, tracker: Tracker) -> None:
        self.name = tracker.name
        self._tracker = tracker
        self._queue: queue.Queue[MetricRecord | None] = queue.Queue(QUEUE_RECORDS)
        self._trouble: str | None = None
        self._given_up = False
        self._thread = threading.Thread(
            target=self._run, name=f"{tracker.name} tracker", daemon=True
        )
        self._thread.start()

    def offer(self, record: MetricRecord) -> None:
        """Queue a record. It is dropped if the tracker has failed or does not keep up."""
        if self._given_up:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._given_up, self._trouble = True, f"has not answered for {QUEUE_RECORDS} records"

    def trouble(self) -> str | None:
        """Return what went wrong, once."""
        found, self._trouble = self._trouble, None
        return found

    def close(self, timeout_s: float) -> bool:
        """Let the tracker finish.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether it finished.
        """
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self._given_up:
            self._given_up, self._trouble = True, f"did not finish within {timeout_s:.0f} s"
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._tracker.start()
            while (record := self._queue.get()) is not None:
                self._tracker.write(record)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 -- an error of other people's code or servers must not end the run
            self._given_up, self._trouble = (
                True,
                f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}",
            )


class Sidecars:
    """All trackers of a run."""

    def __init__(self, trackers: tuple[Tracker, ...] = ()) -> None:
        self._sidecars = tuple(map(Sidecar, trackers))
        self.hanging = False
        """One did not end: leaving the process the usual way might wait for it for ever."""

    def offer(self, record: MetricRecord) -> None:
        """Queue a record for every tracker."""
        for sidecar in self._sidecars:
            sidecar.offer(record)

    def troubles(self) -> list[str]:
        """Return what went wrong since the last call, with the trackers' names."""
        return [
            f"{sidecar.name} {trouble}"
            for sidecar in self._sidecars
            if (trouble := sidecar.trouble())
        ]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait at most ``timeout_s`` seconds for all trackers together. Safe to call twice."""
        deadline = time.monotonic() + timeout_s
        ended = [sidecar.close(max(0.1, deadline - time.monotonic())) for sidecar in self._sidecars]
        self.hanging = not all(ended)


class TensorBoard:
    """Writes event files into the run's folder: ``tensorboard --logdir RUN/tensorboard``."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: EventFile | None = None

    def start(self) -> None:
        """Do nothing: the first record, which creates the file, shows whether the run was resumed."""

    def write(self, record: MetricRecord) -> None:
        if isinstance(record, ResumedRecord):
            self._file = EventFile(self._folder, purge_after=record.step)
        elif isinstance(record, StepRecord | EvaluationRecord):
            self._file = self._file or EventFile(self._folder)
            self._file.scalars(figures(record), record.step, record.time)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class WeightsAndBiases:
    """Logs all attempts to the same run on W&B. ``WANDB_*`` variables apply (account, offline mode)."""

    name = "Weights & Biases"

    def __init__(self, run: RunDirectory, spec: RunSpec) -> None:
        self._run, self._spec = run, spec
        self._session: Any = None

    def start(self) -> None:
        import wandb

        self._session = wandb.init(
            project=self._spec.tracking.project,
            id=self._id(),
            name=self._run.name,
            resume="allow",
            dir=str(self._run.path),
            config=spec_tree(self._spec, full=False),
            settings=wandb.Settings(console="off"),
        )
        # Not W&B's own counter, which cannot decrease: a resumed run repeats steps.
        self._session.define_metric("step")
        self._session.define_metric("*", step_metric="step")

    def write(self, record: MetricRecord) -> None:
        if isinstance(record, StepRecord | EvaluationRecord):
            self._session.log({"step": record.step, **figures(record)})

    def close(self) -> None:
        self._session.finish()

    def _id(self) -> str:
        """Return the run's id on W&B, which is stored in the run's folder: run names are unique there, but not on W&B."""
        path = self._run.path / "wandb.id"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:12])
        return path.read_text().strip()


def figures(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """Return the numbers of a record by tag (``train/loss``, ``evaluation/perplexity``), without those that are None."""
    group = "train" if isinstance(record, StepRecord) else "evaluation"
    values: Mapping[str, Any] = msgspec.structs.asdict(record)
    return {
        f"{group}/{name}": float(value)
        for name, value in values.items()
        if name not in _NOT_FIGURES and isinstance(value, int | float)
    }
