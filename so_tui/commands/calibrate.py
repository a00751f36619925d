"""``calibrate``: measure and store the rates that predictions of this machine's speed use."""

from __future__ import annotations

import argparse
import os
from typing import Any

import msgspec
from msgspec import Struct

from so_tui.commands.common import note, print_json, print_rich
from so_tui.machine.types import Machine
from so_tui.plan.calibration import Calibration, Rates, calibration_of, store


class Measured(Struct, frozen=True):
    """What ``calibrate --json`` prints."""

    path: str
    calibration: Calibration | None


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine in helper processes and store the rates, which plans use from then on.

    Raises:
        Refused: A run uses a GPU (code ``gpu-in-use``).
    """
    from so_tui.launch import locks
    from so_tui.launch.helpers import stream_tool
    from so_tui.launch.preparation import visible_machine
    from so_tui.machine import inspect_machine
    from so_tui.spec import Refusal, Refused

    machine = inspect_machine()
    answer: dict[str, Any] = {}
    try:
        mine = visible_machine(machine, os.environ)
        held = locks.take_gpus(locks.lock_folder(), mine.gpus, locks.Holder(run="calibrate", pid=os.getpid()))
    except locks.LockTakenError as error:
        busy = f"{error}. A run and a calibration would disturb each other; wait until the run has ended"
        raise Refused([Refusal("gpu-in-use", busy)]) from error
    try:
        for answer in stream_tool("calibrate", request_of(mine)):
            if message := answer.get("message"):
                note(arguments, message, stderr=arguments.json)
    finally:
        for lock in held:
            lock.release()
    path = store(machine, rates=msgspec.convert(answer["rates"], Rates))
    if arguments.json:
        print_json(Measured(str(path), calibration_of(machine)))
    else:
        print_rich(f"measured in {answer['rates']['seconds']:.0f} s and stored in {path}; plans of this machine use it")
        if not machine.gpus:
            note(arguments, "This machine has no GPU, so only Adam's rate was measured. Steps on machines without GPUs are not predicted.")
    return 0


def request_of(machine: Machine) -> dict[str, Any]:
    """Return the helper's request: the usable cores of each NUMA node, and each GPU with its node's cores and its rank's.

    The hardware threads of a core are adjacent, as in the cores that ranks and their Adam workers get, so that the first n represent n
    cores of a rank.
    """
    from so_tui.plan.binding import by_core

    allowed = set(machine.allowed_cpus)
    nodes = [{"id": node.id, "cpus": [*by_core(machine, [cpu for cpu in node.cpus if cpu in allowed])]} for node in machine.cpu_nodes]
    nodes = [node for node in nodes if node["cpus"]]
    home = machine.gpus[0].numa_node if machine.gpus else None
    nodes.sort(key=lambda node: node["id"] != home)  # the curve over core counts is measured on the node of the first GPU
    shares = _cores_of_ranks(machine)
    gpus = []
    for gpu in machine.gpus:
        near = [cpu for cpu in gpu.cpus if cpu in allowed]
        gpus.append({"index": gpu.index, "cpus": near, "rank_cpus": shares.get(gpu.index, near)})
    return {"nodes": nodes, "gpus": gpus}


def _cores_of_ranks(machine: Machine) -> dict[int | None, list[int]]:
    """Return the cores of each GPU's rank when all GPUs train; empty if they cannot, which must not prevent the measurement."""
    from so_tui.plan.binding import bind_ranks
    from so_tui.spec import InputError

    if not machine.gpus:
        return {}
    try:
        ranks = bind_ranks(machine, tuple(gpu.index for gpu in machine.gpus), mode="gpu", cpu_adam_cores_fraction=0.0)
    except InputError:
        return {}
    return {rank.gpu: list(rank.cpus) for rank in ranks}
