"""Parts of a validation that measure the machine itself: what it has, its rates, and copies between its GPUs and memories."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from so_tui.launch.calibrating import gpus_taken, measure_rates, request_of
from so_tui.launch.helpers import stream_tool
from so_tui.launch.preparation import usable_machine, visible_machine
from so_tui.machine.doctor import Finding, findings
from so_tui.machine.types import Machine
from so_tui.spec.errors import SoTuiError
from so_tui.validation.report import (
    CopiesFound,
    CopyRates,
    Found,
    MachineFound,
    RatesFound,
    machine_found,
)
from so_tui.validation.runner import Measurement

_COPY_S = 6.0
"""About how long one pair of GPU and node takes, the start of its process included."""


def measurements(machine: Machine, folder: Path) -> list[Measurement]:
    """Return the machine's parts of a report that is written to ``folder``."""
    gpus = usable_machine(machine, os.environ).gpus
    parts = [
        Measurement(
            "machine",
            "the machine, and what is wrong with it",
            5.0,
            partial(_machine, machine, folder),
        ),
        Measurement(
            "rates",
            "rates of Adam, products and copies",
            60.0 if gpus else 30.0,
            partial(_rates, machine),
        ),
    ]
    if gpus:
        pairs = len(gpus) * len(machine.cpu_nodes) + (len(gpus) > 1)
        title = "copies between every GPU and every NUMA node"
        parts.append(Measurement("copies", title, _COPY_S * pairs, partial(copies, machine)))
    return parts


def _machine(
    machine: Machine, folder: Path, _tell: Callable[[str], None], limit_s: float
) -> MachineFound:
    """Look in a thread, which is left behind if a file system or a driver never answers."""
    answer: Future[Sequence[Finding]] = Future()

    def look() -> None:
        try:
            answer.set_result(findings(machine, None, checkpoints=folder))
        except Exception as error:  # noqa: BLE001 - raised where the answer is asked for
            answer.set_exception(error)

    threading.Thread(target=look, name="doctor", daemon=True).start()
    try:
        found = answer.result(limit_s)
    except FutureTimeout as error:
        raise SoTuiError(f"`so-tui doctor` did not end within {limit_s:,.0f} s") from error
    return machine_found(
        machine,
        tuple(Found(code=one.code, severity=one.severity, title=one.title) for one in found),
    )


def _rates(machine: Machine, tell: Callable[[str], None], limit_s: float) -> RatesFound:
    return RatesFound(rates=measure_rates(machine, tell, timeout_s=limit_s)[0])


def copies(
    machine: Machine, tell: Callable[[str], None], limit_s: float, **more: Any
) -> CopiesFound:
    """Measure copies.

    Args:
        machine: This machine.
        tell: Receives what was measured, in words.
        limit_s: How long it may take.
        more: Additions to the helper's request.

    Raises:
        Refused: A run uses a GPU (code ``gpu-in-use``).
        ToolError: A measurement failed, or took too long.
    """
    mine = visible_machine(machine, os.environ)
    gpus = [{"index": gpu.index, "node": gpu.numa_node} for gpu in mine.gpus]
    answer: dict[str, Any] = {}
    with gpus_taken(mine, "validate"):
        for answer in stream_tool(
            "copies", {"nodes": request_of(mine)["nodes"], "gpus": gpus} | more, timeout_s=limit_s
        ):
            if message := answer.get("message"):
                tell(message)
    return CopiesFound(copies=msgspec.convert(answer["copies"], tuple[CopyRates, ...]))
