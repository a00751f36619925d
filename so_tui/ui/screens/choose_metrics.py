"""Choose what the dashboard's charts show, and how it is smoothed."""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from so_tui.ui.chart_metrics import METRICS, Metric
from so_tui.ui.chart_settings import MOST_EMA, ChartSettings
from so_tui.ui.text import Content, plural
from so_tui.ui.widgets.entry import Entry
from so_tui.ui.widgets.tick_list import TickList


def matching(pattern: str) -> tuple[list[Metric], str]:
    """Return the metrics that a regular expression finds, in small and capital letters alike; all of them, and why, where it is none."""
    try:
        found = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        return list(METRICS), f"not a regular expression: {error.msg}" + ("" if error.pos is None else f" at character {error.pos + 1}")
    return [metric for metric in METRICS if found.search(f"{metric.title} {metric.about} {' '.join(metric.fields)}")], ""


def weight_of(text: str) -> float | None:
    """Return the weight that was typed; None for an empty text, which means the mean of the last steps. Raises ValueError."""
    if not text.strip():
        return None
    weight = float(text)
    if not 0 <= weight <= MOST_EMA:
        raise ValueError(text)
    return weight


class ChooseMetrics(ModalScreen[ChartSettings | None]):
    """Metrics with ticks, filtered while something is typed. The charts keep the order in which metrics were ticked."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "apply", "Show these"),
    ]

    def __init__(self, settings: ChartSettings) -> None:
        self._settings = settings
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("Charts of the dashboard", classes="dialog-title")
            yield Entry(placeholder="filter: a regular expression", compact=True, id="filter")
            yield TickList[str](self._settings.shown, id="metrics")
            yield Static("smoothing: weight of an EMA, 0 to 0.99; empty: the mean of the last steps", classes="faint")
            weight = "" if self._settings.ema is None else f"{self._settings.ema:g}"
            yield Entry(weight, placeholder="mean", compact=True, id="smoothing")
            yield Static(id="said", classes="dialog-answer")
            yield Static("space ticks, a all that are listed, n none; tab moves on; esc shows the charts", classes="faint")

    def on_mount(self) -> None:
        self._list("")

    @property
    def _ticks(self) -> TickList[str]:
        return self.query_one(TickList)

    def _list(self, pattern: str) -> None:
        """List the metrics that match."""
        found, problem = matching(pattern)
        width = max(len(metric.title) for metric in METRICS)
        self._ticks.list_items([(metric.key, Content.assemble(f"{metric.title:<{width}}  ", (metric.about, "$faint"))) for metric in found])
        self._say(problem)

    def _say(self, problem: str) -> None:
        text = Content.assemble(("✗ ", "$error"), problem) if problem else Content(f"{plural(len(self._ticks.ticked), 'chart')} ticked")
        self.query_one("#said", Static).update(text)

    @on(Input.Changed, "#filter")
    def _filtered(self, event: Input.Changed) -> None:
        self._list(event.value)

    @on(Input.Submitted, "#filter")
    def _to_the_list(self) -> None:
        self._ticks.focus()

    @on(TickList.Changed)
    def _changed(self) -> None:
        self._say("")

    @on(Input.Submitted, "#smoothing")
    def action_apply(self) -> None:
        """Leave with what is ticked, unless that cannot be shown."""
        try:
            ema = weight_of(self.query_one("#smoothing", Input).value)
        except ValueError:
            self._say("smoothing: give a number from 0 to 0.99, or nothing for the mean of the last steps")
            self.query_one("#smoothing", Input).focus()
            return
        ticked = tuple(self._ticks.ticked)
        if ticked:
            self.dismiss(msgspec.structs.replace(self._settings, shown=ticked, ema=ema))
        else:
            self._say("tick at least one metric")
