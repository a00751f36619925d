"""Measuring a machine's rates in helper processes, for ``calibrate`` and ``validate``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from so_tui.launch import locks
from so_tui.launch.helpers import stream_tool
from so_tui.launch.preparation import visible_machine
from so_tui.machine.types import Machine
from so_tui.plan.binding import bind_ranks, by_core
from so_tui.plan.calibration import Rates, store
from so_tui.spec import InputError, Refusal, Refused


def measure_rates(
    machine: Machine, tell: Callable[[str], None], *, timeout_s: float | None = None
) -> tuple[Rates, Path]:
    """Measure this machine and store its rates, which plans use from then on.

    Args:
        machine: This machine.
        tell: Receives what was measured, in words.
        timeout_s: How long it may take.

    Returns:
        The rates, and the file that has them now.

    Raises:
        Refused: A run uses a GPU (code ``gpu-in-use``).
        ToolError: A measurement failed, or took too long.
    """
    mine = visible_machine(machine, os.environ)
    answer: dict[str, Any] = {}
    with gpus_taken(mine, "calibrate"):
        for answer in stream_tool("calibrate", request_of(mine), timeout_s=timeout_s):
            if message := answer.get("message"):
                tell(message)
    rates = msgspec.convert(answer["rates"], Rates)
    return rates, store(machine, rates=rates)


@contextmanager
def gpus_taken(machine: Machine, by: str) -> Iterator[None]:
    """Hold a machine's GPUs, so that no run begins beside a measurement. Raises Refused (``gpu-in-use``)."""
    try:
        held = locks.take_gpus(
            locks.lock_folder(), machine.gpus, locks.Holder(run=by, pid=os.getpid())
        )
    except locks.LockTakenError as error:
        busy = f"{error}. A run and a calibration would disturb each other; wait until the run has ended"
        raise Refused([Refusal("gpu-in-use", busy)]) from error
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def request_of(machine: Machine) -> dict[str, Any]:
    """Return the helper's request: the usable cores of each NUMA node, and each GPU with its node's cores and its rank's.

    The hardware threads of a core are adjacent, as in the cores that ranks and their Adam workers get, so that the first n represent n
    cores of a rank.
    """
    allowed = set(machine.allowed_cpus)
    nodes = [
        {"id": node.id, "cpus": [*by_core(machine, [cpu for cpu in node.cpus if cpu in allowed])]}
        for node in machine.cpu_nodes
    ]
    nodes = [node for node in nodes if node["cpus"]]
    home = machine.gpus[0].numa_node if machine.gpus else None
    nodes.sort(
        key=lambda node: node["id"] != home
    )  # the curve over core counts is measured on the node of the first GPU
    shares = _cores_of_ranks(machine)
    gpus = []
    for gpu in machine.gpus:
        near = [cpu for cpu in gpu.cpus if cpu in allowed]
        gpus.append({"index": gpu.index, "cpus": near, "rank_cpus": shares.get(gpu.index, near)})
    return {"nodes": nodes, "gpus": gpus}


def _cores_of_ranks(machine: Machine) -> dict[int | None, list[int]]:
    """Return the cores of each GPU's rank when all GPUs train; empty if they cannot, which must not prevent the measurement."""
    if not machine.gpus:
        return {}
    try:
        ranks = bind_ranks(
            machine,
            tuple(gpu.index for gpu in machine.gpus),
            mode="gpu",
            cpu_adam_cores_fraction=0.0,
        )
    except InputError:
        return {}
    return {rank.gpu: list(rank.cpus) for rank in ranks}
