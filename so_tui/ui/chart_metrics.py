"""What a chart of the dashboard can show: one or several numbers of the step records, with their title, unit and way of writing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from so_tui.ui.text import GIB, rate, significant

EVALUATIONS = "evaluation"
"""Key of the metric that has no field of the step records: evaluations are records of their own."""


def percent(share: float) -> str:
    """Return ``43.6 %``."""
    return f"{100 * share:.3g} %"


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
    zero: bool = False
    smoothing: Literal["mean", "wanted", "never"] = "wanted"
    """Whether a smoothed line is drawn always, where an EMA was chosen, or never."""
    roles: tuple[str, ...] = ()
    """Colours of several lines."""
    names: tuple[str, ...] = ()
    """Their names."""


METRICS: tuple[Metric, ...] = (
    Metric("loss", "loss", "mean cross-entropy of the trained tokens, with evaluations", ("loss",), smoothing="mean"),
    Metric("throughput", "throughput", "model TFLOPS, without recomputation", ("model_tflops_per_gpu",), zero=True),
    Metric("norm", "gradient norm", "before clipping", ("gradient_norm",), smoothing="mean"),
    Metric("learning-rate", "learning rate", "of the optimizer step", ("learning_rate",), smoothing="never"),
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
    Metric("tokens", "tokens/s", "useful tokens of all GPUs", ("useful_tokens_per_s_total",), format_value=rate, zero=True),
    Metric("mfu", "MFU", "share of the GPU's dense bf16 peak", ("mfu",), format_value=percent, zero=True),
    Metric("gpu-memory", "GPU memory", "largest reserved memory of any GPU so far", ("gpu_memory_peak_bytes",), "GiB", per=GIB, zero=True),
    Metric("host-memory", "host memory", "of the run's processes on rank 0's host", ("host_memory_bytes",), "GiB", per=GIB, zero=True),
    Metric(EVALUATIONS, "evaluation loss", "on data that is held out", smoothing="never"),
    Metric("step", "step time", "from the end of the step before", ("step_s",), "s", zero=True),
    Metric("data", "data", "waiting for the next batch", ("data_s",), "s", zero=True),
    Metric("forward", "forward", "of all micro-batches of a step", ("forward_s",), "s", zero=True),
    Metric("backward", "backward", "of all micro-batches of a step", ("backward_s",), "s", zero=True),
    Metric("exposed", "exposed optimizer", "what the GPU waits for Adam", ("exposed_optimizer_s",), "s", zero=True),
    Metric("other", "other time", "the rest of a step", ("other_s",), "s", zero=True),
    Metric("adam", "Adam time", "how long the Adam worker computed", ("adam_busy_s",), "s", zero=True),
    Metric("adam-rate", "Adam traffic", "host memory traffic while it computes", ("adam_bytes_per_s",), "GB/s", per=1e9, zero=True),
    Metric("redone", "redone steps", "clipped and taken again, in this attempt so far", ("redone_steps",), zero=True, smoothing="never"),
    Metric("kept", "kept steps", "taken before the norm was known, and final", ("kept_steps",), zero=True, smoothing="never"),
    Metric("skipped", "skipped steps", "not taken, as a gradient was not finite", ("skipped_steps",), zero=True, smoothing="never"),
    Metric("useful", "useful tokens", "of a step, without padding", ("useful_tokens",), zero=True),
    Metric("trained", "trained tokens", "of a step, those that carry loss", ("trained_tokens",), zero=True),
    Metric("hardware", "hardware TFLOPS", "with recomputation and padding", ("hw_tflops_per_gpu",), zero=True),
    Metric("router", "router loss", "load balance of the experts", ("router_loss",), smoothing="mean"),
    Metric("slowest", "slowest rank", "the rank that took longest", ("slowest_rank",), zero=True, smoothing="never"),
)
BY_KEY = {metric.key: metric for metric in METRICS}


def smoothed_fields(metrics: tuple[Metric, ...], ema: float | None) -> tuple[str, ...]:
    """Return the fields of which a smoothed line is drawn."""
    wanted = ("mean",) if ema is None else () if ema == 0 else ("mean", "wanted")
    return tuple(dict.fromkeys(field for metric in metrics if metric.smoothing in wanted for field in metric.fields))


def fields_of(metrics: tuple[Metric, ...]) -> tuple[str, ...]:
    """Return the fields of the step records that these charts draw; never none."""
    return tuple(dict.fromkeys(field for metric in metrics for field in metric.fields)) or ("loss",)
