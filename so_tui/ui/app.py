"""The application: five screens, and the state they share (presets, machine, runs).

Nothing is computed before the first paint. Named workers compute presets, machine, plans and runs in threads.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.reactive import var
from textual.screen import ModalScreen, Screen, ScreenResultType
from textual.widgets import Input
from textual.worker import Worker, WorkerState

from so_tui.ui import messages
from so_tui.ui.announcing import AnnouncingApp
from so_tui.ui.glyphs import GlyphName, PlainCharacters
from so_tui.ui.kept_memory import settle
from so_tui.ui.launching import Checking, go_back, start_launch
from so_tui.ui.screens import MODES, PAGES
from so_tui.ui.terminal import terminal_lost

if TYPE_CHECKING:
    from so_tui.launch import Launch
    from so_tui.machine.doctor import Finding
    from so_tui.machine.types import Machine
    from so_tui.runs import RunDirectory
    from so_tui.settings.file import Loaded
    from so_tui.spec import Catalog, SoTuiError
    from so_tui.ui.dialogs.basic import Question
    from so_tui.ui.runlist import RunLister, RunRow

RUNS_POLL_S = 2.0
DASHBOARD_POLLS = 3
"""Times as long between two readings of the list while the dashboard is shown."""
TERMINAL_POLL_S = 5.0
SETTLED_S = 3.0
"""After the first paint: the first screen is complete."""
StartRun = Callable[..., "RunDirectory"]
PACKAGES = ("so_tui.spec", "so_tui.runs", "so_tui.machine", "so_tui.machine.doctor", "so_tui.plan.facts", "so_tui.plan.messages")
"""Packages that import their own modules. They are imported before any worker starts: of two threads that import such a package and one of
its modules at the same time, each may wait for the other, and Python then lets one of them fail with an ImportError."""


def import_packages() -> None:
    """Import what the threads of the workers use."""
    for package in PACKAGES:
        importlib.import_module(package)


class SoTuiApp(AnnouncingApp[None]):
    """``catalog`` and ``machine`` are loaded after the first paint where they are not given."""

    TITLE = "so-tui"
    CSS_PATH = "app.tcss"
    MODES = MODES
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-medium"), (160, "-wide")]  # noqa: RUF012 - Textual's own attribute
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall"), (45, "-very-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"show('{name}')", title, show=False, id=f"show-{name}", tooltip=f"Go to {title}")
            for number, (name, title) in enumerate(PAGES, 1)
        ),
        Binding("question_mark,f1", "help", "Help", key_display="?", show=False, id="help", tooltip="Every key of this screen"),
        Binding("q", "quit", "Quit", id="quit", tooltip="Leave the screen; runs continue training"),
    ]

    catalog: var[Catalog | None] = var(None)
    machine: var[Machine | None] = var(None)
    machine_file: var[str] = var("")
    """File that describes the machine that is planned for; empty for this machine."""
    inspecting: var[bool] = var(True)
    """Whether the machine is known or being inspected. Who only looks at a run does without: the driver's library alone takes 2 MiB."""
    runs: var[tuple[RunRow, ...]] = var(())
    doctor_line: var[str] = var("")
    findings: var[tuple[Finding, ...] | None] = var(None)
    glyphs: var[GlyphName] = var[GlyphName]("braille")
    starting: var[str] = var("")
    """What is being started, which takes seconds. Starts wait for each other, because the thread of a start cannot be cancelled."""
    checking: var[Checking | None] = var(None)
    """The launch whose checks the dashboard shows; None once its run exists."""

    def __init__(
        self,
        catalog: Catalog | None = None,
        machine: Machine | None = None,
        runs_dir: Path | str | None = None,
        open_run: RunDirectory | None = None,
        *,
        launch: Launch | None = None,
        machine_file: str = "",
        start: StartRun | None = None,
        settings: Loaded | None = None,
    ) -> None:
        """Create the application.

        Args:
            launch: What a command wants started: its checks are shown at once, and a refusal ends the application.
            machine_file: File that describes ``machine``, where that is another one.
            settings: The user's settings; the defaults if absent.
            start: Replaces ``so_tui.launch.start`` in tests whose subject is not the launch.
        """
        self._given = (catalog, machine, machine_file)
        self.runs_dir = Path(runs_dir) if runs_dir else None
        self.opened = open_run
        self.start_run = start
        self._launch = launch
        self.launched: RunDirectory | None = None
        """The first run that was started here."""
        self.refused: SoTuiError | None = None
        """Why what the command wanted was not started."""
        self._lister: RunLister | None = None
        self.quit_question: Question | None = None
        self._listing: Worker[None] | None = None
        self._listing_due = asyncio.Event()
        self._polls = 0
        at_run = open_run is not None or launch is not None
        if at_run:
            import_packages()  # the dashboard's workers start with the first paint
        # Set on the instance before Textual reads it, so that a given run is shown without another screen first.
        setattr(self, "DEFAULT_MODE", "dashboard" if at_run else "presets")  # noqa: B010 - a class variable to type checkers
        super().__init__(settings)
        self.set_reactive(SoTuiApp.machine_file, machine_file)
        self.set_reactive(SoTuiApp.inspecting, not at_run or machine is not None)
        if launch is not None:
            self.set_reactive(SoTuiApp.checking, Checking(launch.spec.label, time.monotonic(), "dashboard"))
        self.set_reactive(SoTuiApp.glyphs, self.glyphs_at_start())
        if self.glyphs == "ascii":
            self._filters.append(PlainCharacters())

    def on_mount(self) -> None:
        self.call_after_refresh(self._after_first_paint)
        self.set_interval(TERMINAL_POLL_S, self._leave_a_lost_terminal)

    def _leave_a_lost_terminal(self) -> None:
        """End if the terminal is gone and no SIGHUP said so (``nohup``, some shells): reading it would spin for ever."""
        if not self.is_headless and terminal_lost(sys.__stdin__):
            self.exit()

    def _after_first_paint(self) -> None:
        import_packages()
        if self._launch is not None:
            start_launch(self, self._launch)
        self.report_settings()
        if self.inspecting:
            self.load()
        else:
            self.mode_change_signal.subscribe(self, self._load_for)
            self._load_for(self.current_mode)  # another screen may have been chosen before the first paint
        self.list_runs()
        self.set_interval(RUNS_POLL_S, self._list_runs_in_time)
        if not self.is_headless:  # or an application would stay in the memory of the tests
            self.set_timer(SETTLED_S, settle)

    # What is shared: presets, machine, runs.

    def _load_for(self, mode: str) -> None:
        """Load presets and machine for the first screen that is not the dashboard of the run that was opened."""
        if mode != "dashboard":
            self.mode_change_signal.unsubscribe(self)
            self.inspecting = True
            self.load()

    @work(thread=True, exclusive=True, group="load", name="load presets and machine", exit_on_error=False)
    def load(self) -> None:
        """Load the presets and inspect the machine."""
        from so_tui.spec import load_catalog

        catalog, machine, file = self._given
        catalog = catalog or load_catalog()
        if machine is None:
            from so_tui.machine import inspect_machine

            machine = inspect_machine()
        messages.answer(self, messages.Loaded(catalog, machine, file))

    def inspect_again(self) -> None:
        """Inspect this machine again, and plan for it even where another was given."""
        self.plan_for(None, "")

    def plan_for(self, machine: Machine | None, file: str) -> None:
        """Plan from now on for the machine that ``file`` describes, or for this machine where it is None."""
        self._given = (self.catalog, machine, file)
        self.load()

    def on_loaded(self, message: messages.Loaded) -> None:
        self.machine_file = message.machine_file  # before the machine, whose watchers read it
        self.catalog, self.machine = message.catalog, message.machine
        self.diagnose()

    @work(thread=True, exclusive=True, group="doctor", name="doctor", exit_on_error=False)
    def diagnose(self) -> None:
        """Have doctor check the machine."""
        from so_tui.folders import default_runs_dir
        from so_tui.machine.doctor import findings

        if self.machine is not None:
            messages.answer(self, messages.Diagnosed(findings(self.machine, checkpoints=self.runs_dir or default_runs_dir())))

    def on_diagnosed(self, message: messages.Diagnosed) -> None:
        from so_tui.ui.findings import doctor_summary

        self.findings = message.findings
        self.doctor_line = doctor_summary(message.findings)

    def reload_presets(self, *, then_edit: str = "") -> None:
        """Read the presets again after one was saved, and continue editing it where the form is open."""
        from so_tui.spec import load_catalog
        from so_tui.ui.screens.configure import ConfigureScreen

        self.catalog = load_catalog()
        screen = self.screen_stack[0]
        if then_edit and isinstance(screen, ConfigureScreen):
            screen.continue_with(then_edit)

    def list_runs(self) -> None:
        """Request another reading of the list of runs. A reading under way, as on a slow file system, is completed first."""
        self._listing_due.set()
        if self._listing is None or self._listing.is_finished:
            self._listing = self._list_runs()

    def _list_runs_in_time(self) -> None:
        """Request readings less often where only the number of live runs is seen: one costs half as much as following a run."""
        self._polls += 1
        if self.current_mode != "dashboard" or self._polls % DASHBOARD_POLLS == 0:
            self.list_runs()

    @work(group="runs", name="list runs", exclusive=True, exit_on_error=False)
    async def _list_runs(self) -> None:
        """Read in a thread whenever requested. One worker serves all readings: starting one costs as much as a reading."""
        while True:
            await self._listing_due.wait()
            self._listing_due.clear()
            self.runs = await asyncio.to_thread(self._read_runs)

    def _read_runs(self) -> tuple[RunRow, ...]:
        from so_tui.ui.runlist import RunLister

        self._lister = self._lister or RunLister(self.runs_dir)
        return self._lister.rows()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        self.worker_changed(event)

    def worker_changed(self, event: Worker.StateChanged) -> None:
        """End the state of starting when its worker ends, and report workers that failed unexpectedly."""
        if event.worker.group == "launch" and event.worker.is_finished:
            self.starting = ""
            go_back(self)
        error = event.worker.error
        if event.state is WorkerState.ERROR and error is not None:
            self.notify(f"{event.worker.name}: {type(error).__name__}: {error}", title="Unexpected error", severity="error", markup=False)

    # Starting runs (launching.py) and opening them.

    def may_start(self) -> bool:
        """Return whether a run may be started now; notify the user where another start is under way."""
        if self.starting:
            text = f"{self.starting} is still being started. Runs are started one at a time."
            self.notify(text, title="Not started", severity="warning", markup=False)
        return not self.starting

    def on_check_begun(self, message: messages.CheckBegun) -> None:
        if self.checking is not None:
            self.checking = self.checking.come_to(message.check, message.since)

    def on_launched(self, message: messages.Launched) -> None:
        self.launched = self.launched or message.run
        self.list_runs()
        watched = self.checking is not None and self.current_mode == "dashboard"
        self.checking = None
        if not watched and (isinstance(self.screen, ModalScreen) or isinstance(self.focused, Input)):
            self.notify(f"{message.run.name} was started. Close this with esc; 4 lists the run and enter opens it.", markup=False)
        else:
            self.open_run(message.run)

    def on_not_launched(self, message: messages.NotLaunched) -> None:
        go_back(self)
        if self._launch is not None and self.launched is None:
            self.refused = message.error
            self.exit()
        else:
            self.on_failed(message)

    def on_failed(self, message: messages.Failed) -> None:
        from so_tui.ui.dialogs.basic import Notice

        def answered(taken: bool | None) -> None:
            if taken and message.offer is not None:
                message.offer.action()

        self.push_screen(Notice(message.title, message.lines, offer=message.offer.text if message.offer else ""), answered)

    def open_run(self, run: RunDirectory) -> None:
        """Show ``run`` on the dashboard."""
        from so_tui.ui.screens.dashboard import DashboardScreen

        self.opened = run
        self.switch_mode("dashboard")
        screen = self.screen_stack[0]
        if isinstance(screen, DashboardScreen):
            screen.follow(run)

    # Commands.

    def action_other_machine(self) -> None:
        from so_tui.ui.screens.other_machine import ask_for_machine

        ask_for_machine(self)

    def action_show(self, name: str) -> None:
        from so_tui.ui.page import Page

        page = self.screen_stack[0]
        self.switch_mode(name)
        if isinstance(page, Page):
            page.left()

    async def action_quit(self) -> None:
        """Quit. Ask first where unsaved edits in Configure would be lost."""
        from so_tui.ui.leaving import ask_to_leave

        ask_to_leave(self)

    def action_help(self) -> None:
        from so_tui.ui.dialogs.basic import KeysHelp
        from so_tui.ui.page import Page
        from so_tui.ui.screens.help import key_groups

        page = self.screen
        if isinstance(page, Page):
            title = dict(PAGES)[page.PAGE]
            self.push_screen(KeysHelp(f"{title}: what it is for, and its keys", page.HELP_TEXT, key_groups(page)))

    def get_system_commands(self, screen: Screen[ScreenResultType]) -> Iterable[SystemCommand]:
        """Yield every command of the screen and the application with its key, then Textual's own."""
        from so_tui.ui.screens.help import commands

        yield from commands(self, screen)
        yield SystemCommand("Theme", "Choose another theme", self.action_change_theme)
        yield SystemCommand("Screenshot", "Save a picture (SVG) of this screen", lambda: self.set_timer(0.1, self.deliver_screenshot))
