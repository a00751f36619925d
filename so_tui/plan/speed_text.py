"""What a prediction of time rests on, in words."""

from __future__ import annotations

from so_tui.plan.constants import SpeedSource
from so_tui.plan.workload import Workload
from so_tui.units import thousands


def speed_source_text(source: SpeedSource | str, mode: str) -> str:
    """Return what a prediction of time for a mode rests on: rates, data, and a probe where one corrected it. Empty without a prediction."""
    if isinstance(source, str):
        return source
    text = f"{rates_text(source)}; {workload_text(source.workload)}"
    if not source.probed:
        return text
    if mode in source.probed_modes or not source.probed_modes:
        return f"{text}; corrected by a probe of this model here"
    probe = f"a probe of this model here with {' and '.join(source.probed_modes)}"
    return f"{text}; forward, backward and memory corrected by {probe}, the optimizer as predicted"


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
