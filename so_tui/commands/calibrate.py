"""``calibrate``: measure what this machine's speed predictions rest on, and keep it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from so_tui.commands.common import print_json, print_rich
from so_tui.machine.types import Machine


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine in helper processes and store the figures, which plans use from now on. Refused while a run has a GPU."""
    import msgspec

    from so_tui.launch import locks
    from so_tui.launch.helpers import stream_tool
    from so_tui.launch.preparation import visible_machine
    from so_tui.machine import inspect_machine
    from so_tui.plan.calibration import Rates, calibration_of, store
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
                print(message, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    finally:
        for lock in held:
            lock.release()
    path = store(machine, rates=msgspec.convert(answer["rates"], Rates))
    known = calibration_of(machine)
    if arguments.json:
        print_json({"path": str(path), "calibration": msgspec.to_builtins(known)})
    else:
        print_rich(f"measured in {answer['rates']['seconds']:.0f} s; plans of this machine use it: {path}")
        if not machine.gpus:
            print_rich("no GPU here: steps of a machine without GPUs are not predicted, only Adam's rate is known now")
    return 0


def request_of(machine: Machine) -> dict[str, Any]:
    """What the helper is to measure: the cores that may be used, node by node, and every GPU with those beside it and those of its rank.

    The threads of a core stand side by side, as in what ranks and their Adam workers get: the first n are what n of a rank are.
    """
    from so_tui.plan.binding import by_core

    allowed = set(machine.allowed_cpus)
    nodes = [{"id": node.id, "cpus": [*by_core(machine, [cpu for cpu in node.cpus if cpu in allowed])]} for node in machine.cpu_nodes]
    nodes = [node for node in nodes if node["cpus"]]
    home = machine.gpus[0].numa_node if machine.gpus else None
    nodes.sort(key=lambda node: node["id"] != home)  # the curve over core counts is taken where the first GPU hangs
    shares = _cores_of_ranks(machine)
    gpus = []
    for gpu in machine.gpus:
        near = [cpu for cpu in gpu.cpus if cpu in allowed]
        gpus.append({"index": gpu.index, "cpus": near, "rank_cpus": shares.get(gpu.index, near)})
    return {"nodes": nodes, "gpus": gpus}


def _cores_of_ranks(machine: Machine) -> dict[int | None, list[int]]:
    """The cores of each GPU's rank where all of them train; none where they cannot, which is no reason not to measure."""
    from so_tui.plan.binding import bind_ranks
    from so_tui.spec import InputError

    if not machine.gpus:
        return {}
    try:
        ranks = bind_ranks(machine, tuple(gpu.index for gpu in machine.gpus), mode="gpu", cpu_adam_cores_fraction=0.0)
    except InputError:
        return {}
    return {rank.gpu: list(rank.cpus) for rank in ranks}
