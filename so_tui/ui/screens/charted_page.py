"""A page with charts over one axis: moving along it, and what the charts show. The screen that follows a run builds on it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from msgspec import structs
from textual import getters, on, work
from textual.binding import Binding, BindingType
from textual.reactive import var

from so_tui.runs import RunDirectory
from so_tui.ui.chart_layout import ChartLayout, save_layout
from so_tui.ui.chart_metrics import hardware_keys
from so_tui.ui.overlay import Overlaid
from so_tui.ui.page import Page
from so_tui.ui.panels.charts import ChartPanel
from so_tui.ui.panels.legend import RunLegend
from so_tui.ui.series import Axis
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.view import View, extent_of
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.writes import OrderedWrites


class ChartedPage(Page):
    """Owns the view, the axis and the runs that are laid over the one that is shown."""

    KEYS: ClassVar[tuple[BindingType, ...]] = (
        Binding("x", "axis", "Axis", id="axis", tooltip="Steps or time on the axis of all charts"),
        Binding(
            "z,plus",
            "zoom(0.5)",
            "Zoom",
            key_display="z",
            id="zoom",
            tooltip="Zoom in (also + and the wheel)",
        ),
        Binding(
            "Z,minus",
            "zoom(2)",
            "Zoom out",
            key_display="Z",
            show=False,
            id="zoom-out",
            tooltip="Also -",
        ),
        Binding("0", "whole", "Whole run", show=False, id="whole"),
        Binding(
            "i",
            "inspect",
            "Inspect",
            id="inspect",
            tooltip="A cursor on all charts; arrows move it, shift by ten",
        ),
        Binding("left", "point(-1)", "Cursor left", show=False),
        Binding("right", "point(1)", "Cursor right", show=False),
        Binding("shift+left", "point(-10)", "Cursor far left", show=False),
        Binding("shift+right", "point(10)", "Cursor far right", show=False),
    )
    """Keys of the axis; the screen that builds on this one places them among its own."""

    view: var[View] = var(View())
    charts = getters.query_one(ChartPanel)
    legend = getters.query_one(RunLegend)

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        """What is shown."""
        self.axis: Axis | None = None
        self.run_shown: RunDirectory | None = None
        self.chosen: tuple[RunDirectory, ...] = ()
        """Runs to lay over it."""
        self.overlays: tuple[Overlaid, ...] = ()
        """What is known of them."""
        self._layouts = OrderedWrites(save_layout)
        super().__init__()

    def tick(self) -> None:
        """Have the run polled."""
        raise NotImplementedError

    def show_again(self) -> None:
        """Draw what is known anew."""
        raise NotImplementedError

    def show_charts(self, snapshot: Snapshot) -> None:
        """Draw the charts, and the legend where runs lie over each other."""
        if self.charts.learn_of_gpus(snapshot.on_gpus):
            self.call_later(self._arrange, self.charts.chart_layout)
        self.charts.show(snapshot, self.view, self.axis, self.overlays)
        if self.overlays or self.legend.display:
            self.legend.show(
                snapshot, self.overlays, self.charts.metric, self.axis, self.view.cursor
            )

    # The view.

    def _extent(self) -> tuple[float, float] | None:
        return (
            extent_of(self.snapshot, self.view.unit, self.overlays)
            if self.snapshot is not None
            else None
        )

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

    @on(Chart.Ranged)
    def _dragged(self, message: Chart.Ranged) -> None:
        if (extent := self._extent()) is not None:
            self.view = self.view.ranged(message.low, message.high, extent)

    @on(Chart.Panned)
    def _pushed(self, message: Chart.Panned) -> None:
        if (extent := self._extent()) is not None:
            self.view = self.view.panned(message.share, extent)

    # What the charts show.

    async def _arrange(self, layout: ChartLayout, turned: int = 0) -> None:
        """Show and remember another layout of charts."""
        if layout != self.charts.chart_layout:
            self._layouts.add(layout)
            self._remember()
        await self.charts.change(layout, turned)
        self.show_again()
        self.tick()

    @work(thread=True, group="remember", name="remember the charts", exit_on_error=False)
    def _remember(self) -> None:
        self._layouts.write_added()

    async def action_log_scale(self) -> None:
        await self._arrange(self.charts.toggled("log"))

    async def action_robust_scale(self) -> None:
        await self._arrange(self.charts.toggled("robust"))

    async def action_grid(self) -> None:
        await self._arrange(self.charts.chart_layout.next_grid(self.charts.room))

    async def action_page(self, turned: int) -> None:
        await self._arrange(self.charts.chart_layout, turned)

    @on(Chart.PageTurned)
    async def _page_turned(self) -> None:
        await self.action_page(1)

    async def action_hardware(self) -> None:
        """Show what GPUs and nodes did instead of the metrics that the user chose, or these again."""
        if self.snapshot is not None:
            self.charts.instead = (
                ()
                if self.charts.instead
                else hardware_keys(view.sample for view in self.snapshot.gpus)
            )
            await self._arrange(self.charts.chart_layout, turned=-self.charts.page.number)

    async def action_smooth(self, direction: int) -> None:
        await self._arrange(self.charts.chart_layout.smoother(direction))

    def action_metrics(self) -> None:
        listed = self.charts.wanted_layout

        async def chosen(layout: ChartLayout | None) -> None:
            if layout is None:
                return
            if (
                layout.shown == listed.shown
            ):  # what stands for metrics of GPUs is not chosen for runs that have them
                layout = structs.replace(layout, shown=self.charts.chart_layout.shown)
            await self._arrange(layout)

        from so_tui.ui.dialogs.choose_metrics import ChooseMetrics

        self.app.push_screen(ChooseMetrics(listed), chosen)

    def action_export(self) -> None:
        if self.snapshot is not None and (chart := self.charts.focused) is not None:
            from so_tui.ui.screens.chart_export import ask_to_export_chart, drawn

            metric = self.charts.metric
            ask_to_export_chart(
                self, self.snapshot, metric, drawn(metric, chart, self.snapshot, self.overlays)
            )

    def action_overlay(self) -> None:
        def chosen(runs: tuple[RunDirectory, ...] | None) -> None:
            if runs is not None:
                self.chosen = runs
                self.tick()

        from so_tui.ui.dialogs.choose_runs import ChooseRuns

        rows = [
            row
            for row in self.app.runs
            if self.run_shown is None or row.run.path != self.run_shown.path
        ]
        self.app.push_screen(ChooseRuns(rows, self.chosen), chosen)
