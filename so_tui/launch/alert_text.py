"""Sentences of alerts: fixed words, numbers, and names in which nothing acts on a terminal. Reasons and messages of runs are not quoted."""

from __future__ import annotations

from so_tui.runs.records import Alert, RunState
from so_tui.settings.types import ALERTS, AlertName
from so_tui.trust.printable import brief_line
from so_tui.units import disk_size, duration, thousands

LONGEST_NAME = 60
_LARGEST = 1e15


def known(alert: Alert) -> AlertName | None:
    """Return the kind of an alert; None for one that this version does not know, or that a stranger's state made up."""
    return next((name for name in ALERTS if name == alert.kind), None)


def alert_text(alert: Alert, run_name: str, state: RunState) -> str:
    """Return what happened to a run, in one sentence; empty for an unknown kind. It begins with a word, never with a dash."""
    name, step = run_name_text(run_name), thousands(max(0, alert.step))
    match known(alert):
        case "ended":
            return f"so-tui: {name} {'was stopped' if state.state == 'stopped' else 'has finished'} at step {step}"
        case "failed":
            return f"so-tui: {name} {'is lost' if state.state == 'lost' else 'has failed'} at step {step}"
        case "not-finite":
            return f"so-tui: the loss or a gradient of {name} is not finite at step {step}"
        case "stall":
            return f"so-tui: {name} has taken no step for {duration(_bounded(alert.value))}, since step {step}"
        case "loss":
            return f"so-tui: the loss of {name} is {alert.value or 0.0:.4g} at step {step}, above {alert.bound or 0.0:.4g}"
        case "disk":
            left = int(_bounded(alert.value))
            return f"so-tui: {disk_size(left) if left else 'no'} disk space is left for {name}"
        case None:
            return ""


def _bounded(value: float | None) -> float:
    """Return a number whose text is short: anybody may have written the state."""
    return min(max(value or 0.0, 0.0), _LARGEST)


def run_name_text(name: str) -> str:
    """Return a run's name for places that act on control characters: a title, a notification, an environment."""
    return brief_line(name, LONGEST_NAME).replace(
        ";", ","
    )  # a semicolon separates the fields of OSC 777
