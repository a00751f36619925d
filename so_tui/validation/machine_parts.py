"""Parts of a validation that measure the machine itself: what it has, its rates, and copies between its GPUs and memories."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from so_tui.launch.calibrating import gpus_taken, measure_rates, request_of
from so_tui.launch.helpers import stream_tool
from so_tui.launch.preparation import visible_machine
from so_tui.machine.doctor import findings
from so_tui.machine.types import Machine
from so_tui.validation.report import CopiesFound, CopyRates, Found, MachineFound, RatesFound, machine_found
from so_tui.validation.runner import Measurement

_COPY_S = 6.0
"""About how long one pair of GPU and node takes, the start of its process included."""


def measurements(machine: Machine, folder: Path) -> list[Measurement]:
    """Return the machine's parts of a report that is written to ``folder``."""
    parts = [
        Measurement("machine", "the machine, and what is wrong with it", 5.0, lambda _: _machine(machine, folder)),
        Measurement("rates", "rates of Adam, products and copies", 60.0 if machine.gpus else 30.0, lambda tell: _rates(machine, tell)),
    ]
    if machine.gpus:
        pairs = len(machine.gpus) * len(machine.cpu_nodes) + (len(machine.gpus) > 1)
        title = "copies between every GPU and every NUMA node"
        parts.append(Measurement("copies", title, _COPY_S * pairs, lambda tell: copies(machine, tell)))
    return parts


def _machine(machine: Machine, folder: Path) -> MachineFound:
    found = findings(machine, None, checkpoints=folder)
    return machine_found(machine, tuple(Found(code=one.code, severity=one.severity, title=one.title) for one in found))


def _rates(machine: Machine, tell: Callable[[str], None]) -> RatesFound:
    return RatesFound(rates=measure_rates(machine, tell)[0])


def copies(machine: Machine, tell: Callable[[str], None], **more: Any) -> CopiesFound:
    """Measure copies.

    Args:
        machine: This machine.
        tell: Receives what was measured, in words.
        more: Additions to the helper's request.

    Raises:
        Refused: A run uses a GPU (code ``gpu-in-use``).
        ToolError: A measurement failed.
    """
    mine = visible_machine(machine, os.environ)
    gpus = [{"index": gpu.index, "node": gpu.numa_node} for gpu in mine.gpus]
    answer: dict[str, Any] = {}
    with gpus_taken(mine, "validate"):
        for answer in stream_tool("copies", {"nodes": request_of(mine)["nodes"], "gpus": gpus} | more):
            if message := answer.get("message"):
                tell(message)
    return CopiesFound(copies=msgspec.convert(answer["copies"], tuple[CopyRates, ...]))
