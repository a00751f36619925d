"""The machine in one line, most important facts first. Pure functions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from so_tui.ui.text import memory, plural

if TYPE_CHECKING:
    from so_tui.machine.types import Gpu, Machine


def gpu_model(name: str) -> str:
    """Return ``GH200 480GB`` for ``NVIDIA GH200 480GB``."""
    for prefix in ("NVIDIA ", "AMD "):
        name = name.removeprefix(prefix)
    return name


def gpus_text(gpus: tuple[Gpu, ...]) -> str:
    """Return ``4x GH200 95 GiB``, or ``no GPU``."""
    if not gpus:
        return "no GPU"
    kinds = Counter((gpu_model(gpu.name), gpu.memory_total_bytes) for gpu in gpus)
    return " + ".join(
        f"{number}x {name}" + (f" {memory(total, 0)}" if total else "")
        for (name, total), number in kinds.items()
    )


def nodes_text(machine: Machine) -> str:
    """Return ``4 NUMA nodes x 72 cores, 117 GiB each``."""
    nodes = machine.cpu_nodes
    cores = {len(node.cpus) for node in nodes}
    sizes = {memory(node.memory_total_bytes, 0) for node in nodes}
    number = plural(len(nodes), "NUMA node")
    each = (
        f" x {cores.pop()} cores"
        if len(cores) == 1
        else f", {sum(len(node.cpus) for node in nodes)} cores"
    )
    if len(nodes) == 1:
        return f"{number}{each}, {sizes.pop()}"
    size = (
        f", {sizes.pop()} each" if len(sizes) == 1 else f", {memory(machine.host_memory_bytes, 0)}"
    )
    return number + each + size


def machine_facts(machine: Machine) -> list[str]:
    """Return facts for one line, most important first."""
    facts = [gpus_text(machine.gpus), nodes_text(machine)]
    if len(machine.allowed_cpus) < len(machine.online_cpus):
        facts.append(f"{len(machine.allowed_cpus)} of {len(machine.online_cpus)} cores available")
    return facts
