"""The part of the application that announces alerts of the user's own runs: bell, desktop notification, and the terminal's title.

What the terminal gets is fixed words, numbers and names without control characters, whatever a run's folder says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from so_tui.settings.types import AlertSettings
from so_tui.trust.ownership import distrust_of_folder
from so_tui.ui.settings_app import SettingsApp
from so_tui.units import plural

if TYPE_CHECKING:
    from so_tui.runs.records import Alert
    from so_tui.ui.runlist import RunRow

Result = TypeVar("Result")
_KEPT = 20
"""Alerts of a run that are looked at, the newest: a stranger's state may hold any number."""
_SAVE_TITLE, _RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"
_SHOWS_777 = ("foot", "rxvt")


class News(NamedTuple):
    """An alert that was not there when the list was read before."""

    row: RunRow
    alert: Alert


class Announcements:
    """Remembers which alerts are known, so that each is announced once. Those of the first list are old."""

    def __init__(self) -> None:
        self._known: dict[Path, set[tuple[int, str, float]]] | None = None
        self._live: dict[Path, bool] = {}

    def update(self, rows: Iterable[RunRow]) -> list[News]:
        """Return what is new since the last list. Of a run that cannot be read now, nothing is known."""
        from so_tui.runs.records import Alert

        first = self._known is None
        known = self._known = self._known or {}
        found = []
        for row in rows:
            if not row.readable:
                continue
            path, state = row.run.path, row.state
            alerts = list(state.alerts[-_KEPT:])
            ended_unseen = state.state == "lost" and self._live.get(path, False)
            if ended_unseen and not any(
                alert.kind == "failed" and alert.attempt == state.attempt for alert in alerts
            ):
                alerts.append(
                    Alert(
                        kind="failed",
                        attempt=state.attempt,
                        time=state.ended or 0.0,
                        step=state.step,
                    )
                )  # no supervisor is left
            before = known.setdefault(path, set())
            new = [
                alert for alert in alerts if (alert.attempt, alert.kind, alert.time) not in before
            ]
            if new and not first and distrust_of_folder(path) is None:
                found += [News(row, alert) for alert in new]
            before.update((alert.attempt, alert.kind, alert.time) for alert in new)
            self._live[path] = row.live
        return found


def notification(text: str, how: str, environ: Mapping[str, str]) -> str:
    """Return the control sequence that has a terminal show a desktop notification; empty if it has none.

    Args:
        text: One line without control characters.
        how: ``AlertSettings.notify``.
        environ: The environment, which says what terminal it is.
    """
    term = environ.get("TERM", "")
    if how == "off" or term in ("linux", "dumb", ""):
        return ""
    if how == "auto":
        how = "osc777" if term.startswith(_SHOWS_777) or "VTE_VERSION" in environ else "osc9"
    sequence = f"\x1b]777;notify;so-tui;{text}\x1b\\" if how == "osc777" else f"\x1b]9;{text}\x1b\\"
    if "TMUX" in environ:  # passed on where tmux has allow-passthrough, and otherwise dropped
        sequence = "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return sequence


class AnnouncingApp(SettingsApp[Result]):
    """An application that announces what happens to the runs in its list."""

    _announcements: Announcements | None = None
    _title: str | None = None
    _alert_title = ""

    def watch_runs(self, runs: tuple[RunRow, ...]) -> None:
        """Announce what is new, and keep the terminal's title true."""
        if self._announcements is None:
            if not runs:
                return  # nothing was read yet
            self._announcements = Announcements()
        settings = self.settings.alerts
        for row, alert in self._announcements.update(runs):
            self._announce(row, alert, settings)
        if settings.title:
            self._show_title(self._alert_title or _live_title(runs))

    def _announce(self, row: RunRow, alert: Alert, settings: AlertSettings) -> None:
        from so_tui.launch.alert_text import alert_text, known

        kind, text = known(alert), alert_text(alert, row.run.name, row.state)
        if kind is None or kind not in settings.on:
            return
        self.notify(
            text.removeprefix("so-tui: "),
            severity="information" if kind == "ended" else "warning",
            timeout=15,
            markup=False,
        )
        self._alert_title = text
        self.write_to_terminal(
            ("\a" if settings.bell else "") + notification(text, settings.notify, os.environ)
        )

    def _show_title(self, title: str) -> None:
        if title != self._title:
            if self._title is None:
                self.write_to_terminal(_SAVE_TITLE)
            self._title = title
            self.write_to_terminal(f"\x1b]2;{title}\x1b\\")

    def restore_title(self) -> None:
        """Give the terminal back the title that it had. Called before the screen is left."""
        if self._title is not None:
            self._title = None
            self.write_to_terminal(_RESTORE_TITLE)

    def write_to_terminal(self, sequence: str) -> None:
        """Write a control sequence that draws nothing."""
        if sequence and self._driver is not None and not self.is_headless:
            self._driver.write(sequence)
            self._driver.flush()


def _live_title(runs: Iterable[RunRow]) -> str:
    from so_tui.launch.alert_text import run_name_text

    live = [row for row in runs if row.live]
    if len(live) == 1:
        return f"so-tui: {run_name_text(live[0].run.name)}"
    return f"so-tui: {plural(len(live), 'run')} live" if live else "so-tui"
