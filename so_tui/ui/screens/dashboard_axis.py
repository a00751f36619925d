"""The one axis of the dashboard: which stretch is shown, and the cursor on it."""

from __future__ import annotations

from dataclasses import replace

from textual import on
from textual.reactive import var

from so_tui.ui.follow import Snapshot
from so_tui.ui.page import Page
from so_tui.ui.view import View, extent_of
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.drawing import GUTTER


class AxisKeys(Page):
    """Zooms, moves and points; whoever draws watches ``view``."""

    view: var[View] = var(View())
    snapshot: Snapshot | None = None
    """What is shown."""

    def _extent(self) -> tuple[float, float] | None:
        return extent_of(self.snapshot, self.view.unit) if self.snapshot is not None else None

    def action_axis(self) -> None:
        self.view = View(unit="time" if self.view.unit == "step" else "step")

    def action_zoom(self, factor: float) -> None:
        extent = self._extent()
        if extent is not None:
            self.view = self.view.zoomed(factor, extent)

    def action_whole(self) -> None:
        self.view = View(unit=self.view.unit)

    def action_inspect(self) -> None:
        extent = self._extent()
        if self.view.cursor is not None:
            self.view = replace(self.view, cursor=None)
        elif extent is not None:
            self.view = self.view.at(self.view.resolved(extent)[1], extent)
            self.query_one("#loss").focus()

    def action_point(self, columns: int) -> None:
        extent = self._extent()
        if extent is None:
            return
        if self.view.cursor is None:
            self.view = self.view.panned(0.25 if columns > 0 else -0.25, extent)
        else:
            chart = self.query_one("#loss", Chart)
            self.view = self.view.pointed(columns, extent, max(8, chart.size.width - GUTTER))

    @on(Chart.CursorMoved)
    def _pointed(self, message: Chart.CursorMoved) -> None:
        extent = self._extent()
        if extent is not None:
            self.view = self.view.at(message.x, extent)

    @on(Chart.Zoomed)
    def _wheel(self, message: Chart.Zoomed) -> None:
        extent = self._extent()
        if extent is not None:
            self.view = self.view.zoomed(message.factor, extent, message.x)
