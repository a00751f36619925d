"""Dashboard: one run, live or past, on one axis: loss, throughput, the step's anatomy, the NUMA nodes, the GPUs, the log.

The screen follows the run and hands snapshots to its panels.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import PurePath
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.widgets import Static
from textual.worker import Worker

from so_tui.runs import RunDirectory
from so_tui.ui.chart_layout import Wanted
from so_tui.ui.follow import RunFollower
from so_tui.ui.inspected import Position
from so_tui.ui.overlay import Overlaid, Overlays
from so_tui.ui.panels.charts import ChartPanel
from so_tui.ui.panels.log import LogPanel
from so_tui.ui.panels.numa import NumaPanel
from so_tui.ui.screens import run_actions
from so_tui.ui.screens.charted_page import ChartedPage
from so_tui.ui.screens.panelled_page import PanelledPage
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content
from so_tui.ui.view import View

POLL_S = 1.0
EMPTY = (
    "No run yet. This is where a run is watched: its loss and speed, where the time of a step goes, every NUMA node, GPU and core.\n\n"
    "Press [$accent]1[/] and then [$accent]l[/] to launch a preset, or [$accent]4[/] to choose a run."
)


class DashboardScreen(PanelledPage):
    PAGE = "dashboard"
    CSS_PATH: ClassVar[list[str | PurePath]] = [
        "dashboard.tcss",
        *(f"../panels/{panel}.tcss" for panel in ("header", "charts", "step", "numa", "log")),
    ]
    AUTO_FOCUS = "ChartPanel Chart"
    ALLOW_IN_MAXIMIZED_VIEW = "TopLine, RunHeader, #search, KeyLine"
    HELP_TEXT = (
        "Everything shares one axis: steps, or time (x). Raw values are dim, the mean of the last steps is bright, evaluations have a "
        "colour of their own; ◆ is a checkpoint, ↻ a resume; ✗ under a gap is a loss that is not a number. A node's dim band reaches "
        "from its idlest to its busiest core; h shows the heat of its cores, and its memory. Cells are cores: A runs Adam, m the "
        "training process. Leaving this screen does not touch the run."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "s",
            "stop",
            "Stop",
            id="stop",
            tooltip="Save and stop the run (asks; No is the default)",
        ),
        Binding(
            "c",
            "checkpoint",
            "Save now",
            id="checkpoint",
            tooltip="Save a checkpoint after this step, and continue",
        ),
        Binding(
            "r",
            "resume",
            "Resume",
            id="resume",
            tooltip="Continue from the last checkpoint of a run that has ended",
        ),
        *ChartedPage.KEYS,
        Binding("m", "maximise(False)", "Back", id="restore", tooltip="All panels again"),
        Binding(
            "m",
            "maximise(True)",
            "Maximise",
            id="maximise",
            tooltip="The panel with the focus, whole; again or esc: back",
        ),
        *LogPanel.KEYS,
        *ChartPanel.KEYS,
        *NumaPanel.KEYS,
        Binding(
            "equals_sign",
            "differences",
            "Settings",
            key_display="=",
            show=False,
            id="differences",
            tooltip="What differs from the preset's defaults",
        ),
        Binding(
            "p",
            "answers",
            "Prompts",
            show=False,
            id="answers",
            tooltip="What the model answered to the prompts of the preset",
        ),
        Binding(
            "y", "copy", "Copy path", show=False, id="copy", tooltip="Copy the path of the run"
        ),
    ]

    def __init__(self) -> None:
        self._follower: RunFollower | None = None
        self._worker: Worker[None] | None = None
        self._due = asyncio.Event()
        self._overlay_reader = Overlays()
        super().__init__()

    def on_mount(self) -> None:
        self.watch(self.app, "checking", self._checks_changed)
        self.set_interval(POLL_S, self.tick)
        self.watch(self.app, "opened", self._open)
        if self.run_shown is None:
            self.watch(self.app, "runs", self._take_newest)

    def _show_panels(self, shown: bool) -> None:
        self.query_one("#empty").display = not shown
        self.panels.display = shown

    def _checks_changed(self) -> None:
        """Show the checks of a launch in place of a run until it has a run of its own, or comes to nothing."""
        self.header.display = self.app.checking is None
        self._show_panels(self.run_shown is not None and self.app.checking is None)
        self._show_checks()
        self.refresh_bindings()

    def _show_checks(self) -> None:
        checking, empty = self.app.checking, self.query_one("#empty", Static)
        empty.update(
            Content.from_markup(EMPTY)
            if checking is None
            else checking.lines(empty.content_size.width or self.size.width)
        )

    def _open(self, run: RunDirectory | None) -> None:
        if run is not None:
            self.follow(run)

    def _take_newest(self) -> None:
        if self.run_shown is None and self.app.runs and self.app.checking is None:
            self.follow(self.app.runs[0].run)

    # Following.

    def follow(self, run: RunDirectory) -> None:
        """Show another run."""
        if run == self.run_shown:
            return
        self.run_shown = run
        self._follower = RunFollower(run)
        self._worker = None
        self.snapshot = None
        self.axis = None
        self.view = View(unit=self.view.unit)
        self.log_panel.clear()
        if self.charts.page.number:
            self.call_later(self.charts.turn_to_first)
        self._show_panels(True)
        self.tick()

    def on_screen_resume(self) -> None:
        self.tick()

    def tick(self) -> None:
        """Have the run polled, unless this screen is hidden."""
        if self.app.checking is not None:
            self._show_checks()
            return
        if self._follower is None or not self.is_current:
            return
        self._due.set()
        if self._worker is None or self._worker.is_finished:
            self._worker = self._poll(self._follower)

    @work(group="follow", name="follow the run", exclusive=True, exit_on_error=False)
    async def _poll(self, follower: RunFollower) -> None:
        """Poll in a thread whenever it is due, until another run is followed; never before the last poll came back.

        One worker serves all polls: starting one, and the messages about its states, cost as much as a poll.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            zoomed = self.view.window is not None and self.axis is not None
            window = self.axis.in_steps() if zoomed and self.axis is not None else None
            charted, cursor = self.charts.wanted, self._cursor_position()
            snapshot, overlays = await asyncio.to_thread(
                self._read, follower, window, charted, self.numa.wanted, cursor, self.chosen
            )
            if follower is self._follower:
                self.overlays = overlays
                self._take(snapshot)
                if (
                    snapshot.unread_share or any(overlaid.more for overlaid in overlays)
                ) and self.is_current:
                    self._due.set()  # earlier steps are read without a pause

    def _read(
        self,
        follower: RunFollower,
        window: tuple[float, float] | None,
        charted: Wanted,
        of_nodes: tuple[str, ...],
        cursor: Position | None,
        chosen: tuple[RunDirectory, ...],
    ) -> tuple[Snapshot, tuple[Overlaid, ...]]:
        """Poll the run and those laid over its charts, in a thread."""
        snapshot = follower.poll(
            window, replace(charted, samples=(*charted.samples, *of_nodes)), cursor
        )
        others = [run for run in chosen if run.path != follower.run.path]
        return snapshot, self._overlay_reader.read(others, charted, snapshot.whole.begin[1])

    def _take(self, snapshot: Snapshot) -> None:
        before, self.snapshot = self.snapshot, snapshot
        self._show(snapshot)
        if before is None or (before.live, before.deleted) != (snapshot.live, snapshot.deleted):
            self.refresh_bindings()

    # The run.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if self.run_shown is None or self.app.checking is not None:
            return action in (
                "leave_field",
                "copy_text",
            )  # nothing is shown that a key could act on
        if action in ("stop", "checkpoint", "resume"):
            snapshot = self.snapshot
            if snapshot is None or snapshot.state is None or snapshot.deleted:
                return False
            if action == "resume":
                return snapshot.state.state in run_actions.RESUMABLE
            return snapshot.live and not (snapshot.checking and action == "checkpoint")
        if action == "maximise":
            return parameters == (self.maximized is None,)
        return True

    def action_stop(self) -> None:
        if self.run_shown is not None:
            run_actions.ask_to_stop(self.app, self.run_shown)

    def action_checkpoint(self) -> None:
        if self.run_shown is not None:
            run_actions.save_checkpoint(self.app, self.run_shown)

    def action_resume(self) -> None:
        if self.run_shown is not None:
            run_actions.ask_to_resume(self.app, self.run_shown)

    def action_differences(self) -> None:
        if self.run_shown is not None:
            run_actions.show_settings(self.app, self.run_shown)

    def action_answers(self) -> None:
        from so_tui.ui.dialogs.answers import AnswersScreen

        if self.run_shown is not None:
            self.app.push_screen(AnswersScreen(self.run_shown))

    def action_copy(self) -> None:
        if self.run_shown is not None:
            run_actions.copy_path(self.app, self.run_shown)
