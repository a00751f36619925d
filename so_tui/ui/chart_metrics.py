"""What a chart can show: one or several numbers of the step records or of the samples, with their
title, unit and way of writing (``chart_metrics.toml``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from so_tui.folders import state_home
from so_tui.runs.records import StepRecord
from so_tui.spec.check import write_atomic
from so_tui.trust.decoding import read_json
from so_tui.trust.folders import make_folders
from so_tui.ui.charts.chart import Look, Metric, look_of
from so_tui.ui.charts.series import Named, Wanted
from so_tui.ui.snapshot import GpuView, SampledLines, sampled_value
from so_tui.units import percent, rate, significant, thousands

EVALUATIONS = "evaluation"
"""Key of the metric that has no field of the step records: evaluations are records of their own."""


def _speed(latest: StepRecord | None, on_gpus: bool, roomy: bool) -> list[str]:
    unit = f"TFLOPS/{'GPU' if on_gpus else 'rank'}"
    if latest is None:
        return [unit]
    mfu = [] if latest.mfu is None else [f"MFU {100 * latest.mfu:.1f} %"]
    return [unit if roomy else "TFLOPS", f"{rate(latest.useful_tokens_per_s_total)} tok/s", *mfu]


def _learning_rate(latest: StepRecord | None, on_gpus: bool, roomy: bool) -> list[str]:
    return [f"learning rate {significant(latest.learning_rate)}"] if latest else []


_Names = tuple[str, ...]
_CODE: dict[str, dict[str, Any]] = {
    "throughput": {"notes": _speed},
    "norm": {"notes": _learning_rate},
    "tokens": {"format_value": rate},
    "mfu": {"format_value": percent},
    "gpu-clock": {"format_value": lambda value: thousands(round(value))},
}
"""Fields of metrics that TOML cannot hold, such as functions."""
_ROWS: Mapping[str, Mapping[str, Any]] = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(),
    type=dict[str, dict[str, bool | float | str | _Names]],
)
METRICS = tuple(Metric(key, **row, **_CODE.get(key, {})) for key, row in _ROWS.items())
STEP_METRICS = tuple(metric for metric in METRICS if not metric.samples)
HARDWARE = tuple(metric for metric in METRICS if metric.samples)
"""What the supervisors sample, in the order in which a machine is looked at."""
BY_KEY = {metric.key: metric for metric in METRICS}


def hardware_keys(gpus: Sequence[GpuView]) -> _Names:
    """Return the charts of HARDWARE for which there are figures of these GPUs, or of nodes."""
    return tuple(
        metric.key
        for metric in HARDWARE
        if not metric.samples[0].startswith("gpu.")
        or any(sampled_value(metric.samples[0], gpu.sample) is not None for gpu in gpus)
    )


def samples_of(metrics: tuple[Metric, ...]) -> _Names:
    """Return the numbers of the samples that these charts draw."""
    wanted = (name for metric in metrics for name in (*metric.samples, metric.limit, metric.marked))
    return tuple(dict.fromkeys(name for name in wanted if name))


# How a user wants the dashboard's charts, remembered from one start to the next. Everything else a
# user sets is in ``so_tui.settings``.


_log = logging.getLogger(__name__)

GRIDS = ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3))
"""Rows and columns of charts."""
EMAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Weights that a key goes through; others are typed."""
MOST_EMA = 0.99
ROOMY = 52
"""Cells of a chart's heading from which on it has room for whole words."""
WIDE = 160
"""Columns of a terminal from which on three charts stand beside each other, unless another grid was
chosen.
"""
Ema = Annotated[float, msgspec.Meta(ge=0, le=MOST_EMA)] | None
Flag = Literal["log", "robust"]
_Side = Annotated[int, msgspec.Meta(ge=1, le=3)]


class ChartLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of charts."""

    shown: _Names = ("loss", "throughput", "norm", "learning-rate", "parts", "gpu-memory")
    """Keys of metrics in their order."""
    grid: tuple[_Side, _Side] | None = None
    """Rows and columns; None: one row, as wide as the terminal allows."""
    ema: Ema = None
    """Weight of the past in an exponential moving average; None: the mean of the last steps."""
    log: _Names = ()
    """Metrics with a logarithmic scale."""
    robust: _Names = ()
    """Metrics whose scale leaves outliers out."""

    def toggled(self, flag: Flag, key: str) -> ChartLayout:
        """Return the layout with a kind of scale switched on or off for a metric."""
        keys: _Names = getattr(self, flag)
        changed = tuple(other for other in keys if other != key) if key in keys else (*keys, key)
        return msgspec.structs.replace(self, **{flag: changed})

    def smoother(self, direction: int) -> ChartLayout:
        """Return the layout with the next smoothing: the mean, then weights from 0 upwards."""
        choices = (None, *EMAS)
        at = 0 if self.ema is None else 1 + sum(weight < self.ema for weight in EMAS)
        if (
            self.ema not in choices and direction > 0
        ):  # a typed weight stands before the next larger one
            at -= 1
        return msgspec.structs.replace(self, ema=choices[(at + direction) % len(choices)])

    def next_grid(self, width: int) -> ChartLayout:
        """Return the layout with the next grid."""
        at = GRIDS.index(self.cells(width))
        return msgspec.structs.replace(self, grid=GRIDS[(at + 1) % len(GRIDS)])

    def cells(self, width: int) -> tuple[int, int]:
        """Return rows and columns of charts in a terminal of ``width`` columns."""
        return self.grid or (1, 3 if width >= WIDE else 2)

    def without_gpus(self) -> ChartLayout:
        """Return the layout for a run without GPUs: unless the user chose the metrics, memory of
        the host stands for theirs.
        """
        if self.shown != ChartLayout().shown:
            return self
        return msgspec.structs.replace(
            self, shown=tuple("host-memory" if key == "gpu-memory" else key for key in self.shown)
        )

    def page(self, number: int, width: int) -> _ChartPage:
        """Return one page of charts; numbers beyond the last page begin again with the first."""
        rows, columns = self.cells(width)
        metrics = tuple(BY_KEY[key] for key in self.shown)
        pages = max(1, math.ceil(len(metrics) / (rows * columns)))
        number %= pages
        here = metrics[number * rows * columns : (number + 1) * rows * columns]
        columns = min(columns, len(here))
        return _ChartPage(here, math.ceil(len(here) / columns), columns, number, pages)


@dataclass(frozen=True, slots=True)
class _ChartPage:
    """The charts that are on the screen at once."""

    metrics: tuple[Metric, ...]
    rows: int
    columns: int
    number: int
    pages: int

    @property
    def note(self) -> str:
        """``1/3 ▸``; empty where there is one page."""
        return f"{self.number + 1}/{self.pages} ▸" if self.pages > 1 else ""

    def wanted(self, ema: float | None) -> Wanted:
        """Return what the charts of this page need; some field in any case."""
        smoothing = ("mean",) if ema is None else () if ema == 0 else ("mean", "wanted")
        drawn = [(field, metric.smoothing) for metric in self.metrics for field in metric.fields]
        fields = dict.fromkeys(field for field, _ in drawn)
        smoothed = dict.fromkeys(field for field, wanted in drawn if wanted in smoothing)
        return Wanted(
            tuple(fields) or ("loss",), tuple(smoothed), ema or None, samples_of(self.metrics)
        )


def _layout_path() -> Path:
    """Return the file that remembers the layout."""
    return state_home() / "charts.json"


def load_layout() -> ChartLayout:
    """Return the remembered layout, without metrics that this version does not know."""
    try:
        found = read_json(_layout_path(), ChartLayout)
    except (OSError, msgspec.DecodeError) as error:
        _log.info("the layout of charts is the default one: %s", error)
        return ChartLayout()
    shown = tuple(filter(BY_KEY.__contains__, dict.fromkeys(found.shown)))
    return msgspec.structs.replace(found, shown=shown or ChartLayout().shown)


def save_layout(layout: ChartLayout) -> None:
    """Remember a layout. Raises OSError."""
    path = _layout_path()
    make_folders(path.parent)
    write_atomic(path, msgspec.json.encode(layout))


# Charts of what was sampled: a line for each GPU, node or host, and its limit.


def sampled_lines(
    metric: Metric,
    sampled: SampledLines,
    *,
    alone: bool = True,
    whole: bool = False,
    coloured: bool = True,
) -> list[Named]:
    """Return the lines of a metric with their names in the heading; limits first, so that values
    are drawn over them.

    Several GPUs, nodes or hosts have a colour each, unless other runs are laid over them, whose
    colours these are; a sign where colours would be used again, or nothing is ``coloured``. In a
    heading, those after the first are numbers alone; with ``whole`` every name says everything.
    """
    pairs: list[Named] = [
        (replace(limit, role="limit"), "limit" if whole or not at else "")
        for at, limit in enumerate(sampled.get(metric.limit, ()))
    ]
    several = len({line.host for name in metric.samples for line in sampled.get(name, ())}) > 1
    drawn = 0
    for number, name in enumerate(metric.samples):
        lines = sampled.get(name, ())
        called = metric.names[number] if metric.names else ""
        role = "second" if number else metric.role
        if len(lines) == 1:
            pairs.append((replace(lines[0], role=role), called or "."))
            continue
        kind = name.partition(".")[0].replace("gpu", "GPU")
        for at, line in enumerate(lines):
            place = f"{line.host} {line.index}" if several else str(line.index)
            word = (
                place
                if at and not whole
                else f"{called}{':' if called else ''} {kind} {place}".strip()
            )
            look = look_of(drawn, coloured=coloured) if alone else Look(role, "")
            pairs.append((replace(line, role=look.role, sign=look.sign), word))
            drawn += 1
    return pairs
