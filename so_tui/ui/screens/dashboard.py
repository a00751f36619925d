"""Dashboard: one run, live or past, on one axis: loss, throughput, the step's anatomy, the NUMA nodes, the GPUs, the log.

The screen follows the run and owns what its panels share: the view, the axis, and the rows of the terminal. A panel owns its widgets and
draws the snapshots that it is handed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import ClassVar

from textual import getters, on, work
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.reactive import var
from textual.widget import Widget
from textual.widgets import Input, Static
from textual.worker import Worker

from so_tui.runs import RunDirectory
from so_tui.ui.follow import RunFollower, Snapshot
from so_tui.ui.page import Page
from so_tui.ui.panels.charts import ChartPanel
from so_tui.ui.panels.header import RunHeader
from so_tui.ui.panels.log import LogPanel
from so_tui.ui.panels.numa import NumaPanel
from so_tui.ui.panels.step import StepPanel
from so_tui.ui.screens import run_actions
from so_tui.ui.series import Axis
from so_tui.ui.text import Content
from so_tui.ui.view import View, axis_of, extent_of, rows_for
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.find_field import FindField

POLL_S = 1.0
EMPTY = (
    "No run yet. This is where a run is watched: its loss and speed, where the time of a step goes, every NUMA node, GPU and core.\n\n"
    "Press [$accent]1[/] and then [$accent]l[/] to launch a preset, or [$accent]4[/] to choose a run."
)
OTHER_ROWS = 3
"""Rows of the screen that no panel gets: its top line, the tabs and the line of keys."""


class DashboardScreen(Page):
    PAGE = "dashboard"
    CSS_PATH: ClassVar[list[str | PurePath]] = [
        "dashboard.tcss",
        *(f"../panels/{panel}.tcss" for panel in ("header", "charts", "step", "numa", "log")),
    ]
    AUTO_FOCUS = "#loss"
    ALLOW_IN_MAXIMIZED_VIEW = "TopLine, RunHeader, #search, KeyLine"
    HELP_TEXT = (
        "Everything shares one axis: steps, or time (x). Raw values are dim, the mean of the last steps is bright, evaluations have a "
        "colour of their own; ◆ is a checkpoint, ↻ a resume; ✗ under a gap is a loss that is not a number. A node's dim band reaches from "
        "its idlest to its busiest core. Cells are cores: A runs Adam, m the training process. Leaving this screen does not touch the run."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stop", "Stop", id="stop", tooltip="Save and stop the run (asks; No is the default)"),
        Binding("c", "checkpoint", "Save now", id="checkpoint", tooltip="Save a checkpoint after this step, and continue"),
        Binding("r", "resume", "Resume", id="resume", tooltip="Continue from the last checkpoint of a run that has ended"),
        Binding("x", "axis", "Axis", id="axis", tooltip="Steps or time on the axis of all charts"),
        Binding("z,plus", "zoom(0.5)", "Zoom", key_display="z", id="zoom", tooltip="Zoom in (also + and the wheel)"),
        Binding("Z,minus", "zoom(2)", "Zoom out", key_display="Z", show=False, id="zoom-out", tooltip="Also -"),
        Binding("0", "whole", "Whole run", show=False, id="whole"),
        Binding("i", "inspect", "Inspect", id="inspect", tooltip="A cursor on all charts; arrows move it, shift by ten"),
        Binding("left", "point(-1)", "Cursor left", show=False),
        Binding("right", "point(1)", "Cursor right", show=False),
        Binding("shift+left", "point(-10)", "Cursor far left", show=False),
        Binding("shift+right", "point(10)", "Cursor far right", show=False),
        *ChartPanel.KEYS,
        Binding("m", "maximise(False)", "Back", id="restore", tooltip="All panels again"),
        Binding("m", "maximise(True)", "Maximise", id="maximise", tooltip="The panel with the focus, whole; again or esc: back"),
        *LogPanel.KEYS,
        Binding(
            "equals_sign",
            "differences",
            "Settings",
            key_display="=",
            show=False,
            id="differences",
            tooltip="What differs from the preset's defaults",
        ),
        Binding("y", "copy", "Copy path", show=False, id="copy", tooltip="Copy the path of the run"),
    ]

    view: var[View] = var(View())
    panels = getters.query_one("#panels", VerticalScroll)
    header = getters.query_one(RunHeader)
    charts = getters.query_one(ChartPanel)
    step = getters.query_one(StepPanel)
    numa = getters.query_one(NumaPanel)
    log_panel = getters.query_one(LogPanel)
    search = getters.query_one("#search", FindField)

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        """What is shown."""
        self._run: RunDirectory | None = None
        self._follower: RunFollower | None = None
        self._worker: Worker[None] | None = None
        self._due = asyncio.Event()
        self._axis: Axis | None = None
        super().__init__()

    def body(self) -> Iterable[Widget]:
        glyphs = self.app.glyphs
        yield Static(Content.from_markup(EMPTY), id="empty")
        yield RunHeader()
        with VerticalScroll(id="panels", can_focus=False):
            yield ChartPanel(glyphs=glyphs)
            yield StepPanel()
            yield NumaPanel(glyphs=glyphs)
            yield LogPanel()
        yield FindField("search the log: enter and n go back through the matches, esc ends", id="search")

    def on_mount(self) -> None:
        self._show_panels(False)
        self.set_interval(POLL_S, self._tick)
        if self.app.opened is not None:
            self.follow(self.app.opened)
        else:
            self.watch(self.app, "runs", self._take_newest)

    def _show_panels(self, shown: bool) -> None:
        self.query_one("#empty").display = not shown
        self.panels.display = shown

    def _take_newest(self) -> None:
        if self._run is None and self.app.runs:
            self.follow(self.app.runs[0].run)

    # Following.

    def follow(self, run: RunDirectory) -> None:
        """Show another run."""
        known = self._run is not None and run.path == self._run.path
        if known or not self.query("#panels"):  # a new screen takes the opened run when it is mounted
            return
        self._run = run
        self._follower = RunFollower(run)
        self._worker = None
        self.snapshot = None
        self._axis = None
        self.view = View(unit=self.view.unit)
        self.log_panel.clear()
        self._show_panels(True)
        self._tick()

    def on_screen_resume(self) -> None:
        self._tick()

    def _tick(self) -> None:
        """Have the run polled, unless this screen is hidden."""
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
            zoomed = self.view.window is not None and self._axis is not None
            window = self._axis.in_steps() if zoomed and self._axis is not None else None
            snapshot = await asyncio.to_thread(follower.poll, window)
            if follower is self._follower:
                self._take(snapshot)
                if snapshot.unread_share and self.is_current:
                    self._due.set()  # earlier steps are read without a pause

    def _take(self, snapshot: Snapshot) -> None:
        before, self.snapshot = self.snapshot, snapshot
        self._show(snapshot)
        if before is None or (before.live, before.deleted) != (snapshot.live, snapshot.deleted):
            self.refresh_bindings()

    # Drawing.

    def _show(self, snapshot: Snapshot) -> None:
        whole_width = self.size.width - 2
        width = self.panels.scrollable_content_region.width or whole_width
        self._axis = axis_of(snapshot, self.view, self._axis)
        self.header.show(snapshot, time.time(), whole_width)
        self.step.show(snapshot, width)
        self.log_panel.show(snapshot)
        self.charts.show(snapshot, self.view, self._axis)
        self.numa.show(snapshot, self._axis, width)
        self._share_rows(snapshot)

    def _share_rows(self, snapshot: Snapshot) -> None:
        """Divide the height of the terminal between the panels."""
        height = self.size.height - OTHER_ROWS
        crowded = height < 12 + 3 * len(snapshot.nodes)
        fixed = self.header.rows + self.step.rows + (1 if crowded else 2)
        rows = rows_for(height, len(snapshot.nodes), self.numa.gpu_rows, fixed)
        self.charts.set_rows(rows.charts)
        self.numa.set_rows(rows.plot, heading=not crowded)
        self.log_panel.set_rows(max(1, rows.log - int(self.search.display)))  # the search bar takes its row from the log alone

    def on_resize(self) -> None:
        self._show_again()

    def watch_maximized(self) -> None:
        self.refresh_bindings()
        self._show_again()

    def _show_again(self) -> None:
        if self.snapshot is not None:
            self._show(replace(self.snapshot, log_lines=()))

    def watch_view(self) -> None:
        self._axis = None
        if (snapshot := self.snapshot) is not None:
            self._axis = axis_of(snapshot, self.view)
            self.charts.show(snapshot, self.view, self._axis)
            self.numa.show_nodes(snapshot, self._axis)
            if self.view.window is not None:
                self._tick()  # the range that was zoomed to is read in more detail

    # The view.

    def _extent(self) -> tuple[float, float] | None:
        return extent_of(self.snapshot, self.view.unit) if self.snapshot is not None else None

    def _standing(self, view: View) -> View:
        """Return the view with its cursor at a position whose values are known."""
        if self.snapshot is None or view.cursor is None:
            return view
        return replace(view, cursor=self.snapshot.standing(view.cursor, view.unit))

    def action_axis(self) -> None:
        self.view = View(unit="time" if self.view.unit == "step" else "step")

    def action_zoom(self, factor: float) -> None:
        if (extent := self._extent()) is not None:
            self.view = self.view.zoomed(factor, extent)

    def action_whole(self) -> None:
        self.view = View(unit=self.view.unit)

    def action_inspect(self) -> None:
        extent = self._extent()
        if self.view.cursor is not None:
            self.view = replace(self.view, cursor=None)
        elif extent is not None:
            self.view = self._standing(self.view.at(self.view.resolved(extent)[1], extent))
            self.charts.focus_first()

    def action_point(self, columns: int) -> None:
        extent = self._extent()
        if extent is None:
            return
        if self.view.cursor is None:
            self.view = self.view.panned(0.25 if columns > 0 else -0.25, extent)
        else:
            self.view = self._standing(self.view.pointed(columns, extent, self.charts.columns))

    @on(Chart.CursorMoved)
    def _pointed(self, message: Chart.CursorMoved) -> None:
        if (extent := self._extent()) is not None:
            self.view = self._standing(self.view.at(message.x, extent))

    @on(Chart.Zoomed)
    def _wheel(self, message: Chart.Zoomed) -> None:
        if (extent := self._extent()) is not None:
            self.view = self.view.zoomed(message.factor, extent, message.x)

    # The panels.

    def action_log_scale(self) -> None:
        self.charts.toggle_log_scale()

    def action_follow(self) -> None:
        self.log_panel.follow_end()

    def action_find(self) -> None:
        self.search.open()
        self._show_again()

    @on(Input.Changed, "#search")
    def _search_typed(self, event: Input.Changed) -> None:
        self.log_panel.search(event.value)

    @on(Input.Submitted, "#search")
    def _search_submitted(self) -> None:
        self.log_panel.go_to_newest_match()

    def action_maximise(self, whole: bool) -> None:
        """Show only the panel with the focus, or all of them again."""
        if whole:
            focused = self.focused
            self.maximize(focused if focused is not None and focused.allow_maximize else self.charts.loss)
        else:
            self.minimize()
        self.call_after_refresh(self.watch_view)

    def action_leave_field(self) -> None:
        if self.maximized is not None:
            self.minimize()
        elif self.search.close():
            self.charts.focus_first()
            self._show_again()
        elif self.view.cursor is not None:
            self.view = replace(self.view, cursor=None)
        else:
            self.charts.focus_first()

    # The run.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
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
        if self._run is not None:
            run_actions.ask_to_stop(self.app, self._run)

    def action_checkpoint(self) -> None:
        if self._run is not None:
            run_actions.save_checkpoint(self.app, self._run)

    def action_resume(self) -> None:
        if self._run is not None:
            run_actions.ask_to_resume(self.app, self._run)

    def action_differences(self) -> None:
        if self._run is not None:
            run_actions.show_settings(self.app, self._run)

    def action_copy(self) -> None:
        if self._run is not None:
            run_actions.copy_path(self.app, self._run)
