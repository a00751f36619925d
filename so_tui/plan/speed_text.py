"""What a prediction of time rests on, in words."""

from __future__ import annotations

from so_tui.plan.accuracy import StepError
from so_tui.plan.constants import SpeedSource
from so_tui.plan.types import Plan
from so_tui.plan.workload import Workload
from so_tui.units import thousands


def speed_source_text(source: SpeedSource | str, mode: str) -> str:
    """Return what a prediction of time for a mode rests on: rates, data, and a probe where one corrected it. Empty without a prediction."""
    if isinstance(source, str):
        return source
    text = f"{rates_text(source)}; {workload_text(source.workload)}"
    if not source.probed:
        return text
    same_mode = mode in source.probed_modes or not source.probed_modes
    if same_mode and not source.probed_weights:
        return f"{text}; corrected by a probe of this model here"
    probe = (
        "a probe of this model here"
        if same_mode
        else f"a probe of this model here with {' and '.join(source.probed_modes)}"
    )
    if not source.probed_passes:
        return f"{text}; the optimizer corrected by {probe} that waited for weights from host memory, the rest as predicted"
    memory = "" if source.probed_weights == "host" else " and memory"
    fetched = {
        "": "",
        "gpu": " whose GPU had the weights",
        "host": " that fetched weights from host memory",
    }[source.probed_weights]
    own = [
        *(["the optimizer"] if not same_mode else []),
        *{"": [], "gpu": ["fetching"], "host": ["memory"]}[source.probed_weights],
    ]
    passes = "forward, backward" if memory else "forward and backward"
    return (
        f"{text}; {passes}{memory} corrected by {probe}{fetched}, {' and '.join(own)} as predicted"
    )


def error_text(error: StepError) -> str:
    """Return ``±12%``, or ``±15% or more`` where no plan was held to measurements."""
    return f"±{error.share:.0%}" if error.checked else f"±{error.share:.0%} or more"


def error_source_text(error: StepError) -> str:
    """Return what the error of a prediction means."""
    text = f"four of five measured steps were within {error.share:.0%} of their plan"
    return (
        text
        if error.checked
        else f"{text}, on H100 and H200 GPUs of one host; others, and several hosts, were not checked"
    )


def step_text(plan: Plan) -> str:
    """Return ``2.10 s ±12%``; empty without a prediction."""
    if plan.step_s is None:
        return ""
    return (
        f"{plan.step_s:.2f} s {error_text(plan.step_error)}"
        if plan.step_error
        else f"{plan.step_s:.2f} s"
    )


def rates_text(source: SpeedSource) -> str:
    """Return where the rates of the hardware come from."""
    if source.calibrated is None:
        return source.published
    measured = source.calibrated
    where = f"on {measured.host}, a machine like this one" if measured.host else "here"
    text = f"rates calibrated {where} on {measured.date[:10]}"
    return f"{text}, the rest {source.published}" if source.published else text


def workload_text(workload: Workload | None) -> str:
    """Return the data that a prediction is for."""
    if workload is None:
        return "for whole sequences with every token trained, the most that data can cost"
    documents = f"for documents of {thousands(round(workload.attended_tokens))} tokens, {workload.trained_share:.0%} of all trained"
    return f"{documents}, as measured on this data"
