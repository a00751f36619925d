"""What the screens share with the application above them: settings, presets, machine, runs, alerts,
and what is being started.

Screens know SharedApp. They do not know the application above it (``app``), which knows the
screens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import work
from textual.reactive import var
from textual.theme import Theme
from textual.widgets import DataTable
from textual.worker import Worker

from so_tui import units
from so_tui.settings import AlertSettings, Settings
from so_tui.trust.files import distrust_of_folder
from so_tui.ui import messages
from so_tui.ui.text import (
    Content,
    GlyphName,
    PlainCharacters,
    chosen_glyphs,
    environment_at_start,
)
from so_tui.ui.textual_fixes import FixedApp
from so_tui.ui.themes import DARK, FALLBACKS, themes_for
from so_tui.ui.widgets import keys
from so_tui.units import plural

if TYPE_CHECKING:
    from so_tui.doctor import Finding
    from so_tui.launch.checks import Check
    from so_tui.machine.types import Machine
    from so_tui.runs import RunDirectory
    from so_tui.runs.records import Alert
    from so_tui.settings_file import Loaded
    from so_tui.spec import Catalog, Preset, RunSpec
    from so_tui.spec.generation import LoadModel
    from so_tui.ui.form import Draft
    from so_tui.ui.run_rows import RunRow


COMPACT = (
    [(0, "-narrow"), (1 << 20, "-medium"), (1 << 20, "-wide")],
    [(0, "-short"), (1 << 20, "-tall"), (1 << 20, "-very-tall")],
)


DASHBOARD_POLLS = 5
"""Times as long between two readings of the list while the dashboard is shown."""
_KEPT = 20
"""Alerts of a run that are looked at, the newest: a stranger's state may hold any number."""
_SAVE_TITLE, _RESTORE_TITLE = "\x1b[22;2t", "\x1b[23;2t"
_SHOWS_777 = ("foot", "rxvt")


class SettingsApp(FixedApp[None]):
    """An application whose user changes its settings in it: it applies them, keeps changes, and
    adds vim's keys.
    """

    BINDINGS = keys("every-application")

    settings: var[Settings] = var(Settings())

    def __init__(self, loaded: Loaded | None = None) -> None:
        self._writer = ThreadPoolExecutor(max_workers=1)  # changes are written in their order
        super().__init__()
        self._settings_problems = loaded.problems if loaded is not None else ()
        terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()  # what it is drawn on
        for theme in themes_for(self.console.color_system if terminal else None):
            self.register_theme(theme)
        settings = loaded.settings if loaded is not None else Settings()
        self.set_reactive(SettingsApp.settings, settings)
        screen = self.settings.screen
        units.show_memory_in(screen.units)
        self.theme = screen.theme if screen.theme in self.available_themes else DARK.name
        if screen.layout == "compact":
            # Textual reads them from the instance.
            self.HORIZONTAL_BREAKPOINTS, self.VERTICAL_BREAKPOINTS = COMPACT
        self.set_keymap(self.settings.keys.bindings)
        # By the environment, else the settings, else what locale and terminal can show.
        self.glyphs: GlyphName = chosen_glyphs(environment_at_start(), screen.glyphs)
        if self.glyphs == "ascii":
            self._filters.append(PlainCharacters())

    def on_unmount(self) -> None:
        """End helpers, for which the application's threads would wait at its end."""
        # Imported only where a screen has started one.
        if (helper := sys.modules.get("so_tui.launch.helper")) is not None:
            helper.end_all()

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return the program's own colour names for a theme that does not define them."""
        variables = self.current_theme.to_color_system().generate()
        return {
            name: variables.get(fallback, variables["foreground"])
            for name, fallback in FALLBACKS.items()
        }

    def report_settings(self) -> None:
        """Say what is wrong in the settings file, and keep the theme from now on, however it is
        changed.
        """
        texts, theme = [*map(str, self._settings_problems)], self.settings.screen.theme
        if theme not in self.available_themes:
            texts.append(
                f"There is no theme {theme}: {DARK.name} is used. Press , to choose another."
            )
        for text in texts:
            self.notify(text, title="Settings", severity="warning", timeout=20, markup=False)

        def keep_theme(theme: Theme) -> None:
            if theme.name != self.settings.screen.theme:
                self.keep({"screen.theme": theme.name})

        self.theme_changed_signal.subscribe(self, keep_theme)
        # Back from the shell: the terminal has forgotten what it showed.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))

    def keep(self, changes: Mapping[str, Any]) -> None:
        """Apply changes of settings, by dotted key, and write them to the user's file."""
        from so_tui.settings_file import change_settings

        self.apply(changes)
        self.write_later(partial(change_settings, dict(changes)))

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Apply changes of settings, by dotted key, until the application is left."""
        from msgspec.structs import replace

        settings = self.settings
        for key, value in changes.items():
            table, _, name = key.partition(".")
            settings = replace(
                settings, **{table: replace(getattr(settings, table), **{name: value})}
            )
        self.settings = settings

    def watch_settings(self, settings: Settings) -> None:
        units.show_memory_in(settings.screen.units)
        if settings.screen.theme in self.available_themes and self.theme != settings.screen.theme:
            self.theme = settings.screen.theme
        self.set_keymap(settings.keys.bindings)
        self.refresh(layout=True)

    def write_later(self, write: Callable[[], object]) -> None:
        """Write what the user changed in a thread, since a file system may be slow, and after
        earlier changes.
        """
        self._writer.submit(write).add_done_callback(self._written)

    def _written(self, writing: Future[object]) -> None:
        """Report a change that could not be written. Runs in the thread that writes."""
        from so_tui.spec.errors import InputError

        error = writing.exception()
        if isinstance(error, InputError):
            self.post_message(
                messages.failure("The settings hold only until so-tui is left", error)
            )
        elif error is not None:
            self.notify(
                f"{type(error).__name__}: {error}",
                title="Not remembered",
                severity="error",
                markup=False,
            )

    # Commands.

    def action_settings(self) -> None:
        from so_tui.ui.dialogs import SettingsDialog, show_dialog

        show_dialog(self, SettingsDialog(self.settings, self.available_themes), self.keep)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "vim":
            return self.settings.keys.style == "vim"
        return super().check_action(action, parameters)

    def action_vim(self, moves: str) -> None:
        """Move as another key does."""
        # In a table, home and end move along the row.
        whole = moves in ("home", "end") and isinstance(self.focused, DataTable)
        self.simulate_key(f"ctrl+{moves}" if whole else moves)


def _notification(text: str, how: str, environ: Mapping[str, str]) -> str:
    """Return the control sequence that has a terminal show a desktop notification; empty if it has
    none.

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


class _Announcer:
    """Announces alerts of the user's own runs, each once: by the bell, a desktop notification, and
    the terminal's title.

    What the terminal gets is fixed words, numbers and names without control characters, whatever a
    run's folder says.
    """

    def __init__(self, app: SharedApp) -> None:
        self._app = app
        self._known: dict[Path, set[tuple[int, str, float]]] | None = None
        self._live: dict[Path, bool] = {}
        self._title = ""
        self._alert_title = ""

    def update(self, runs: tuple[RunRow, ...], *, whole: bool) -> None:
        """Announce what is new, and keep the terminal's title true. Unless the list is ``whole``, a
        run that appears in it is not new.
        """
        if self._known is None and not runs:
            return  # Nothing was read yet: before the first paint, which waits for no import.
        from so_tui.launch.supervisor.alerts import run_name_text

        settings = self._app.settings.alerts
        for row, alert in self._news(runs, whole=whole):
            self._announce(row, alert, settings)
        if settings.title:
            live = [row.run.name for row in runs if row.live]
            title = f"so-tui: {plural(len(live), 'run')} live" if live else "so-tui"
            if len(live) == 1:
                title = f"so-tui: {run_name_text(live[0])}"
            self.show_title(self._alert_title or title)

    def _news(self, rows: Iterable[RunRow], *, whole: bool) -> list[tuple[RunRow, Alert]]:
        """Return alerts that are new since the last list; those of the first are old. Of a run that
        cannot be read now, nothing is known.
        """
        from so_tui.runs.records import Alert

        first = self._known is None
        known = self._known = self._known or {}
        found = []
        for row in rows:
            if not row.readable:
                continue
            path, state = row.run.path, row.state
            alerts = list(state.alerts[-_KEPT:])
            told = ("failed", state.attempt) in ((alert.kind, alert.attempt) for alert in alerts)
            if state.state == "lost" and self._live.get(path) and not told:
                # It ended unseen: no supervisor is left.
                ended, step = state.ended or 0.0, state.step
                alerts.append(Alert(kind="failed", attempt=state.attempt, time=ended, step=step))
            named = {(alert.attempt, alert.kind, alert.time): alert for alert in alerts}
            before = known.get(path, set())
            new = [alert for name, alert in named.items() if name not in before]
            listed = path in known or whole
            if new and listed and not first and distrust_of_folder(path) is None:
                found += [(row, alert) for alert in new]
            known[path] = before.union(named)
            self._live[path] = row.live
        return found

    def _announce(self, row: RunRow, alert: Alert, settings: AlertSettings) -> None:
        from so_tui.launch.supervisor.alerts import alert_text, known

        kind, text = known(alert), alert_text(alert, row.run.name, row.state)
        if kind is None or kind not in settings.on:
            return
        if kind != "ended" or not self._app.shows(row.run):
            self._app.notify(
                text.removeprefix("so-tui: "),
                severity="information" if kind == "ended" else "warning",
                timeout=15,
                markup=False,
            )
        self._alert_title = text
        self.write_to_terminal(
            ("\a" if settings.bell else "") + _notification(text, settings.notify, os.environ)
        )

    def show_title(self, title: str) -> None:
        """Give the terminal a title; an empty one gives it back what it had, before the screen is
        left.
        """
        if title != self._title:
            if not self._title:
                self.write_to_terminal(_SAVE_TITLE)
            self._title = title
            self.write_to_terminal(f"\x1b]2;{title}\x1b\\" if title else _RESTORE_TITLE)

    def write_to_terminal(self, sequence: str) -> None:
        """Write a control sequence that draws nothing."""
        driver = self._app._driver
        if sequence and driver is not None and not self._app.is_headless:
            driver.write(sequence)
            driver.flush()


@dataclass(frozen=True, slots=True)
class Checking:
    """A launch that has been confirmed, and has no run directory yet."""

    label: str
    since: float
    """Monotonic seconds."""
    asked_on: str
    """The screen on which it was confirmed."""
    begun: tuple[tuple[Check, float], ...] = ()
    """Its checks so far, each with its monotonic time."""

    def lines(self, width: int) -> Content:
        """Return what is launched and how long each of its checks has taken, in ``width`` cells."""
        from so_tui.launch.checks import CHECKS as NAMES  # not needed for the first paint
        from so_tui.ui.run_status import CHECKS, Stage, timeline_lines

        checks = [Stage(f"{CHECKS}: {NAMES[check]}", since) for check, since in self.begun]
        lines = timeline_lines(checks or [Stage(CHECKS, self.since)], time.monotonic(), width)
        return Content.assemble((self.label, "bold"), "\n\n", lines)


class SharedApp(SettingsApp):
    """``catalog`` and ``machine`` are loaded once ``load`` is called."""

    catalog: var[Catalog | None] = var(None)
    machine: var[Machine | None] = var(None)
    machine_file: var[str] = var("")
    """File that describes the machine that is planned for; empty for this machine."""
    inspecting: var[bool] = var(True)
    """Whether the machine is known or being inspected. Who only looks at a run does without: the
    driver's library alone takes 2 MiB.
    """
    runs: var[tuple[RunRow, ...]] = var(())
    unread_runs = 0
    """How many more there are, which are being read."""
    live: var[int] = var(0)
    """How many of them are live, which changes less often than the list."""
    findings: var[tuple[Finding, ...] | None] = var(None)
    starting: var[str] = var("")
    """What is being started, which takes seconds. Starts wait for each other, because the thread of
    a start cannot be cancelled.
    """
    checking: var[Checking | None] = var(None)
    """The launch whose checks the dashboard shows; None once its run exists."""
    opened: var[RunDirectory | None] = var(None)
    """The run that the dashboard was given to show."""

    def __init__(self, runs_dir: Path | None, settings: Loaded | None) -> None:
        self.runs_dir = runs_dir
        self._listing_due = asyncio.Event()
        self._polls = 0
        self.announcer = _Announcer(self)
        self.drafts: dict[str, Draft] = {}
        """The presets that were opened in Configure, which is what changes them."""
        super().__init__(settings)

    # Presets and machine.

    @work(
        thread=True,
        exclusive=True,
        group="load",
        name="load presets and machine",
        exit_on_error=False,
    )
    def load(self, machine: Machine | None, file: str) -> None:
        """Plan from now on for the machine that ``file`` describes, or for this machine, inspected
        again, where it is None. Load the presets first.
        """
        from so_tui.spec import load_catalog

        catalog = self.catalog or load_catalog()
        if machine is None:
            from so_tui.machine import inspect_machine

            machine = inspect_machine()
        messages.answer(self, self.take_loaded, catalog, machine, file)

    def take_loaded(self, catalog: Catalog, machine: Machine, file: str) -> None:
        """Plan with these presets for a machine; ``file`` describes it unless it is this host."""
        self.machine_file = file  # before the machine, whose watchers read it
        self.catalog, self.machine = catalog, machine
        self.diagnose()

    @work(thread=True, exclusive=True, group="doctor", name="doctor", exit_on_error=False)
    def diagnose(self) -> None:
        """Have doctor check the machine."""
        from so_tui.doctor import findings
        from so_tui.folders import default_runs_dir

        if self.machine is not None:
            found = findings(self.machine, checkpoints=self.runs_dir or default_runs_dir())
            messages.answer(self, setattr, self, "findings", found)

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The presets by name; none before they are loaded."""
        return self.catalog.presets if self.catalog is not None else {}

    def reload_presets(self) -> None:
        """Read the presets again after one was saved, added or deleted."""
        from so_tui.spec import load_catalog

        self.catalog = load_catalog()

    # Runs.

    def watch_runs(self, runs: tuple[RunRow, ...]) -> None:
        self.announcer.update(runs, whole=not self.unread_runs)
        self.live = sum(run.live for run in runs)

    def list_runs(self) -> None:
        """Request another reading of the list of runs. A reading under way, as on a slow file
        system, is completed first.
        """
        self._listing_due.set()
        if not messages.is_working(self, "runs"):
            self._list_runs()

    def list_runs_in_time(self) -> None:
        """Request readings less often where only the number of live runs is seen: one costs half as
        much as following a run.
        """
        self._polls += 1
        if self.current_mode != "dashboard" or self._polls % DASHBOARD_POLLS == 0:
            self.list_runs()

    @work(group="runs", name="list runs", exclusive=True, exit_on_error=False)
    async def _list_runs(self) -> None:
        """Read in a thread whenever requested. One worker serves all readings: starting one costs
        as much as a reading.
        """
        from so_tui.ui.run_rows import RunLister

        lister = RunLister(self.runs_dir)
        while True:
            await self._listing_due.wait()
            self._listing_due.clear()
            rows = await asyncio.to_thread(lister.rows)
            self.unread_runs, self.runs = lister.unread, rows
            if lister.unread:
                self._listing_due.set()

    def open_run(self, run: RunDirectory) -> None:
        """Show ``run`` on the dashboard."""
        self.opened = run
        self.switch_mode("dashboard")

    def shows(self, run: RunDirectory) -> bool:
        """Return whether ``run`` is on the dashboard, and that on the screen."""
        return self.current_mode == "dashboard" and self.opened == run

    def unsaved(self) -> dict[str, int]:
        """Return how many fields of each preset have unsaved edits."""
        return {
            preset: len(changes)
            for preset, draft in self.drafts.items()
            if (changes := draft.changes)
        }

    def ask(
        self,
        title: str,
        lines: Sequence[str],
        proceed: Callable[[], object],
        *,
        yes: str,
        no: str = "No",
        default_yes: bool = False,
        id: str | None = None,
    ) -> None:
        """Ask a question, and ``proceed`` if the answer is yes."""
        from so_tui.ui.dialogs import Question, show_dialog

        question = Question(title, lines, yes=yes, no=no, default_yes=default_yes, id=id)
        show_dialog(self, question, lambda answer: proceed() if answer else None)

    # What needs another screen: the application above knows them.

    def open_chat(self, load: LoadModel) -> None:
        """Open a conversation with a model."""
        raise NotImplementedError

    def edit_plan(self, preset: str, wanted: RunSpec, field: str, *, keep_edits: bool) -> None:
        """Give a preset and a recommended spec to Configure, if that is the page shown now.

        The keyboard goes to ``field``, if a path is given. With ``keep_edits``, unsaved edits stay.
        """
        raise NotImplementedError

    # What is under way.

    def begin_check(self, check: Check, since: float) -> None:
        """Show that the launch has come to a check, at this monotonic time."""
        if (now := self.checking) is not None:
            self.checking = replace(now, begun=(*now.begun, (check, since)))

    def may_start(self) -> bool:
        """Return whether a run may be started now; notify the user where another start is under
        way.
        """
        if self.starting:
            self.notify(
                f"{self.starting} is still being started. Runs are started one at a time.",
                title="Not started",
                severity="warning",
                markup=False,
            )
        return not self.starting

    def report_failure(self, event: Worker.StateChanged) -> None:
        """Tell the user of a worker that failed unexpectedly."""
        if text := messages.unexpected_error(event):
            text = f"{event.worker.name}: {text}"
            self.notify(text, title="Unexpected error", severity="error", markup=False)
