"""Take a chart of the dashboard elsewhere: its lines as a picture (SVG), or its values as a table (CSV)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.runs.metrics_export import export_metrics, export_rows
from so_tui.runs.results import read_all
from so_tui.spec import InputError, Problem, SoTuiError
from so_tui.ui.chart_metrics import EVALUATIONS, Metric
from so_tui.ui.chart_svg import chart_svg
from so_tui.ui.hardware_charts import sampled_lines
from so_tui.ui.loads import Sampled
from so_tui.ui.messages import Failed
from so_tui.ui.overlay import Overlaid, steps_at
from so_tui.ui.screens.run_records import PICTURE, WROTE_S, new_path
from so_tui.ui.series import Line
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import plural
from so_tui.ui.widgets.chart import Chart

if TYPE_CHECKING:
    from so_tui.ui.page import Page

TABLE = ".csv"
_UNNAMED = ("", ".", "now", "last")
"""Names in a heading that say when, not what."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line with the name that tells it from the others of its chart."""

    name: str
    line: Line


def drawn(
    metric: Metric, chart: Chart, snapshot: Snapshot, overlays: Sequence[Overlaid]
) -> list[Curve]:
    """Return what a chart shows of its run and of those laid over it, all at steps, of the whole run."""
    others = [curve for other in overlays for curve in _of_other(metric, other)]
    if metric.samples:
        own = sampled_lines(metric, snapshot.sampled, whole=True)
    else:
        own = list(zip(chart.lines, chart.names, strict=True))[: len(chart.lines) - len(others)]
    found = [
        Curve(metric.title if name in _UNNAMED else name, _at_steps(line, snapshot))
        for line, name in own
    ]
    return [*found, *others]


def _of_other(metric: Metric, other: Overlaid) -> list[Curve]:
    lines = other.lines(metric, "main")
    names = (
        metric.names
        if len(metric.names) == len(lines)
        else [str(number) for number in range(1, len(lines) + 1)]
    )
    return [
        Curve(f"{other.run.name} {name}" if len(lines) > 1 else other.run.name, line)
        for line, name in zip(lines, names, strict=True)
    ]


def _at_steps(line: Line, snapshot: Snapshot) -> Line:
    return (
        line
        if line.steps is not None
        else replace(line, steps=steps_at(line.times, line.length, snapshot.whole))
    )


def sampled_rows(
    metric: Metric, sampled: Mapping[str, tuple[Sampled, ...]]
) -> list[tuple[float | str, ...]]:
    """Return a row for each GPU, node or host and time: numbers of its host and of itself, the time, and its values, empty where not known.

    Numbers alone: a name could be a formula to the program that reads the table.
    """
    columns = [sampled.get(name, ()) for name in metric.samples]
    hosts = {
        host: number
        for number, host in enumerate(dict.fromkeys(number.host for number in columns[0]))
    }
    rows: list[tuple[float | str, ...]] = []
    for same in zip(*columns, strict=True):
        for row in range(min(number.length for number in same)):
            values = [number.series.value(row) for number in same]
            known = [value if math.isfinite(value) else "" for value in values]
            rows.append((hosts[same[0].host], same[0].index, same[0].times[row], *known))
    return rows


def ask_to_export_chart(
    screen: Page, snapshot: Snapshot, metric: Metric, curves: Sequence[Curve]
) -> None:
    """Ask for a name, and export: its ending says what."""
    from so_tui.ui.dialogs.basic import AskText

    def read(text: str) -> Path:
        path = new_path(text)
        if path.suffix not in (PICTURE, TABLE):
            remedy = f"Give a name that ends in {PICTURE} or {TABLE}."
            raise InputError(
                [
                    Problem(
                        code="unknown-format",
                        field="file",
                        value=text,
                        message="says not what to write",
                        remedy=remedy,
                    )
                ]
            )
        return path

    def named(path: Path | None) -> None:
        if path is not None:
            work = partial(_export, screen, snapshot, metric, tuple(curves), path)
            screen.run_worker(
                work, thread=True, group="export", name="export a chart", exit_on_error=False
            )

    stem = f"{snapshot.run.name}-{metric.key}"
    choices = [
        (f"{stem}{PICTURE}", "the chart, of the whole run"),
        (f"{stem}{TABLE}", "its values"),
    ]
    hint = "Up, down or a click choose what. Another name or path can be given; its ending says what is written."
    screen.app.push_screen(
        AskText(
            f"Export {metric.title} to",
            hint,
            choices[0][0],
            yes="Export",
            read=read,
            choices=choices,
        ),
        named,
    )


def _export(
    screen: Page, snapshot: Snapshot, metric: Metric, curves: tuple[Curve, ...], path: Path
) -> None:
    """Export in a thread."""
    app = screen.app
    try:
        said = (
            _write_picture(metric, curves, path)
            if path.suffix == PICTURE
            else plural(_write_table(snapshot, metric, path), "row")
        )
    except SoTuiError as error:
        app.post_message(Failed(f"{metric.title} was not exported", tuple(str(error).splitlines())))
    except OSError as error:
        app.post_message(
            Failed(f"{metric.title} could not be exported", (f"{path}: {error.strerror}",))
        )
    else:
        app.call_from_thread(app.notify, f"Wrote {path}: {said}", markup=False, timeout=WROTE_S)


def _write_picture(metric: Metric, curves: Sequence[Curve], path: Path) -> str:
    per, unit = metric.shown_in
    title = f"{metric.title}, {unit}" if unit else metric.title
    picture = chart_svg(
        title, [curve.line for curve in curves], [curve.name for curve in curves], per
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(picture)
    return plural(len(curves), "line")


def _write_table(snapshot: Snapshot, metric: Metric, path: Path) -> int:
    """Write every record of the run that the metric is about, or the samples as the chart has them. Values have the units of records."""
    run = snapshot.run
    if metric.fields:
        return export_metrics(read_all(run), path, columns=("step", "time", *metric.fields))
    if metric.key == EVALUATIONS:
        rows = [(record.step, record.time, record.loss) for record in read_all(run).evaluations]
        return export_rows(path, ("step", "time", "loss"), rows)
    columns = (
        "host",
        metric.samples[0].partition(".")[0],
        "time",
        *(name.partition(".")[2] for name in metric.samples),
    )
    return export_rows(path, columns, sampled_rows(metric, snapshot.sampled))
