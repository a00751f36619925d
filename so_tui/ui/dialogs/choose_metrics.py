"""Choose what the dashboard's charts show, and how it is smoothed."""

from __future__ import annotations

import re

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, Static

from so_tui.ui.chart_layout import MOST_EMA, ChartLayout
from so_tui.ui.chart_metrics import METRICS, Metric
from so_tui.ui.dialogs.tick_dialog import TickDialog
from so_tui.ui.text import Content, plural
from so_tui.ui.widgets.entry import Entry
from so_tui.ui.widgets.tick_list import TickList


def matching(pattern: str) -> tuple[list[Metric], str]:
    """Return the metrics that a regular expression finds, in small and capital letters alike; all of them, and why, where it is none."""
    try:
        found = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        return list(METRICS), f"not a regular expression: {error.msg}" + (
            "" if error.pos is None else f" at character {error.pos + 1}"
        )
    return [
        metric
        for metric in METRICS
        if found.search(f"{metric.title} {metric.about} {' '.join(metric.fields)}")
    ], ""


def weight_of(text: str) -> float | None:
    """Return the weight that was typed; None for an empty text, which means the mean of the last steps. Raises ValueError."""
    if not text.strip():
        return None
    weight = float(text)
    if not 0 <= weight <= MOST_EMA:
        raise ValueError(text)
    return weight


class ChooseMetrics(TickDialog[ChartLayout, str]):
    """Metrics with ticks, filtered while something is typed. The charts keep the order in which metrics were ticked."""

    def __init__(self, layout: ChartLayout) -> None:
        self._before = layout
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide"):
            yield Static("Charts of the dashboard", classes="dialog-title")
            yield Entry(placeholder="filter: a regular expression", compact=True, id="filter")
            yield TickList[str](self._before.shown, id="metrics")
            yield Static(
                "smoothing: weight of an EMA, 0 to 0.99; empty: the mean of the last steps",
                classes="faint",
            )
            weight = "" if self._before.ema is None else f"{self._before.ema:g}"
            yield Entry(weight, placeholder="mean", compact=True, id="smoothing")
            yield Static(id="said", classes="dialog-answer")
            yield Static(
                "space or a click ticks, a all that are listed, n none; tab moves on",
                classes="faint",
            )
            yield from self.buttons("Show the charts")

    def list_matching(self, text: str) -> None:
        """List the metrics that match."""
        found, problem = matching(text)
        width = max(len(metric.title) for metric in METRICS)
        self.ticks.list_items(
            [
                (
                    metric.key,
                    Content.assemble(f"{metric.title:<{width}}  ", (metric.about, "$faint")),
                )
                for metric in found
            ]
        )
        self._tell(problem)

    def _tell(self, problem: str) -> None:
        text = (
            Content.assemble(("✗ ", "$error"), problem)
            if problem
            else Content(f"{plural(len(self.ticks.ticked), 'chart')} ticked")
        )
        self.say(text)

    @on(TickList.Changed)
    def _changed(self) -> None:
        self._tell("")

    @on(Input.Submitted, "#smoothing")
    def action_apply(self) -> None:
        """Leave with what is ticked, unless that cannot be shown."""
        try:
            ema = weight_of(self.query_one("#smoothing", Input).value)
        except ValueError:
            self._tell(
                "smoothing: give a number from 0 to 0.99, or nothing for the mean of the last steps"
            )
            self.set_focus(self.query_one("#smoothing", Input))
            return
        ticked = tuple(self.ticks.ticked)
        if ticked:
            self.dismiss(msgspec.structs.replace(self._before, shown=ticked, ema=ema))
        else:
            self._tell("tick at least one metric")
