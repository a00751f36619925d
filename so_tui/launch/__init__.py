"""From a spec to running processes, and their supervision. Names are imported when they are used, because a command needs few of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from so_tui.launch.attaching import ensure_supervised
    from so_tui.launch.checks import missing_inputs, preflight, writable
    from so_tui.launch.current import current_state
    from so_tui.launch.helpers import ToolError, call_tool, stream_tool
    from so_tui.launch.lifecycle import resume, start, stop
    from so_tui.launch.places import machine_of
    from so_tui.launch.preparation import Launch, launch_of, prepare, prepare_resume, preview
    from so_tui.launch.processes import OwnProcesses
    from so_tui.launch.supervision import supervise

__all__ = [
    "Launch",
    "OwnProcesses",
    "ToolError",
    "call_tool",
    "current_state",
    "ensure_supervised",
    "launch_of",
    "machine_of",
    "missing_inputs",
    "preflight",
    "prepare",
    "prepare_resume",
    "preview",
    "resume",
    "start",
    "stop",
    "stream_tool",
    "supervise",
    "writable",
]

_MODULES = {
    "current": ("current_state",),
    "places": ("machine_of",),
    "helpers": ("ToolError", "call_tool", "stream_tool"),
    "attaching": ("ensure_supervised",),
    "lifecycle": ("resume", "start", "stop"),
    "checks": ("missing_inputs", "preflight", "writable"),
    "preparation": ("Launch", "launch_of", "prepare", "prepare_resume", "preview"),
    "processes": ("OwnProcesses",),
    "supervision": ("supervise",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
