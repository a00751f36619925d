"""What of a run is worth an alert, from its records and its disks. No file is read here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

from so_tui.runs.records import Alert, MetricRecord, RunState, StepRecord
from so_tui.settings.types import AlertName, AlertSettings

KEPT = 20
"""Alerts that the state remembers, the newest ones."""
_SLOW_STEPS = 10
"""A stall is at least as many of the last step's lengths: a step may take longer than the bound."""
_ENOUGH = 1.1
"""Free space counts as enough again above so much of the bound, so that an alert is not repeated at each file."""


class AlertWatch:
    """Notices each event once; one that can pass, such as a stall, again after it has passed."""

    def __init__(self, attempt: int, now: float, told_step: int = 0) -> None:
        """Prepare to watch an attempt.

        Args:
            attempt: The attempt.
            now: Any clock's time in seconds that never goes back, as in each call.
            told_step: The last step of which an earlier supervisor of the attempt has told.
        """
        self._attempt = attempt
        self._told_step = told_step
        self._last_step_at = now
        self._step_s = 0.0
        self._raised: set[AlertName] = set()

    def observe(
        self, state: RunState, records: Iterable[MetricRecord], now: float, settings: AlertSettings
    ) -> tuple[Alert, ...]:
        """Return the alerts of new records and of the time since the last step."""
        found: list[Alert] = []
        for record in records:
            if isinstance(record, StepRecord) and record.attempt == self._attempt:
                self._last_step_at, self._step_s = now, record.step_s
                self._raised.discard("stall")
                found += [
                    alert
                    for alert in self._of_step(record, settings)
                    if alert.step > self._told_step
                ]
        if state.state != "training":
            self._last_step_at = now
        waited_s = now - self._last_step_at
        if waited_s > max(settings.stall_s, _SLOW_STEPS * self._step_s) and self._first("stall"):
            found.append(self._alert("stall", state.step, value=waited_s))
        return tuple(alert for alert in found if alert.kind in settings.on)

    def disks(
        self, state: RunState, free_bytes: Mapping[str, int], settings: AlertSettings, *, full: bool
    ) -> tuple[Alert, ...]:
        """Return the alert of a disk with too little space. ``full`` says that writing has failed."""
        bound = settings.disk_free_gb * 1e9
        least = min(free_bytes.values(), default=None)
        if full or (least is not None and least < bound):
            if self._first("disk") and "disk" in settings.on:
                return (
                    self._alert(
                        "disk",
                        state.step,
                        value=0.0 if full or least is None else float(least),
                        bound=bound,
                    ),
                )
        elif least is None or least > _ENOUGH * bound:
            self._raised.discard("disk")
        return ()

    def end(self, state: RunState, settings: AlertSettings) -> tuple[Alert, ...]:
        """Return the alert of the end that a final state records."""
        kind: AlertName = "ended" if state.state in ("finished", "stopped") else "failed"
        return (self._alert(kind, state.step),) if kind in settings.on else ()

    def _of_step(self, record: StepRecord, settings: AlertSettings) -> Iterable[Alert]:
        norm = record.gradient_norm
        if not math.isfinite(record.loss) or (norm is not None and not math.isfinite(norm)):
            if self._first("not-finite"):
                yield self._alert("not-finite", record.step)
        else:
            self._raised.discard("not-finite")
        bound = settings.loss_above
        if bound is None or not record.loss > bound:
            self._raised.discard("loss")
        elif math.isfinite(record.loss) and self._first("loss"):
            yield self._alert("loss", record.step, value=record.loss, bound=bound)

    def _first(self, kind: AlertName) -> bool:
        new = kind not in self._raised
        self._raised.add(kind)
        return new

    def _alert(
        self, kind: AlertName, step: int, value: float | None = None, bound: float | None = None
    ) -> Alert:
        return Alert(
            kind=kind, attempt=self._attempt, time=time.time(), step=step, value=value, bound=bound
        )


def remembered(before: tuple[Alert, ...], new: tuple[Alert, ...]) -> tuple[Alert, ...]:
    """Return the alerts that the state keeps."""
    return (*before, *new)[-KEPT:]
