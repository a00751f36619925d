"""What a chart can show: one or several numbers of the step records or of the samples, with their
title, unit and way of writing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from so_tui.folders import state_home
from so_tui.runs.records import GpuSample, StepRecord
from so_tui.spec.check import write_atomic
from so_tui.trust.decoding import read_json
from so_tui.ui.charts.chart import Look, Metric, look_of
from so_tui.ui.charts.series import Line, Named
from so_tui.ui.snapshot import Sampled, sampled_value
from so_tui.ui.widgets import command_key
from so_tui.units import percent, rate, significant, thousands

EVALUATIONS = "evaluation"
"""Key of the metric that has no field of the step records: evaluations are records of their own."""


def whole(value: float) -> str:
    """Return ``1,755``."""
    return thousands(round(value))


def _speed(latest: StepRecord | None, on_gpus: bool, roomy: bool) -> list[str]:
    unit = f"TFLOPS/{'GPU' if on_gpus else 'rank'}"
    if latest is None:
        return [unit]
    mfu = [] if latest.mfu is None else [f"MFU {100 * latest.mfu:.1f} %"]
    return [unit if roomy else "TFLOPS", f"{rate(latest.useful_tokens_per_s_total)} tok/s", *mfu]


STEP_METRICS: tuple[Metric, ...] = (
    Metric(
        "loss",
        "loss",
        "mean cross-entropy of the trained tokens, with evaluations",
        ("loss",),
        smoothing="mean",
        leads=True,
    ),
    Metric(
        "throughput",
        "throughput",
        "model TFLOPS, without recomputation",
        ("model_tflops_per_gpu",),
        zero=True,
        role="gpu",
        narrow_title="speed",
        notes=_speed,
    ),
    Metric(
        "norm",
        "gradient norm",
        "before clipping",
        ("gradient_norm",),
        smoothing="mean",
        notes=lambda latest, on_gpus, roomy: (
            [f"learning rate {significant(latest.learning_rate)}"] if latest else []
        ),
    ),
    Metric(
        "learning-rate",
        "learning rate",
        "of the optimizer step",
        ("learning_rate",),
        smoothing="never",
    ),
    Metric(
        "parts",
        "parts of a step",
        "data, forward, backward and exposed optimizer",
        ("data_s", "forward_s", "backward_s", "exposed_optimizer_s"),
        unit="s",
        zero=True,
        smoothing="never",
        roles=("data", "forward", "backward", "exposed"),
        names=("data", "forward", "backward", "exposed"),
    ),
    Metric(
        "tokens",
        "tokens/s",
        "useful tokens of all GPUs",
        ("useful_tokens_per_s_total",),
        format_value=rate,
        zero=True,
    ),
    Metric(
        "mfu",
        "MFU",
        "share of the GPU's dense bf16 peak",
        ("mfu",),
        format_value=percent,
        zero=True,
        role="gpu",
    ),
    Metric(
        "gpu-memory",
        "GPU memory",
        "largest reserved memory of any GPU so far",
        ("gpu_memory_peak_bytes",),
        in_bytes=True,
        zero=True,
        role="memory",
    ),
    Metric(
        "host-memory",
        "host memory",
        "of the ranks and Adam workers of all hosts",
        ("host_memory_bytes",),
        in_bytes=True,
        zero=True,
        role="memory",
    ),
    Metric(EVALUATIONS, "evaluation loss", "on data that is held out", smoothing="never"),
    Metric("step", "step time", "from the end of the step before", ("step_s",), "s", zero=True),
    Metric("data", "data", "waiting for the next batch", ("data_s",), "s", zero=True, role="data"),
    Metric(
        "forward",
        "forward",
        "of all micro-batches of a step",
        ("forward_s",),
        "s",
        zero=True,
        role="forward",
    ),
    Metric(
        "backward",
        "backward",
        "of all micro-batches of a step",
        ("backward_s",),
        "s",
        zero=True,
        role="backward",
    ),
    Metric(
        "exposed",
        "exposed optimizer",
        "what the GPU waits for Adam",
        ("exposed_optimizer_s",),
        "s",
        zero=True,
        role="exposed",
    ),
    Metric("other", "other time", "the rest of a step", ("other_s",), "s", zero=True),
    Metric(
        "adam",
        "Adam time",
        "how long the Adam worker computed",
        ("adam_busy_s",),
        "s",
        zero=True,
        role="adam",
    ),
    Metric(
        "adam-rate",
        "Adam traffic",
        "host memory traffic while it computes",
        ("adam_bytes_per_s",),
        "GB/s",
        per=1e9,
        zero=True,
        role="adam",
    ),
    Metric(
        "redone",
        "redone steps",
        "clipped and taken again, in this attempt so far",
        ("redone_steps",),
        zero=True,
        smoothing="never",
    ),
    Metric(
        "kept",
        "kept steps",
        "taken before the norm was known, and final",
        ("kept_steps",),
        zero=True,
        smoothing="never",
    ),
    Metric(
        "skipped",
        "skipped steps",
        "not taken, as a gradient was not finite",
        ("skipped_steps",),
        zero=True,
        smoothing="never",
    ),
    Metric("useful", "useful tokens", "of a step, without padding", ("useful_tokens",), zero=True),
    Metric(
        "trained",
        "trained tokens",
        "of a step, those that carry loss",
        ("trained_tokens",),
        zero=True,
    ),
    Metric(
        "hardware",
        "hardware TFLOPS",
        "with recomputation and padding",
        ("hw_tflops_per_gpu",),
        zero=True,
        role="gpu",
    ),
    Metric(
        "example",
        "DeepSpeed TFLOPS",
        "by its example's formula, all GPUs, as published",
        ("seed_tflops_total",),
        zero=True,
        role="gpu",
    ),
    Metric(
        "router", "router loss", "load balance of the experts", ("router_loss",), smoothing="mean"
    ),
    Metric(
        "slowest",
        "slowest rank",
        "the rank that took longest",
        ("slowest_rank",),
        zero=True,
        smoothing="never",
    ),
)
HARDWARE: tuple[Metric, ...] = (
    Metric(
        "gpu-busy",
        "GPU busy",
        "share of the time in which a kernel runs",
        samples=("gpu.busy_percent",),
        unit="%",
        zero=True,
        ceiling=100,
        role="gpu",
    ),
    Metric(
        "gpu-power",
        "GPU power",
        "with the limit that the driver enforces",
        samples=("gpu.power_w",),
        limit="gpu.power_limit_w",
        unit="W",
        zero=True,
        role="gpu",
    ),
    Metric(
        "gpu-clock",
        "GPU clock",
        "▼ marks where power or heat hold it down",
        samples=("gpu.clock_mhz",),
        marked="gpu.throttled",
        unit="MHz",
        format_value=whole,
        role="gpu",
    ),
    Metric(
        "gpu-temperature",
        "GPU temperature",
        "of the die",
        samples=("gpu.temperature_c",),
        unit="°C",
        role="gpu",
    ),
    Metric(
        "gpu-used",
        "GPU memory in use",
        "by any process, as the driver counts",
        samples=("gpu.memory_used_bytes",),
        limit="gpu.memory_total_bytes",
        in_bytes=True,
        zero=True,
        role="memory",
    ),
    Metric(
        "module-power",
        "module power",
        "of the superchip, where CPU and GPU share a limit",
        samples=("gpu.module_power_w",),
        limit="gpu.module_power_limit_w",
        unit="W",
        zero=True,
    ),
    Metric(
        "c2c",
        "NVLink-C2C",
        "traffic between CPU and GPU of a superchip",
        samples=("gpu.c2c_to_gpu_bytes_per_s", "gpu.c2c_to_host_bytes_per_s"),
        names=("to GPU", "to host"),
        unit="GB/s",
        per=1e9,
        zero=True,
    ),
    Metric(
        "pcie",
        "PCIe",
        "traffic between host and GPU",
        samples=("gpu.pcie_to_gpu_bytes_per_s", "gpu.pcie_to_host_bytes_per_s"),
        names=("to GPU", "to host"),
        unit="GB/s",
        per=1e9,
        zero=True,
    ),
    Metric(
        "cores",
        "cores",
        "load of each node's cores",
        samples=("node.busy_percent",),
        unit="%",
        zero=True,
        ceiling=100,
        role="adam",
    ),
    Metric(
        "node-memory",
        "memory of nodes",
        "in use, with the file cache, which gives way",
        samples=("node.memory_used_bytes",),
        limit="node.memory_total_bytes",
        in_bytes=True,
        zero=True,
        role="memory",
    ),
    Metric(
        "file-cache",
        "file cache",
        "memory of nodes that holds files",
        samples=("node.file_cache_bytes",),
        in_bytes=True,
        zero=True,
        role="memory",
    ),
    Metric(
        "foreign",
        "foreign load",
        "cores that other processes keep busy",
        samples=("host.foreign_cores",),
        unit="cores",
        zero=True,
    ),
)
"""What the supervisors sample, in the order in which a machine is looked at."""
METRICS = (*STEP_METRICS, *HARDWARE)
BY_KEY = {metric.key: metric for metric in METRICS}


def hardware_keys(gpus: Iterable[GpuSample]) -> tuple[str, ...]:
    """Return the charts of HARDWARE for which there are figures, given the newest sample of each
    GPU.
    """
    newest = tuple(gpus)
    return tuple(
        metric.key
        for metric in HARDWARE
        if not metric.samples[0].startswith("gpu.")
        or any(sampled_value(metric.samples[0], gpu) is not None for gpu in newest)
    )


PAGE_KEYS = (
    command_key(
        "greater_than_sign", "page(1)", "Next page", "The next charts", display=">", show=False
    ),
    command_key(
        "less_than_sign",
        "page(-1)",
        "Page before",
        "The charts before",
        id="page-before",
        display="<",
        show=False,
    ),
)
"""Keys that turn the pages of charts."""


def samples_of(metrics: tuple[Metric, ...]) -> tuple[str, ...]:
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
Flag = Literal["log", "robust"]


class ChartLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of charts."""

    shown: tuple[str, ...] = ("loss", "throughput", "norm", "learning-rate", "parts", "gpu-memory")
    """Keys of metrics in their order."""
    grid: tuple[int, int] | None = None
    """Rows and columns; None: one row, as wide as the terminal allows."""
    ema: float | None = None
    """Weight of the past in an exponential moving average, 0 to MOST_EMA; None: the mean of the
    last steps.
    """
    log: tuple[str, ...] = ()
    """Metrics with a logarithmic scale."""
    robust: tuple[str, ...] = ()
    """Metrics whose scale leaves outliers out."""

    def toggled(self, flag: Flag, key: str) -> ChartLayout:
        """Return the layout with a kind of scale switched on or off for a metric."""
        keys: tuple[str, ...] = getattr(self, flag)
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


def without_gpus(layout: ChartLayout) -> ChartLayout:
    """Return the layout for a run without GPUs: unless the user chose the metrics, memory of the
    host stands for theirs.
    """
    if layout.shown != ChartLayout().shown:
        return layout
    return msgspec.structs.replace(
        layout, shown=tuple("host-memory" if key == "gpu-memory" else key for key in layout.shown)
    )


@dataclass(frozen=True, slots=True)
class _ChartPage:
    """The charts that are on the screen at once."""

    metrics: tuple[Metric, ...]
    rows: int
    columns: int
    number: int
    pages: int

    def note_in(self, room: int) -> str:
        """Return ``page 1 of 3 ▸``, or ``1/3 ▸`` in a narrow heading; empty where there is one
        page.
        """
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


def page_of(layout: ChartLayout, number: int, width: int) -> _ChartPage:
    """Return one page of charts; numbers beyond the last page begin again with the first."""
    rows, columns = layout.cells(width)
    metrics = tuple(BY_KEY[key] for key in layout.shown)
    pages = max(1, math.ceil(len(metrics) / (rows * columns)))
    number %= pages
    here = metrics[number * rows * columns : (number + 1) * rows * columns]
    columns = min(columns, len(here))
    return _ChartPage(here, math.ceil(len(here) / columns), columns, number, pages)


def wanted_by(page: _ChartPage, ema: float | None) -> Wanted:
    """Return what the charts of a page need; some field in any case."""
    smoothing = ("mean",) if ema is None else () if ema == 0 else ("mean", "wanted")
    drawn = [(field, metric.smoothing) for metric in page.metrics for field in metric.fields]
    fields = dict.fromkeys(field for field, _ in drawn)
    smoothed = dict.fromkeys(field for field, wanted in drawn if wanted in smoothing)
    return Wanted(
        tuple(fields) or ("loss",), tuple(smoothed), ema or None, samples_of(page.metrics)
    )


def _layout_path() -> Path:
    """Return the file that remembers the layout."""
    return state_home() / "charts.json"


def load_layout() -> ChartLayout:
    """Return the remembered layout, without what this version does not know or is out of range."""
    try:
        found = read_json(_layout_path(), ChartLayout)
    except FileNotFoundError:
        return ChartLayout()
    except (OSError, msgspec.DecodeError) as error:
        _log.info("the layout of charts is the default one: %s", error)
        return ChartLayout()
    ema = None
    if found.ema is not None and math.isfinite(found.ema):
        ema = min(MOST_EMA, max(0.0, found.ema))
    shown, log, robust = (
        tuple(filter(BY_KEY.__contains__, keys))
        for keys in (dict.fromkeys(found.shown), found.log, found.robust)
    )
    return ChartLayout(
        shown=shown or ChartLayout().shown,
        grid=found.grid if found.grid in GRIDS else None,
        ema=ema,
        log=log,
        robust=robust,
    )


def save_layout(layout: ChartLayout) -> None:
    """Remember a layout. Raises OSError."""
    path = _layout_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(layout))


# Charts of what was sampled: a line for each GPU, node or host, its limit, and marks of
# throttling.


def sampled_lines(
    metric: Metric,
    sampled: Mapping[str, tuple[Sampled, ...]],
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


def marked_lines(metric: Metric, sampled: Mapping[str, tuple[Sampled, ...]]) -> list[Line]:
    """Return the lines whose values are marked on the axis."""
    return list(sampled.get(metric.marked, ()))
