"""Dashboard: one run, live or past, on one axis: loss, throughput, the step's anatomy, the NUMA
nodes, the GPUs, the log.

The screen follows the run and hands snapshots to its panels. It owns what they share: the view, the
axis, and the rows and columns of the terminal. A panel owns its widgets and draws the snapshots
that it is handed. A wide terminal has the details of a step and the log at the right, others have
the log below.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs
from textual import events, getters, on, work
from textual.reactive import var
from textual.widget import Widget
from textual.widgets import Input, Static
from textual.worker import Worker

from so_tui.runs import RunDirectory
from so_tui.ui import run_actions
from so_tui.ui.chart_metrics import ChartLayout, Flag, hardware_keys, load_layout, save_layout
from so_tui.ui.charts.chart import Chart
from so_tui.ui.charts.series import Axis, Span, View
from so_tui.ui.dashboard.charts import ChartPanel, RunLegend
from so_tui.ui.dashboard.follow import Overlays, RunFollower
from so_tui.ui.dashboard.panels import LogPanel, PlacementPanel, RunHeader, StepDetails
from so_tui.ui.dashboard.view import (
    LEAST_MAIN,
    Overlaid,
    Rows,
    axis_of,
    extent_of,
    rows_for,
    side_columns,
)
from so_tui.ui.lines import StyledLines
from so_tui.ui.numa_nodes import NumaPanel
from so_tui.ui.page import ResizablePage, Size
from so_tui.ui.run_status import anatomy_lines
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, shows_ascii
from so_tui.ui.textual_fixes import KeptScroll, KeptVertical
from so_tui.ui.widgets import BOTTOM, SIDE, Divider, FindField, framed, keys

LEAST_ROWS = 7
"""Rows of a chart where several stand above each other."""
LEAST_PLOT = 2
"""Rows of a node below which there is no room for its cores or its memory over time."""
RESERVED_ROWS = 12
"""Rows that stay for the other panels, however large one is made."""
OTHER_ROWS = 3
"""Rows of the screen that no panel gets: its top line, the tabs and the line of keys."""
POLL_S = 1.0
EMPTY = (
    "No run yet. This is where a run is watched: its loss and speed, where the time of a step "
    "goes, every NUMA node, GPU and core.\n\n"
    "Press [$accent]1[/] and then [$accent]l[/] to launch a preset, or [$accent]4[/] to choose a "
    "run."
)


class DashboardScreen(ResizablePage):
    PAGE = "dashboard"
    CSS_PATH = [
        "screen.tcss",
        *(f"{panel}.tcss" for panel in ("header", "charts", "step", "../numa_nodes", "log")),
    ]
    AUTO_FOCUS = "ChartPanel Chart"
    ALLOW_IN_MAXIMIZED_VIEW = "_TopLine, RunHeader, #search, KeyLine"
    HELP_TEXT = (
        "Everything shares one axis: steps, or time (x). Raw values are dim, the mean of the last "
        "steps is bright, evaluations have a colour of their own; ◆ is a checkpoint, ↻ a resume; ✗ "
        "under a gap is a loss that is not a number. Each chip has a line: its GPU, its cores (A "
        "run Adam, m the training process), the memory of its node, their link. Below, a dim band "
        "reaches from a node's idlest to its busiest core; h shows the heat of its cores, and its "
        "memory. Leaving this screen does not touch the run."
    )
    BINDINGS = keys("dashboard", "pages", "charts", "nodes", "more-of-a-run")

    SIZES = ("charts", "nodes", "side")

    view: var[View] = var(View())
    charts = getters.query_one(ChartPanel)
    legend = getters.query_one(RunLegend)
    panels = getters.query_one("#panels", KeptScroll)
    side = getters.query_one("#side", KeptVertical)
    divider = getters.query_one(Divider)
    header = getters.query_one(RunHeader)
    anatomy = getters.query_one("#anatomy", StyledLines)
    numa = getters.query_one(NumaPanel)
    placement = getters.query_one(PlacementPanel)
    details = getters.query_one(StepDetails)
    log_panel = getters.query_one(LogPanel)
    search = getters.query_one("#search", FindField)

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        """What is shown."""
        self.axis: Axis | None = None
        self.run_shown: RunDirectory | None = None
        self.chosen: tuple[RunDirectory, ...] = ()
        """Runs to lay over it."""
        self.overlays: tuple[Overlaid, ...] = ()
        """What is known of them."""
        self._rows = Rows(0, 0, 0)
        """As they were divided last."""
        self._placed = (0, 0)
        """Columns of the terminal, and those of the panels at the right, for which the panels stand
        in their places.
        """
        self._follower: RunFollower | None = None
        self._worker: Worker[None] | None = None
        self._due = asyncio.Event()
        self._overlay_reader = Overlays()
        super().__init__()

    def body(self) -> Iterable[Widget]:
        yield Static(id="empty")
        yield RunHeader()
        with KeptScroll(id="panels", can_focus=False):
            with KeptVertical(id="main"):
                yield ChartPanel(load_layout())
                yield RunLegend()
                yield StyledLines(id="anatomy")
                yield NumaPanel(PlacementPanel())
            yield Divider()
            with KeptVertical(id="side"):
                yield StepDetails()
                yield LogPanel()
        yield FindField(
            "search the log: enter and n go back through the matches, esc ends", id="search"
        )

    def on_mount(self) -> None:
        self.watch(self.app, "checking", self._checks_changed)
        self.set_interval(POLL_S, self.tick)
        self.watch(self.app, "opened", self.follow)
        if self.run_shown is None:
            self.watch(self.app, "runs", self._take_newest)

    def _checks_changed(self) -> None:
        """Show the checks of a launch in place of a run until it has a run of its own, or comes to
        nothing.
        """
        self.header.display = self.app.checking is None
        self.panels.display = self.run_shown is not None and self.app.checking is None
        self.query_one("#empty").display = not self.panels.display
        self._show_checks()
        self.refresh_bindings()

    def _show_checks(self) -> None:
        checking, empty = self.app.checking, self.query_one("#empty", Static)
        empty.update(
            Content.from_markup(EMPTY)
            if checking is None
            else checking.lines(empty.content_size.width or self.size.width)
        )

    def _take_newest(self) -> None:
        if self.run_shown is None and self.app.runs and self.app.checking is None:
            self.app.opened = self.app.runs[0].run

    # Following.

    def follow(self, run: RunDirectory | None) -> None:
        """Show another run."""
        if run is None or run == self.run_shown:
            return
        self.run_shown = run
        self._follower = RunFollower(run)
        self._worker = None
        self.snapshot = None
        self.axis = None
        self.view = View(unit=self.view.unit)
        self.log_panel.lines.clear()
        if number := self.charts.page.number:
            self.call_later(self.charts.change, self.charts.chart_layout, -number)
        self._checks_changed()
        self.tick()

    @on(events.ScreenResume)
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
        """Poll in a thread whenever it is due, until another run is followed; never before the last
        poll came back.

        One worker serves all polls: starting one, and the messages about its states, cost as much
        as a poll.
        """
        loop = asyncio.get_running_loop()
        # In a pool of several, each poll wakes two threads.
        thread = ThreadPoolExecutor(1, "follow")
        while True:
            await self._due.wait()
            self._due.clear()
            window = self.axis.in_steps() if self.axis and self.view.window else None
            charted, cursor = self.charts.wanted, self._cursor_position()
            wanted = replace(charted, samples=(*charted.samples, *self.numa.wanted))
            snapshot = await loop.run_in_executor(thread, follower.poll, wanted, window, cursor)
            others = [run for run in self.chosen if run != follower.run]
            overlays: tuple[Overlaid, ...] = ()
            if others or self.overlays:
                begin = snapshot.whole.begin[1]
                overlays = await loop.run_in_executor(
                    thread, self._overlay_reader.read, others, charted, begin
                )
            if follower is self._follower:
                before, self.snapshot, self.overlays = self.snapshot, snapshot, overlays
                self._show(snapshot)
                if before is None or (before.live, before.deleted) != (
                    snapshot.live,
                    snapshot.deleted,
                ):
                    self.refresh_bindings()
                    if before is not None:
                        self.app.list_runs()  # whose number of live runs is on the screen
                if (
                    snapshot.unread_share or any(overlaid.more for overlaid in overlays)
                ) and self.is_current:
                    self._due.set()  # earlier steps are read without a pause

    # Drawing, and dividing the terminal between the panels.

    def _show(self, snapshot: Snapshot) -> None:
        whole_width = self.size.width - 2
        side = self._set_side()
        # Just after a resize the panels have their old size still.
        laid_out = self.panels.outer_size.width == self.size.width
        room = self.panels.scrollable_content_region.width if laid_out else whole_width
        width = (room or whole_width) - side
        self.axis = axis_of(snapshot, self.view, self.axis, self.overlays)
        now = time.time()
        self.header.show(snapshot, now, whole_width)
        self.anatomy.update(anatomy_lines(snapshot, now, width, plain=shows_ascii(self.app)))
        self.log_panel.show(snapshot)
        self.legend.room = width
        self.show_charts(snapshot)
        self.numa.show(snapshot.hosts, self.axis, width, self.view.cursor)
        self.placement.show(snapshot, self.numa.inner(width), self.size.height)
        if side:
            self.details.show(snapshot, side - 2 - 2 * SIDE)
        self._share_rows(self.numa.node_rows(width), log_below=not side)

    def _set_side(self) -> int:
        """Give the panels at the right their columns, or stand them below the others; return the
        columns.
        """
        settings = self.app.settings
        side = 0
        if settings.screen.layout == "auto":
            side = side_columns(self.size.width, settings.panels.side)
        if (self.size.width, side) == self._placed:
            return side
        self._placed = self.size.width, side
        self.set_class(bool(side), "-beside")
        self.side.styles.width = side - 1 if side else "100%"
        self.details.display = self.divider.display = bool(side)
        self.charts.room = self.size.width - side
        return side

    def _share_rows(self, nodes: int, *, log_below: bool) -> None:
        """Divide the height of the terminal between the panels; ``nodes`` NUMA nodes stand above
        each other.
        """
        height = self.size.height - OTHER_ROWS
        lines = self.numa.nodes.lines
        crowded = height < 14 + lines
        framed_line = 1 + (BOTTOM if framed(self) else 0)
        fixed = framed_line * ((not crowded) + log_below) + sum(
            panel.shown_rows for panel in (self.header, self.anatomy, self.placement, self.legend)
        )
        sizes = self.app.settings.panels
        grid = self.charts.page.rows
        least = LEAST_ROWS * grid if grid > 1 else 0
        rows = rows_for(height, nodes, fixed + lines, least, log=log_below)
        self._rows = rows = rows.resized(nodes, sizes.charts, sizes.nodes)
        self.charts.styles.height = rows.charts
        self.numa.set_rows(rows.plot, heading=not crowded)
        beside = height - self.header.shown_rows - self.details.rows - framed_line
        # The search bar takes its row from the log alone.
        log = (rows.log if log_below else beside) - self.search.display
        self.log_panel.set_rows(max(1, log))

    async def on_resize(self) -> None:
        # Lines that wrap beside a scroll bar can be what keeps it there: whether there is one must
        # not depend on the size before.
        self.panels.show_vertical_scrollbar = False
        self._set_side()
        await self.charts.change(self.charts.chart_layout)
        self.show_again()

    def watch_maximized(self) -> None:
        self.refresh_bindings()
        self.show_again()

    def show_again(self) -> None:
        if self.snapshot is not None:
            self._show(replace(self.snapshot, log_lines=()))

    def watch_view(self) -> None:
        self.axis = None
        if (snapshot := self.snapshot) is not None:
            self.axis = axis_of(snapshot, self.view, overlays=self.overlays)
            self.show_charts(snapshot)
            self.numa.show_nodes(snapshot.hosts, self.axis, self.view.cursor)
            at = self._cursor_position()
            self.log_panel.show_step(None if at is None else at[0])
            if (
                self.view.window is not None
                or at is not None
                or snapshot.hosts.inspected is not None
            ):
                # the range that was zoomed to is read in more detail, and what was at the cursor
                self.tick()

    def show_charts(self, snapshot: Snapshot) -> None:
        """Draw the charts, and the legend where runs lie over each other."""
        if self.charts.on_gpus != snapshot.on_gpus:
            self.charts.on_gpus = snapshot.on_gpus
            self.call_later(self._arrange, self.charts.chart_layout)
        self.charts.show(snapshot, self.view, self.axis, self.overlays)
        self.legend.show(snapshot, self.overlays, self.charts.metric, self.axis, self.view.cursor)

    # The view.

    @property
    def _extent(self) -> Span:
        """First and last position on the axis, the same before there is anything to draw."""
        snapshot = self.snapshot
        found = snapshot and extent_of(snapshot, self.view.unit, self.overlays)
        return found or (0.0, 0.0)

    def _standing(self, view: View) -> View:
        """Return the view with its cursor at a position whose values are known."""
        if self.snapshot is None or view.cursor is None:
            return view
        return replace(view, cursor=self.snapshot.standing(view.cursor, view.unit))

    def action_axis(self) -> None:
        self.view = View(unit="time" if self.view.unit == "step" else "step")

    def action_zoom(self, factor: float) -> None:
        self.view = self.view.zoomed(factor, self._extent)

    def action_whole(self) -> None:
        self.view = View(unit=self.view.unit)

    def action_inspect(self) -> None:
        extent = self._extent
        if self.view.cursor is not None:
            self.view = replace(self.view, cursor=None)
        elif any(extent):
            self.view = self._standing(self.view.at(self.view.resolved(extent)[1], extent))
            self.charts.focus_first()

    def action_point(self, columns: int) -> None:
        extent = self._extent
        if self.view.cursor is None:
            self.view = self.view.panned(0.25 if columns > 0 else -0.25, extent)
        else:
            self.view = self._standing(self.view.pointed(columns, extent, self.charts.columns))

    @on(Chart.Moved)
    def _moved(self, message: Chart.Moved) -> None:
        self.view = self._standing(message.change(self.view, self._extent))

    # What the charts show.

    async def _arrange(self, layout: ChartLayout, turned: int = 0) -> None:
        """Show and remember another layout of charts."""
        if layout != self.charts.chart_layout:
            self.app.write_later(partial(save_layout, layout))
        await self.charts.change(layout, turned)
        self.show_again()
        self.tick()

    async def action_scale(self, flag: Flag) -> None:
        await self._arrange(self.charts.chart_layout.toggled(flag, self.charts.metric.key))

    async def action_grid(self) -> None:
        await self._arrange(self.charts.chart_layout.next_grid(self.charts.room))

    async def action_page(self, turned: int) -> None:
        await self._arrange(self.charts.chart_layout, turned)

    async def action_hardware(self) -> None:
        """Show what GPUs and nodes did instead of the metrics that the user chose, or these
        again.
        """
        if self.snapshot is not None:
            self.charts.instead = (
                () if self.charts.instead else hardware_keys(self.snapshot.hosts.gpus)
            )
            await self._arrange(self.charts.chart_layout, turned=-self.charts.page.number)

    async def action_smooth(self, direction: int) -> None:
        await self._arrange(self.charts.chart_layout.smoother(direction))

    def action_metrics(self) -> None:
        listed = self.charts.wanted_layout

        async def chosen(layout: ChartLayout) -> None:
            if layout.shown == listed.shown:
                # Charts that replace those of GPUs here are not chosen for runs with GPUs.
                layout = structs.replace(layout, shown=self.charts.chart_layout.shown)
            await self._arrange(layout)

        from so_tui.ui.dashboard.dialogs import ChooseMetrics
        from so_tui.ui.dialogs import show_dialog

        show_dialog(self.app, ChooseMetrics(listed), chosen)

    def action_export(self) -> None:
        snapshot, chart = self.snapshot, self.charts.focused
        if snapshot is not None and chart is not None:
            from so_tui.ui.dashboard.dialogs import chart_export

            charts = chart_export(chart, snapshot, self.overlays)
            run_actions.export(self, snapshot.run, charts, self._exporting)

    def _exporting(self, _: RunDirectory, progress: str, __: Path | None) -> None:
        if progress:
            self.app.notify(progress, markup=False)

    def action_overlay(self) -> None:
        def chosen(runs: tuple[RunDirectory, ...]) -> None:
            self.chosen = runs
            self.tick()

        from so_tui.ui.dashboard.dialogs import ChooseRuns
        from so_tui.ui.dialogs import show_dialog

        rows = [row for row in self.app.runs if row.run != self.run_shown]
        show_dialog(self.app, ChooseRuns(rows, self.chosen), chosen)

    # The panels.

    def action_follow(self) -> None:
        self.log_panel.follow_end()

    def action_find(self) -> None:
        self.search.open()
        self.show_again()

    @on(Input.Changed, "#search")
    def _search_typed(self, event: Input.Changed) -> None:
        self.log_panel.lines.needle = event.value

    @on(Input.Submitted, "#search")
    def _search_submitted(self) -> None:
        """Give the keyboard to the log and scroll to the newest line that matches."""
        self.set_focus(self.log_panel.lines)
        self.log_panel.lines.action_next_match(-1)

    def action_node_plot(self) -> None:
        """Show load, heat of cores or memory of the nodes over time: on the whole screen where they
        have no room for it.
        """
        self.numa.next_plot()
        nodes = self.numa.nodes
        if nodes.plot != "load" and nodes.plot_height < LEAST_PLOT and not nodes.is_maximized:
            self.maximize(nodes)
        elif nodes.plot == "load" and nodes.is_maximized:
            self.minimize()
        self.show_again()
        self.tick()

    def action_maximise(self, whole: bool) -> None:
        """Show only the panel with the focus, or all of them again."""
        if whole:
            focused = self.focused
            whole_panel = focused is not None and focused.allow_maximize
            shown = focused if whole_panel else self.charts.focused
            if shown is not None:
                self.maximize(shown)
        else:
            self.minimize()
        self.call_after_refresh(self.watch_view)

    def action_leave_field(self) -> None:
        if self.maximized is not None:
            self.minimize()
        elif self.search.close():
            self.charts.focus_first()
            self.show_again()
        elif self.view.cursor is not None:
            self.view = replace(self.view, cursor=None)
        else:
            self.charts.focus_first()

    def _cursor_position(self) -> Span | None:
        """Return step and time of the cursor."""
        cursor, axis = self.view.cursor, self.axis
        return None if cursor is None or axis is None else axis.position(cursor)

    # Sizes.

    def size_of(self, panel: Widget | None) -> Size | None:
        count = max(1, self.numa.node_rows(self.numa.size.width))
        most = self.size.height - RESERVED_ROWS
        charts = Size("charts", self._rows.charts, 4, most)
        nodes = Size("nodes", self._rows.plot, 0, most // count, count=count)
        columns, log = self._placed[1], self.log_panel
        side = Size("side", columns, 30, self.size.width - LEAST_MAIN, towards=-1, step=4)
        below = side if columns else replace(charts, step=-1)  # it has what the others leave
        sizes: dict[Widget | None, Size | None] = {
            self.divider: side,
            log.lines: below,
            log.heading: None if columns else nodes,
            self.details.heading: None,
            self.numa.nodes: nodes,
        }
        return sizes.get(panel, charts)

    def sizes_changed(self) -> None:
        self.call_later(self.on_resize)

    # The run.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if self.run_shown is None or self.app.checking is not None:
            # Nothing is shown that a key could act on.
            return action in ("leave_field", "copy_text")
        if action == "to_run":
            action = str(parameters[0])
        if action in ("stop", "checkpoint", "resume", "chat"):
            snapshot = self.snapshot
            if snapshot is None or snapshot.state is None or snapshot.deleted:
                return False
            if action == "resume":
                return snapshot.state.state in run_actions.RESUMABLE
            if action == "chat":
                return bool(snapshot.events.checkpoints) and not snapshot.live
            return snapshot.live and not (snapshot.checking and action == "checkpoint")
        if action == "maximise":
            return parameters == (self.maximized is None,)
        return True

    def action_to_run(self, name: str) -> None:
        if self.run_shown is not None:
            run_actions.act(self.app, name, self.run_shown)

    def action_answers(self) -> None:
        from so_tui.ui.dashboard.dialogs import AnswersScreen

        if self.run_shown is not None:
            self.app.push_screen(AnswersScreen(self.run_shown))
