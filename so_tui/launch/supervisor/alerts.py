"""What a supervisor tells others of its run: alerts, by a command of the user's, and figures for
Prometheus.

Both follow the user's own settings, which may change while a run goes on.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from so_tui.launch.command import ALERT_MARKER, AlertCommand, log_line
from so_tui.launch.supervisor.prometheus import Textfile
from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import (
    Alert,
    Alerts,
    MetricRecord,
    PhaseRecord,
    RunState,
    Sample,
    StepRecord,
)
from so_tui.settings import ALERTS, AlertName, AlertSettings, Settings
from so_tui.settings_file import Loaded, load_settings
from so_tui.trust.text import bounded, brief_line
from so_tui.units import disk_size, duration, thousands

# Sentences of alerts: fixed words, numbers, and names in which nothing acts on a terminal. Reasons
# and messages of runs are not quoted.


LONGEST_NAME = 60


def known(alert: Alert) -> AlertName | None:
    """Return the kind of an alert; None for one that this version does not know, or that a
    stranger's state made up.
    """
    return alert.kind if alert.kind in ALERTS else None


def alert_text(alert: Alert, run_name: str, state: RunState) -> str:
    """Return what happened to a run, in one sentence; empty for an unknown kind. It begins with a
    word, never with a dash.
    """
    left = int(bounded(alert.value))
    words = _WORDS.get(alert.kind, "")
    return words and "so-tui: " + words.format(
        name=run_name_text(run_name),
        step=thousands(max(0, alert.step)),
        ended="was stopped" if state.state == "stopped" else "has finished",
        failed="is lost" if state.state == "lost" else "has failed",
        waited=duration(bounded(alert.value)),
        loss=alert.value or 0.0,
        bound=alert.bound or 0.0,
        left=disk_size(left) if left else "no",
    )


_WORDS = {
    "ended": "{name} {ended} at step {step}",
    "failed": "{name} {failed} at step {step}",
    "not-finite": "the loss or a gradient of {name} is not finite at step {step}",
    "stall": "{name} has taken no step for {waited}, since step {step}",
    "loss": "the loss of {name} is {loss:.4g} at step {step}, above {bound:.4g}",
    "disk": "{left} disk space is left for {name}",
}
"""By the kinds of alerts."""


def run_name_text(name: str) -> str:
    """Return a run's name for places that act on control characters: a title, a notification, an
    environment.
    """
    return brief_line(name, LONGEST_NAME).replace(
        ";", ","
    )  # a semicolon separates the fields of OSC 777


# What of a run is worth an alert, from its records and its disks. No file is read here.


KEPT = 20
"""Alerts that the state remembers, the newest ones."""
_SLOW_STEPS = 10
"""A stall is at least as many of the last step's lengths: a step may take longer than the bound."""
_ENOUGH = 1.1
"""Free space counts as enough again above so much of the bound, so that an alert is not repeated at
each file.
"""


@dataclass
class _AlertWatch:
    """Notices each event once; one that can pass, such as a stall, again after it has passed."""

    _attempt: int
    _last_step_at: float
    """By any clock, in seconds, that never goes back, as ``now`` in each call; at first the time
    now.
    """
    _told_step: int = 0
    """The last step of which an earlier supervisor of the attempt has told."""
    _step_s: float = 0.0
    _trains: bool = False
    _raised: set[AlertName] = field(default_factory=set)

    def observe(
        self, state: RunState, records: Iterable[MetricRecord], now: float, settings: AlertSettings
    ) -> Alerts:
        """Return the alerts of new records and of the time since the last step."""
        found: list[Alert] = []
        for record in records:
            if record.attempt != self._attempt:
                continue
            if isinstance(record, PhaseRecord):
                self._trains = record.phase == "training"
            elif isinstance(record, StepRecord):
                # The record of its phase may have met a full disk.
                self._trains = True
                self._last_step_at, self._step_s = now, record.step_s
                found += [
                    alert
                    for alert in self._of_step(record, settings)
                    if alert.step > self._told_step
                ]
        if not self._trains:
            self._last_step_at = now
        waited_s = now - self._last_step_at
        stalled = waited_s > max(settings.stall_s, _SLOW_STEPS * self._step_s)
        return (*found, *self._noticed("stall", state.step, settings, stalled, value=waited_s))

    def disks(
        self, state: RunState, free_bytes: Mapping[str, int], settings: AlertSettings, *, full: bool
    ) -> Alerts:
        """Return the alert of a disk with too little space. ``full`` says that writing has
        failed.
        """
        bound = settings.disk_free_gb * 1e9
        least = 0.0 if full else float(min(free_bytes.values(), default=math.inf))
        return self._noticed(
            "disk",
            state.step,
            settings,
            full or least < bound,
            passed=least > _ENOUGH * bound,
            value=least,
            bound=bound,
        )

    def end(self, state: RunState, settings: AlertSettings) -> Alerts:
        """Return the alert of the end that a final state records."""
        kind: AlertName = "ended" if state.state in ("finished", "stopped") else "failed"
        return self._noticed(kind, state.step, settings, True)

    def _of_step(self, record: StepRecord, settings: AlertSettings) -> Alerts:
        step, loss, norm, bound = (
            record.step,
            record.loss,
            record.gradient_norm,
            settings.loss_above,
        )
        finite = math.isfinite(loss)
        healthy = finite and (norm is None or math.isfinite(norm))
        above = bound is not None and finite and loss > bound
        return (
            *self._noticed("not-finite", step, settings, not healthy),
            *self._noticed("loss", step, settings, above, value=loss, bound=bound),
        )

    def _noticed(
        self,
        kind: AlertName,
        step: int,
        settings: AlertSettings,
        holds: bool,
        *,
        passed: bool = True,
        value: float | None = None,
        bound: float | None = None,
    ) -> Alerts:
        """Return the alert of a condition if it holds and did not before, and its kind is wanted.
        Where it does not hold, ``passed`` says whether it may be told of again.
        """
        new = holds and kind not in self._raised
        if holds:
            self._raised.add(kind)
        elif passed:
            self._raised.discard(kind)
        alert = Alert(
            kind=kind, attempt=self._attempt, time=time.time(), step=step, value=value, bound=bound
        )
        return (alert,) if new and kind in settings.on else ()


def remembered(before: Alerts, new: Alerts) -> Alerts:
    """Return the alerts that the state keeps."""
    return (*before, *new)[-KEPT:]


_DISKS_S = 60.0
_SETTINGS_S = 30.0


class Announcer:
    """Notices what happens to one attempt, runs the user's command for it, and returns it for the
    state, where the screen sees it.
    """

    def __init__(
        self, run: RunDirectory, attempt: int, host: str, checkpoints: str, told_step: int = 0
    ) -> None:
        """Prepare to tell of an attempt on a host, with its folder of checkpoints; ``told_step`` as
        for ``_AlertWatch``.
        """
        self._run = run
        self._host = host
        self._folders = tuple(dict.fromkeys((str(run.path), checkpoints or str(run.path))))
        self._loaded = Loaded()
        self._settings_due = 0.0
        self._watch = _AlertWatch(attempt, time.monotonic(), told_step)
        self.command = AlertCommand()
        self._disks_due = 0.0
        self._textfile = Textfile(run.name, host)

    def tick(self, state: RunState, records: Iterable[MetricRecord], *, full: bool) -> Alerts:
        """Return what is new; ``full`` says that the disk accepts nothing more."""
        settings, now = self._settings().alerts, time.monotonic()
        found = self._watch.observe(state, records, now, settings)
        if full or now >= self._disks_due:
            self._disks_due = now + _DISKS_S
            found += self._watch.disks(state, _free_bytes(self._folders), settings, full=full)
        self.tell(found, state)
        self.command.tick()
        return found

    def publish(self, state: RunState, step: StepRecord | None, sample: Sample) -> None:
        """Write figures for Prometheus, if the settings name a folder."""
        self._textfile.publish(self._settings().prometheus.folder, state, step, sample)

    def end(self, state: RunState) -> Alerts:
        """Return the alert of a final state; ``tell`` follows, once the state is recorded, and
        ``finish`` waits for its command.
        """
        return self._watch.end(state, self._settings().alerts)

    def tell(self, alerts: Iterable[Alert], state: RunState) -> None:
        """Have the user's command run for each of these alerts."""
        settings = self._settings().alerts
        for alert in alerts:
            text = alert_text(alert, self._run.name, state)
            self.command.request(
                settings.command,
                {
                    ALERT_MARKER: alert.kind,
                    "SO_TUI_ALERT_TEXT": text,
                    "SO_TUI_ALERT_RUN": run_name_text(self._run.name),
                    "SO_TUI_ALERT_HOST": self._host,
                    "SO_TUI_ALERT_STEP": str(alert.step),
                    "SO_TUI_ALERT_STATE": state.state,
                    "SO_TUI_ALERT_VALUE": "" if alert.value is None else f"{alert.value:g}",
                },
                text,
                settings.command_timeout_s,
            )

    def finish(self) -> None:
        """Remove the figures, and wait for the commands of the last alerts: a job ends with its
        supervisor.
        """
        self._textfile.remove()
        self.command.finish()

    def _settings(self) -> Settings:
        """Return the settings of the user who supervises, at most half a minute old. Nothing of a
        run, spec or preset is a setting.
        """
        if time.monotonic() >= self._settings_due:
            self._settings_due = time.monotonic() + _SETTINGS_S
            known, self._loaded = self._loaded.problems, load_settings()
            for problem in self._loaded.problems:
                if problem not in known:
                    log_line(str(problem))
        return self._loaded.settings


def _free_bytes(folders: Iterable[str]) -> dict[str, int]:
    """Return the space that this user can still fill, by folder; a folder that is not there yet
    counts as its nearest parent.
    """
    found = {}
    for folder in folders:
        for candidate in (Path(folder), *Path(folder).parents):
            try:
                found[folder] = shutil.disk_usage(candidate).free
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                pass  # away for a moment: asked again in a minute
            break
    return found
