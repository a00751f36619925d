"""What a chart can show: one or several numbers of the step records or of the samples, with their title, unit and way of writing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from so_tui.runs.sample import GpuSample
from so_tui.ui.loads import sampled_value
from so_tui.ui.text import percent, rate, significant
from so_tui.units import memory_unit, thousands

EVALUATIONS = "evaluation"
"""Key of the metric that has no field of the step records: evaluations are records of their own."""


def whole(value: float) -> str:
    """Return ``1,755``."""
    return thousands(round(value))


@dataclass(frozen=True, slots=True)
class Metric:
    """One chart."""

    key: str
    """How the user's layout names it."""
    title: str
    about: str
    fields: tuple[str, ...] = ()
    """Fields of the step records, a line each."""
    unit: str = ""
    format_value: Callable[[float], str] = significant
    per: float = 1.0
    """What values are divided by before they are written."""
    in_bytes: bool = False
    """Whether values are bytes of memory, which are written in the unit of the user's choice instead."""
    zero: bool = False
    ceiling: float | None = None
    smoothing: Literal["mean", "wanted", "never"] = "wanted"
    """Whether a smoothed line is drawn always, where an EMA was chosen, or never."""
    role: str = "main"
    """Colour of the line: what it is a measure of."""
    roles: tuple[str, ...] = ()
    """Colours of several lines."""
    names: tuple[str, ...] = ()
    """Their names."""
    samples: tuple[str, ...] = ()
    """Numbers of the samples instead, a line for each GPU, node or host (``loads.sampled_value``)."""
    limit: str = ""
    """Number of the samples that those above stay below."""
    marked: str = ""
    """Number of the samples whose presence is marked on the axis."""

    @property
    def shown_in(self) -> tuple[float, str]:
        """What values are divided by before they are written, and the unit that they have then."""
        return memory_unit() if self.in_bytes else (self.per, self.unit)


STEP_METRICS: tuple[Metric, ...] = (
    Metric(
        "loss",
        "loss",
        "mean cross-entropy of the trained tokens, with evaluations",
        ("loss",),
        smoothing="mean",
    ),
    Metric(
        "throughput",
        "throughput",
        "model TFLOPS, without recomputation",
        ("model_tflops_per_gpu",),
        zero=True,
        role="gpu",
    ),
    Metric("norm", "gradient norm", "before clipping", ("gradient_norm",), smoothing="mean"),
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


def smoothed_fields(metrics: tuple[Metric, ...], ema: float | None) -> tuple[str, ...]:
    """Return the fields of which a smoothed line is drawn."""
    wanted = ("mean",) if ema is None else () if ema == 0 else ("mean", "wanted")
    return tuple(
        dict.fromkeys(
            field for metric in metrics if metric.smoothing in wanted for field in metric.fields
        )
    )


def hardware_keys(gpus: Iterable[GpuSample]) -> tuple[str, ...]:
    """Return the charts of HARDWARE for which there are figures, given the newest sample of each GPU."""
    newest = tuple(gpus)
    return tuple(
        metric.key
        for metric in HARDWARE
        if not metric.samples[0].startswith("gpu.")
        or any(sampled_value(metric.samples[0], gpu) is not None for gpu in newest)
    )


def fields_of(metrics: tuple[Metric, ...]) -> tuple[str, ...]:
    """Return the fields of the step records that these charts draw; never none."""
    return tuple(dict.fromkeys(field for metric in metrics for field in metric.fields)) or ("loss",)


def samples_of(metrics: tuple[Metric, ...]) -> tuple[str, ...]:
    """Return the numbers of the samples that these charts draw."""
    wanted = (name for metric in metrics for name in (*metric.samples, metric.limit, metric.marked))
    return tuple(dict.fromkeys(name for name in wanted if name))
