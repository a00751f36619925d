"""How a user wants the dashboard's charts, remembered from one start to the next. Everything else a user sets is in ``so_tui.settings``."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from so_tui.folders import state_home
from so_tui.runs.blocks import EMA_WEIGHTS
from so_tui.spec.files import write_atomic
from so_tui.trust.decoding import read_json
from so_tui.ui.chart_metrics import BY_KEY, Metric, fields_of, samples_of, smoothed_fields

_log = logging.getLogger(__name__)

GRIDS = ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3))
"""Rows and columns of charts."""
EMAS = (0.0, *EMA_WEIGHTS)
"""Weights that a key goes through; others are typed."""
MOST_EMA = 0.99
ROOMY = 52
"""Cells of a chart's heading from which on it has room for whole words."""
WIDE = 160
"""Columns of a terminal from which on three charts stand beside each other, unless another grid was chosen."""
Flag = Literal["log", "robust"]


class ChartLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of charts."""

    shown: tuple[str, ...] = ("loss", "throughput", "norm", "learning-rate", "parts", "gpu-memory")
    """Keys of metrics in their order."""
    grid: tuple[int, int] | None = None
    """Rows and columns; None: one row, as wide as the terminal allows."""
    ema: float | None = None
    """Weight of the past in an exponential moving average, 0 to MOST_EMA; None: the mean of the last steps."""
    log: tuple[str, ...] = ()
    """Metrics with a logarithmic scale."""
    robust: tuple[str, ...] = ()
    """Metrics whose scale leaves outliers out."""

    def flagged(self, flag: Flag, key: str) -> bool:
        """Return whether a metric has a kind of scale."""
        return key in (self.log if flag == "log" else self.robust)

    def toggled(self, flag: Flag, key: str) -> ChartLayout:
        """Return the layout with a kind of scale switched on or off for a metric."""
        keys = self.log if flag == "log" else self.robust
        changed = tuple(other for other in keys if other != key) if key in keys else (*keys, key)
        return (
            msgspec.structs.replace(self, log=changed)
            if flag == "log"
            else msgspec.structs.replace(self, robust=changed)
        )

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


def without_gpus(layout: ChartLayout) -> ChartLayout:
    """Return the layout for a run without GPUs: unless the user chose the metrics, memory of the host stands for theirs."""
    if layout.shown != ChartLayout().shown:
        return layout
    return msgspec.structs.replace(
        layout, shown=tuple("host-memory" if key == "gpu-memory" else key for key in layout.shown)
    )


@dataclass(frozen=True, slots=True)
class ChartPage:
    """The charts that are on the screen at once."""

    metrics: tuple[Metric, ...]
    rows: int
    columns: int
    number: int
    pages: int

    def note_in(self, room: int) -> str:
        """Return ``page 1 of 3 ▸``, or ``1/3 ▸`` in a narrow heading; empty where there is one page."""
        if self.pages == 1:
            return ""
        return (
            f"page {self.number + 1} of {self.pages} ▸"
            if room >= ROOMY
            else f"{self.number + 1}/{self.pages} ▸"
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What charts need to know of the steps and samples."""

    fields: tuple[str, ...]
    smoothed: tuple[str, ...]
    ema: float | None
    samples: tuple[str, ...] = ()


def page_of(layout: ChartLayout, number: int, width: int) -> ChartPage:
    """Return one page of charts; numbers beyond the last page begin again with the first."""
    rows, columns = layout.cells(width)
    metrics = tuple(BY_KEY[key] for key in layout.shown)
    pages = max(1, math.ceil(len(metrics) / (rows * columns)))
    number %= pages
    here = metrics[number * rows * columns : (number + 1) * rows * columns]
    columns = min(columns, len(here))
    return ChartPage(here, math.ceil(len(here) / columns), columns, number, pages)


def wanted_by(page: ChartPage, ema: float | None) -> Wanted:
    """Return what the charts of a page need."""
    return Wanted(
        fields_of(page.metrics),
        smoothed_fields(page.metrics, ema),
        ema or None,
        samples_of(page.metrics),
    )


def layout_path() -> Path:
    """Return the file that remembers the layout."""
    return state_home() / "charts.json"


def load_layout() -> ChartLayout:
    """Return the remembered layout, without what this version does not know."""
    try:
        found = read_json(layout_path(), ChartLayout)
    except FileNotFoundError:
        return ChartLayout()
    except (OSError, msgspec.DecodeError) as error:
        _log.info("the layout of charts is the default one: %s", error)
        return ChartLayout()
    return checked(found)


def checked(found: ChartLayout) -> ChartLayout:
    """Return a layout with what is unknown or out of range left out."""
    shown = tuple(dict.fromkeys(key for key in found.shown if key in BY_KEY)) or ChartLayout().shown
    ema = (
        None
        if found.ema is None or not math.isfinite(found.ema)
        else min(MOST_EMA, max(0.0, found.ema))
    )
    return ChartLayout(
        shown=shown,
        grid=found.grid if found.grid in GRIDS else None,
        ema=ema,
        log=tuple(key for key in found.log if key in BY_KEY),
        robust=tuple(key for key in found.robust if key in BY_KEY),
    )


def save_layout(layout: ChartLayout) -> None:
    """Remember a layout. Raises OSError."""
    path = layout_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(layout))
