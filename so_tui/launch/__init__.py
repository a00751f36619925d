"""From a spec to running processes, and their supervision. Names are imported when they are used, because a command needs few of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from so_tui.launch.checks import missing_inputs, preflight, writable
    from so_tui.launch.executors import ensure_supervised
    from so_tui.launch.helper import ToolError, call_tool, stream_tool
    from so_tui.launch.launch import Launch, launch_of, prepare, prepare_resume, preview
    from so_tui.launch.lifecycle import current_state, resume, start, stop
    from so_tui.launch.places import machine_of
    from so_tui.launch.supervisor.processes import OwnProcesses
    from so_tui.launch.supervisor.run import supervise


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
    "lifecycle": (
        "current_state",
        "resume",
        "start",
        "stop",
    ),
    "places": ("machine_of",),
    "helper": (
        "ToolError",
        "call_tool",
        "stream_tool",
    ),
    "executors": ("ensure_supervised",),
    "checks": (
        "missing_inputs",
        "preflight",
        "writable",
    ),
    "launch": (
        "Launch",
        "launch_of",
        "prepare",
        "prepare_resume",
        "preview",
    ),
    "supervisor.processes": ("OwnProcesses",),
    "supervisor.run": ("supervise",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


# Time limits for ending a run, in a module without imports so that the command line's parser stays
# fast.


DEFAULT_GRACE_S = 600.0
"""How long a stop may take: the step in progress, then a checkpoint of up to hundreds of GB."""
EXIT_GRACE_S = 60.0
"""From the trainer's end record until its processes must be gone: the kernel needs time to free hundreds of GB of pinned memory."""
KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL. DeepSpeed's launcher by itself would wait up to 30 s for each rank."""
