"""Take a chart of the dashboard elsewhere: its lines as a picture (SVG), or its values as a table
(CSV).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Button, Input, Static

from so_tui.runs import RunDirectory
from so_tui.runs.export import export_metrics, export_rows
from so_tui.runs.results import Answers, read_all, read_answers
from so_tui.ui.chart_metrics import (
    EVALUATIONS,
    METRICS,
    ChartLayout,
    Ema,
    sampled_lines,
)
from so_tui.ui.charts.chart import Chart, Metric
from so_tui.ui.charts.series import Named, write_picture
from so_tui.ui.dashboard.view import Overlaid, steps_at
from so_tui.ui.dialogs import CLOSE, Dialog, TickDialog, TickList, button, dialog
from so_tui.ui.run_actions import PICTURE, ChartExport
from so_tui.ui.run_rows import RunRow
from so_tui.ui.snapshot import SampledLines, Snapshot
from so_tui.ui.text import Content, shorten, wrong
from so_tui.ui.widgets import keys
from so_tui.units import duration, plural, thousands

if TYPE_CHECKING:
    pass


# What the model answered to the prompts of the spec, step by step.


READ_S = 2.0
"""Between two readings of a live run's answers."""
EMPTY = (
    "No answers yet. Name questions in the preset, and the model answers them before the first "
    "step, every so many steps, and at the end:\n\nso-tui run PRESET --set "
    "prompts.texts='[\"...\"]' --set prompts.every_steps=100"
)


class AnswersScreen(Dialog[None]):
    """Shows the newest answers, and those of earlier steps with left and right."""

    BINDINGS = keys("answers")

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._answers = Answers()
        self._step: int | None = None
        """The step that is shown; None for the newest."""
        super().__init__()

    def compose(self) -> ComposeResult:
        ways = {"Step before  ←": -1, "Next step  →": 1, "First  home": -1000}
        yield dialog(
            "Prompts",
            VerticalScroll(Static(id="answers"), classes="dialog-body"),
            buttons=[
                button("Close  esc", "close", CLOSE),
                *(button(label, None, f"screen.go({by})") for label, by in ways.items()),
            ],
            classes="dialog -wide",
        )

    @work(group="answers", name="read the answers", exclusive=True, exit_on_error=False)
    async def on_mount(self) -> None:
        """Read in a thread until the screen is left."""
        while True:
            self._answers = await asyncio.to_thread(read_answers, self._run)
            self._show()
            await asyncio.sleep(READ_S)

    @property
    def _at(self) -> int:
        """Index of what is shown; -1 without answers."""
        asked = self._answers.asked
        return next(
            (at for at, each in enumerate(asked) if each.step == self._step), len(asked) - 1
        )

    def _show(self) -> None:
        asked = self._answers.asked
        title, text = self.query_one(".dialog-title", Static), self.query_one("#answers", Static)
        for other in self.query(Button).exclude("#close"):
            other.display = bool(asked)
        if not asked:
            title.update("Prompts")
            text.update(Content(EMPTY))
            return
        shown = asked[self._at]
        when = "before training" if shown.step == 0 else f"after step {thousands(shown.step)}"
        number = f"   {self._at + 1} of {len(asked)}, in {duration(shown.seconds)}"
        title.update(Content.assemble(f"Prompts {when}", (number, "$faint not bold")))
        parts = (
            Content.assemble(
                ("> ", "bold $accent"),
                (answer.prompt, "bold"),
                f"\n{answer.text}",
                ("" if answer.stopped else " …", "$faint"),
            )
            for answer in shown.answers
        )
        text.update(Content("\n\n").join(parts))

    def action_go(self, by: int) -> None:
        asked = self._answers.asked
        if asked:
            at = min(max(self._at + by, 0), len(asked) - 1)
            self._step = asked[at].step if at < len(asked) - 1 else None
            self._show()


# Choose what the dashboard's charts show, and how it is smoothed.


TICKS = "space or a click ticks, a all that are listed, n none"


def _weight_of(text: str) -> Ema:
    """Return the weight that was typed; None for an empty text, which means the mean of the last
    steps. Raises ValidationError.
    """
    weight: Ema = msgspec.convert(text.strip() or None, Ema, strict=False)
    return weight


class ChooseMetrics(TickDialog[ChartLayout, str]):
    """Metrics with ticks, filtered while something is typed. The charts keep the order in which
    metrics were ticked.
    """

    def __init__(self, layout: ChartLayout) -> None:
        self._before = layout
        width = max(len(metric.title) for metric in METRICS)
        items = [
            (
                metric.key,
                Content.assemble(f"{metric.title:<{width}}  ", (metric.about, "$faint")),
                f"{metric.title} {metric.about} {' '.join(metric.fields)}",
            )
            for metric in METRICS
        ]
        super().__init__(items, "chart")

    def compose(self) -> ComposeResult:
        weight = "" if self._before.ema is None else f"{self._before.ema:g}"
        yield dialog(
            "Charts of the dashboard",
            Input(placeholder="filter by title, purpose or field", compact=True, id="filter"),
            TickList[str](self._before.shown, id="metrics"),
            Static(
                "smoothing: weight of an EMA, 0 to 0.99; empty: the mean of the last steps",
                classes="faint",
            ),
            Input(weight, placeholder="mean", compact=True, id="smoothing"),
            Static(id="said", classes="dialog-answer"),
            Static(f"{TICKS}; tab moves on", classes="faint"),
            buttons=self.buttons("Show the charts"),
            classes="dialog -wide",
        )

    @on(Input.Submitted, "#smoothing")
    def action_apply(self) -> None:
        """Leave with what is ticked, unless that cannot be shown."""
        smoothing = self.query_one("#smoothing", Input)
        try:
            ema = _weight_of(smoothing.value)
        except msgspec.ValidationError:
            remedy = "give a number from 0 to 0.99, or nothing for the mean of the last steps"
            self.say(wrong(f"smoothing: {remedy}"))
            self.set_focus(smoothing)
            return
        ticked = tuple(self.ticks.ticked)
        if ticked:
            self.dismiss(msgspec.structs.replace(self._before, shown=ticked, ema=ema))
        else:
            self.say(wrong("tick at least one metric"))


# Choose runs whose metrics are laid over those of the run on the dashboard.


NAME_CELLS = 34


class ChooseRuns(TickDialog[tuple[RunDirectory, ...], RunDirectory]):
    """Runs with ticks, filtered by name while something is typed."""

    AUTO_FOCUS = "TickList"

    def __init__(self, rows: Sequence[RunRow], chosen: Sequence[RunDirectory]) -> None:
        self._chosen = chosen
        super().__init__([(row.run, _line(row), row.run.name) for row in rows], "run")

    def compose(self) -> ComposeResult:
        yield dialog(
            "Lay other runs over the charts",
            Input(placeholder="filter by name", compact=True, id="filter"),
            TickList[RunDirectory](self._chosen, id="runs"),
            Static(id="said", classes="dialog-answer"),
            Static(TICKS, classes="faint"),
            buttons=self.buttons("Show them"),
        )

    def action_apply(self) -> None:
        self.dismiss(tuple(self.ticks.ticked))


def _line(row: RunRow) -> Content:
    model = row.spec.model.id if row.spec is not None else ""
    facts = f"{row.shown_state}, step {thousands(row.state.step)}  {shorten(model, 24)}"
    return Content.assemble(
        f"{shorten(row.run.name, NAME_CELLS):<{NAME_CELLS}}  ", (facts, "$faint")
    )


TABLE = ".csv"
_UNNAMED = ("", ".", "now", "last")
"""Names in a heading that say when, not what."""


def _drawn(chart: Chart, snapshot: Snapshot, overlays: Sequence[Overlaid]) -> list[Named]:
    """Return what a chart shows of its run and of those laid over it, all at steps, of the whole
    run, with names that tell them apart.
    """
    metric = chart.metric
    others = [curve for other in overlays for curve in _of_other(metric, other)]
    if metric.samples:
        own = sampled_lines(metric, snapshot.hosts.sampled, whole=True)
    else:
        own = list(chart.named[: len(chart.named) - len(others)])
    found = []
    for line, name in own:
        if line.steps is None:
            line = replace(line, steps=steps_at(line.times, line.length, snapshot.whole))
        run = snapshot.run.name
        found.append((line, run if name in _UNNAMED else f"{run} {name}" if others else name))
    return [*found, *others]


def _of_other(metric: Metric, other: Overlaid) -> list[Named]:
    lines, run = other.lines(metric, "main"), other.run.name
    if len(lines) == 1:
        return [(lines[0], run)]
    names = metric.names if len(metric.names) == len(lines) else range(1, len(lines) + 1)
    return [(line, f"{run} {name}") for line, name in zip(lines, names, strict=True)]


def _sampled_rows(metric: Metric, sampled: SampledLines) -> list[tuple[float | str, ...]]:
    """Return a row for each GPU, node or host and time: numbers of its host and of itself, the
    time, and its values, empty where not known.

    Numbers alone: a name could be a formula to the program that reads the table.
    """
    columns = [sampled.get(name, ()) for name in metric.samples]
    hosts = list(dict.fromkeys(number.host for number in columns[0]))
    rows: list[tuple[float | str, ...]] = []
    for same in zip(*columns, strict=True):
        for row in range(min(number.length for number in same)):
            values = [number.series.value(row) for number in same]
            known = [value if math.isfinite(value) else "" for value in values]
            rows.append((hosts.index(same[0].host), same[0].index, same[0].times[row], *known))
    return rows


def chart_export(chart: Chart, snapshot: Snapshot, overlays: Sequence[Overlaid]) -> ChartExport:
    """Return how a chart is written: as a picture, or as the table of its values."""
    metric, curves = chart.metric, _drawn(chart, snapshot, overlays)

    def write(path: Path) -> str:
        if path.suffix == TABLE:
            return plural(_write_table(snapshot, metric, path), "row")
        per, unit = metric.shown_in
        title = f"{metric.title}, {unit}" if unit else metric.title
        return write_picture(path, title, curves, per, log=chart.log_scale)

    stem = f"{snapshot.run.name}-{metric.key}"
    return ChartExport(
        choices=[
            (f"{stem}{PICTURE}", f"the chart of {metric.title}, of the whole run"),
            (f"{stem}{TABLE}", "its values"),
        ],
        takes=lambda path: (
            path.suffix == PICTURE or (path.suffix == TABLE and path.stem.endswith(metric.key))
        ),
        write=write,
    )


def _write_table(snapshot: Snapshot, metric: Metric, path: Path) -> int:
    """Write every record of the run that the metric is about, or the samples as the chart has them.
    Values have the units of records.
    """
    run = snapshot.run
    if metric.fields:
        return export_metrics(read_all(run), path, columns=("step", "time", *metric.fields))
    if metric.key == EVALUATIONS:
        return export_rows(
            path,
            ("step", "time", "loss"),
            [
                (record.step, record.time, record.loss)
                for record in read_all(run).events.evaluations
            ],
        )
    return export_rows(
        path,
        (
            "host",
            metric.samples[0].partition(".")[0],
            "time",
            *(name.partition(".")[2] for name in metric.samples),
        ),
        _sampled_rows(metric, snapshot.hosts.sampled),
    )
