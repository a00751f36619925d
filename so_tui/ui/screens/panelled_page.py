"""A page with the panels of a run: their places, and what they draw. The screen that follows a run builds on it.

It owns what the panels share: the view, the axis, and the rows and columns of the terminal. A panel owns its widgets and draws the
snapshots that it is handed. A wide terminal has the details of a step and the log at the right, others have the log below.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from textual import getters, on
from textual.widget import Widget
from textual.widgets import Input, Static

from so_tui.ui.chart_layout import load_layout
from so_tui.ui.framing import BOTTOM, SIDE, framed
from so_tui.ui.inspected import Position
from so_tui.ui.kept_lines import KeptScroll, KeptVertical
from so_tui.ui.panels.charts import ChartPanel
from so_tui.ui.panels.details import StepDetails
from so_tui.ui.panels.header import RunHeader
from so_tui.ui.panels.legend import RunLegend
from so_tui.ui.panels.log import LogPanel
from so_tui.ui.panels.numa import NumaPanel
from so_tui.ui.panels.placement import PlacementPanel
from so_tui.ui.panels.step import StepPanel
from so_tui.ui.resizing import ResizablePage, Size
from so_tui.ui.screens.charted_page import ChartedPage
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.view import LEAST_MAIN, Rows, axis_of, rows_for, side_columns
from so_tui.ui.widgets.find_field import FindField
from so_tui.ui.widgets.grip import Divider

LEAST_PLOT = 2
"""Rows of a node below which there is no room for its cores or its memory over time."""
RESERVED_ROWS = 12
"""Rows that stay for the other panels, however large one is made."""
OTHER_ROWS = 3
"""Rows of the screen that no panel gets: its top line, the tabs and the line of keys."""


class PanelledPage(ResizablePage, ChartedPage):
    """Draws snapshots and divides the terminal between the panels."""

    SIZES: ClassVar[tuple[str, ...]] = ("charts", "nodes", "side")

    panels = getters.query_one("#panels", KeptScroll)
    side = getters.query_one("#side", KeptVertical)
    divider = getters.query_one(Divider)
    header = getters.query_one(RunHeader)
    step = getters.query_one(StepPanel)
    numa = getters.query_one(NumaPanel)
    placement = getters.query_one(PlacementPanel)
    details = getters.query_one(StepDetails)
    log_panel = getters.query_one(LogPanel)
    search = getters.query_one("#search", FindField)

    def __init__(self) -> None:
        self._rows = Rows(0, 0, 0)
        """As they were divided last."""
        self._side_columns = 0
        self._placed = (0, 0)
        """Columns of the terminal, and those of the panels at the right, for which the panels stand in their places."""
        super().__init__()

    def body(self) -> Iterable[Widget]:
        glyphs = self.app.glyphs
        yield Static(id="empty")
        yield RunHeader()
        with KeptScroll(id="panels", can_focus=False):
            with KeptVertical(id="main"):
                yield ChartPanel(load_layout(), glyphs=glyphs)
                yield RunLegend()
                yield StepPanel()
                yield NumaPanel(PlacementPanel(), glyphs=glyphs)
            yield Divider()
            with KeptVertical(id="side"):
                yield StepDetails()
                yield LogPanel()
        yield FindField(
            "search the log: enter and n go back through the matches, esc ends", id="search"
        )

    def _show(self, snapshot: Snapshot) -> None:
        whole_width = self.size.width - 2
        side = self._set_side()
        width = (self.panels.scrollable_content_region.width or whole_width) - side
        self.axis = axis_of(snapshot, self.view, self.axis, self.overlays)
        now = time.time()
        self.header.show(snapshot, now, whole_width)
        self.step.show(snapshot, now, width)
        self.log_panel.show(snapshot)
        self.legend.room = width
        self.show_charts(snapshot)
        self.numa.show(snapshot, self.axis, width, self.view.cursor)
        self.placement.show(snapshot, self.numa.inner(width), self.size.height)
        if side:
            self.details.show(snapshot, side - 2 - 2 * SIDE)
        self._share_rows(self.numa.node_rows(width), log_below=not side)

    def _set_side(self) -> int:
        """Give the panels at the right their columns, or stand them below the others; return the columns."""
        settings = self.app.settings
        side = (
            side_columns(self.size.width, settings.panels.side)
            if settings.screen.layout == "auto"
            else 0
        )
        if (self.size.width, side) == self._placed:
            return side
        self._placed = self.size.width, side
        self._side_columns = side
        self.set_class(bool(side), "-beside")
        self.side.styles.width = side - 1 if side else "100%"
        self.details.display = self.divider.display = bool(side)
        self.charts.room = self.size.width - side
        return side

    def _share_rows(self, nodes: int, *, log_below: bool) -> None:
        """Divide the height of the terminal between the panels; ``nodes`` NUMA nodes stand above each other."""
        height = self.size.height - OTHER_ROWS
        crowded = height < 12 + 3 * nodes
        frame = BOTTOM if framed(self) else 0
        lines = (0 if crowded else 1 + frame) + (1 + frame if log_below else 0)
        around = self.header.rows + self.step.rows + lines
        fixed = (
            around + self.placement.shown_rows + (self.legend.rows if self.legend.display else 0)
        )
        sizes = self.app.settings.panels
        rows = rows_for(
            height, nodes, self.numa.gpu_rows, fixed, self.charts.least_rows, log=log_below
        )
        self._rows = rows = rows.resized(nodes, sizes.charts, sizes.nodes)
        self.charts.set_rows(rows.charts)
        self.numa.set_rows(rows.plot, heading=not crowded)
        log = rows.log if log_below else height - self.header.rows - self.details.rows - 1 - frame
        self.log_panel.set_rows(
            max(1, log - int(self.search.display))
        )  # the search bar takes its row from the log alone

    async def on_resize(self) -> None:
        # Lines that wrap beside a scroll bar can be what keeps it there: whether there is one must not depend on the size before.
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
            self.numa.show_nodes(snapshot, self.axis, self.view.cursor)
            at = self._cursor_position()
            self.log_panel.show_step(None if at is None else at[0])
            if self.view.window is not None or at is not None or snapshot.inspected is not None:
                self.tick()  # the range that was zoomed to is read in more detail, and what was at the cursor

    # The panels.

    def action_follow(self) -> None:
        self.log_panel.follow_end()

    def action_find(self) -> None:
        self.search.open()
        self.show_again()

    @on(Input.Changed, "#search")
    def _search_typed(self, event: Input.Changed) -> None:
        self.log_panel.search(event.value)

    @on(Input.Submitted, "#search")
    def _search_submitted(self) -> None:
        self.log_panel.go_to_newest_match()

    def action_node_plot(self) -> None:
        """Show load, heat of cores or memory of the nodes over time: on the whole screen where they have no room for it."""
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
            shown = (
                focused if focused is not None and focused.allow_maximize else self.charts.focused
            )
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

    def _cursor_position(self) -> Position | None:
        """Return step and time of the cursor."""
        cursor, axis = self.view.cursor, self.axis
        return None if cursor is None or axis is None else axis.position(cursor)

    # Sizes.

    def size_of(self, panel: Widget | None) -> Size | None:
        count = max(1, self.numa.node_rows(self.numa.size.width))
        most = self.size.height - RESERVED_ROWS
        charts = Size("charts", self._rows.charts, 4, most)
        nodes = Size("nodes", self._rows.plot, 0, most // count, count=count)
        side = Size(
            "side", self._side_columns, 30, self.size.width - LEAST_MAIN, towards=-1, step=4
        )
        log = self.log_panel
        if panel is self.divider:
            return side
        if panel is log.lines:
            return (
                side if self._side_columns else replace(charts, step=-1)
            )  # below the others, it has what they leave
        if panel is log.heading:
            return None if self._side_columns else nodes
        return (
            None if panel is self.details.heading else nodes if panel is self.numa.nodes else charts
        )

    def sizes_changed(self) -> None:
        self.call_later(self.on_resize)
