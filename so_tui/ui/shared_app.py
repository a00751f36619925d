"""The part of the application that owns what its screens share: presets, machine, runs, and what is being started.

Screens know this class. They do not know the application above it, which knows the screens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from textual import work
from textual.reactive import var
from textual.worker import Worker, WorkerState

from so_tui.ui import messages
from so_tui.ui.announcing import AnnouncingApp
from so_tui.ui.checking import Checking
from so_tui.ui.glyphs import GlyphName

if TYPE_CHECKING:
    from so_tui.machine.doctor import Finding
    from so_tui.machine.types import Machine
    from so_tui.runs import RunDirectory
    from so_tui.settings.file import Loaded
    from so_tui.spec import Catalog, RunSpec
    from so_tui.spec.generation import LoadModel
    from so_tui.ui.runlist import RunLister, RunRow

DASHBOARD_POLLS = 3
"""Times as long between two readings of the list while the dashboard is shown."""
StartRun = Callable[..., "RunDirectory"]


class SharedApp(AnnouncingApp[None]):
    """``catalog`` and ``machine`` are loaded once ``load`` is called, where they are not given."""

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
    opened: var[RunDirectory | None] = var(None)
    """The run that the dashboard was given to show."""

    def __init__(
        self,
        catalog: Catalog | None,
        machine: Machine | None,
        machine_file: str,
        runs_dir: Path | str | None,
        start: StartRun | None,
        settings: Loaded | None,
    ) -> None:
        self._given = (catalog, machine, machine_file)
        self.runs_dir = Path(runs_dir) if runs_dir else None
        self.start_run = start
        self._lister: RunLister | None = None
        self._listing: Worker[None] | None = None
        self._listing_due = asyncio.Event()
        self._polls = 0
        super().__init__(settings)
        self.set_reactive(SharedApp.machine_file, machine_file)
        self.set_reactive(SharedApp.glyphs, self.glyphs_at_start())

    # Presets and machine.

    @work(
        thread=True,
        exclusive=True,
        group="load",
        name="load presets and machine",
        exit_on_error=False,
    )
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
            messages.answer(
                self,
                messages.Diagnosed(
                    findings(self.machine, checkpoints=self.runs_dir or default_runs_dir())
                ),
            )

    def on_diagnosed(self, message: messages.Diagnosed) -> None:
        from so_tui.ui.findings import doctor_summary

        self.findings = message.findings
        self.doctor_line = doctor_summary(message.findings)

    def reload_presets(self) -> None:
        """Read the presets again after one was saved, added or deleted."""
        from so_tui.spec import load_catalog

        self.catalog = load_catalog()

    # Runs.

    def list_runs(self) -> None:
        """Request another reading of the list of runs. A reading under way, as on a slow file system, is completed first."""
        self._listing_due.set()
        if self._listing is None or self._listing.is_finished:
            self._listing = self._list_runs()

    def list_runs_in_time(self) -> None:
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

    def open_run(self, run: RunDirectory) -> None:
        """Show ``run`` on the dashboard."""
        self.opened = run
        self.switch_mode("dashboard")

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

    def may_start(self) -> bool:
        """Return whether a run may be started now; notify the user where another start is under way."""
        if self.starting:
            text = f"{self.starting} is still being started. Runs are started one at a time."
            self.notify(text, title="Not started", severity="warning", markup=False)
        return not self.starting

    def report_failure(self, event: Worker.StateChanged) -> None:
        """Tell the user of a worker that failed unexpectedly."""
        error = event.worker.error
        if event.state is WorkerState.ERROR and error is not None:
            self.notify(
                f"{event.worker.name}: {type(error).__name__}: {error}",
                title="Unexpected error",
                severity="error",
                markup=False,
            )
