"""What a supervisor tells others of its run: alerts, by a command of the user's, and figures for Prometheus.

Both follow the user's own settings, which may change while a run goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.folders import settings_file
from so_tui.launch.alert_command import MARKER, AlertCommand
from so_tui.launch.alert_text import alert_text, run_name_text
from so_tui.launch.alert_watch import AlertWatch
from so_tui.launch.log_line import log_line
from so_tui.runs.directory import RunDirectory
from so_tui.runs.records import Alert, MetricRecord, RunState, StepRecord
from so_tui.runs.sample import Sample
from so_tui.settings.file import Loaded, load_settings
from so_tui.settings.types import Settings

if TYPE_CHECKING:
    from so_tui.launch.prometheus import Endpoint

_DISKS_S = 60.0
_SETTINGS_S = 30.0


class OwnSettings:
    """The settings of the user who supervises, read again when their file has changed. Nothing of a run, spec or preset is a setting."""

    def __init__(self) -> None:
        self._file = settings_file()
        self._signature: tuple[int, ...] | None = None
        self._loaded = Loaded()
        self._due = 0.0

    def current(self) -> Settings:
        """Return the settings in force, at most half a minute old."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _SETTINGS_S
            signature = _signature(self._file)
            if signature != self._signature:
                self._signature, self._loaded = signature, load_settings(self._file)
                for problem in self._loaded.problems:
                    log_line(str(problem))
        return self._loaded.settings


class Announcer:
    """Notices what happens to one attempt, runs the user's command for it, and returns it for the state, where the screen sees it."""

    def __init__(
        self, run: RunDirectory, attempt: int, host: str, checkpoints: str, told_step: int = 0
    ) -> None:
        """Prepare to tell of an attempt on a host, with its folder of checkpoints; ``told_step`` as for ``AlertWatch``."""
        self._run = run
        self._host = host
        self._folders = tuple(dict.fromkeys((str(run.path), checkpoints or str(run.path))))
        self._settings = OwnSettings()
        self._watch = AlertWatch(attempt, time.monotonic(), told_step)
        self._command = AlertCommand()
        self._disks_due = 0.0
        self._endpoint: Endpoint | None = None
        self._opened = False

    @property
    def command_pid(self) -> int | None:
        """Of the user's command, if it is under way."""
        return self._command.pid

    def tick(
        self, state: RunState, records: Iterable[MetricRecord], *, full: bool
    ) -> tuple[Alert, ...]:
        """Return what is new; ``full`` says that the disk accepts nothing more."""
        settings, now = self._settings.current().alerts, time.monotonic()
        found = self._watch.observe(state, records, now, settings)
        if full or now >= self._disks_due:
            self._disks_due = now + _DISKS_S
            found += self._watch.disks(state, free_bytes(self._folders), settings, full=full)
        self.tell(found, state)
        self._command.tick()
        return found

    def publish(self, state: RunState, step: StepRecord | None, sample: Sample) -> None:
        """Hand figures to Prometheus, if the settings of the attempt's first second want that."""
        if not self._opened:
            self._opened = True
            if (wanted := self._settings.current().prometheus).enabled:
                from so_tui.launch.prometheus import (
                    open_endpoint,
                )  # a server's modules are not small, and few want one

                self._endpoint = open_endpoint(wanted)
        if self._endpoint is not None:
            from so_tui.launch.prometheus import Figures

            self._endpoint.publish(Figures(self._run.name, self._host, state, step, sample))

    def end(self, state: RunState) -> tuple[Alert, ...]:
        """Return the alert of a final state; ``tell`` follows, once the state is recorded, and ``finish`` waits for its command."""
        return self._watch.end(state, self._settings.current().alerts)

    def tell(self, alerts: Iterable[Alert], state: RunState) -> None:
        """Have the user's command run for each of these alerts."""
        settings = self._settings.current().alerts
        for alert in alerts:
            text = alert_text(alert, self._run.name, state)
            about = {
                MARKER: alert.kind,
                "SO_TUI_ALERT_TEXT": text,
                "SO_TUI_ALERT_RUN": run_name_text(self._run.name),
                "SO_TUI_ALERT_HOST": self._host,
                "SO_TUI_ALERT_STEP": str(alert.step),
                "SO_TUI_ALERT_STATE": state.state,
                "SO_TUI_ALERT_VALUE": "" if alert.value is None else f"{alert.value:g}",
            }
            self._command.request(settings.command, about, text, settings.command_timeout_s)

    def finish(self) -> None:
        """Stop answering, and wait for the commands of the last alerts: a job ends with its supervisor."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._command.finish()


def free_bytes(folders: Iterable[str]) -> dict[str, int]:
    """Return the space that this user can still fill, by folder; a folder that is not there yet counts as its nearest parent."""
    found = {}
    for folder in folders:
        path = Path(folder)
        for candidate in (path, *path.parents):
            try:
                disk = os.statvfs(candidate)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:  # away for a moment: asked again in a minute
                break
            found[folder] = disk.f_bavail * disk.f_frsize
            break
    return found


def _signature(path: Path) -> tuple[int, ...]:
    """Return what changes whenever the file or the right to read it does; empty if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
