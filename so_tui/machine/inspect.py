"""The one function that looks at a machine: everything the other modules know, put together."""

from __future__ import annotations

import os
from pathlib import Path

from so_tui.machine.cpus import (
    allowance_notes,
    allowed_cpus,
    allowed_memory_nodes,
    memory_allowance_notes,
    online_cpus,
    processor,
    smt_siblings,
)
from so_tui.machine.gpus import read_gpus
from so_tui.machine.memory import host_memory, page_size_bytes, shared_memory
from so_tui.machine.mpam import read_mpam
from so_tui.machine.numa import read_nodes
from so_tui.machine.nvml import NvmlAnswer, query_nvml
from so_tui.machine.software import read_software
from so_tui.machine.tree import Tree
from so_tui.machine.types import UNKNOWN, Machine
from so_tui.spec.errors import InputError, Problem


def inspect_machine(sysroot: Path | None = None, *, hostname: str | None = None) -> Machine:
    """This machine; or the one whose /sys and /proc were copied below ``sysroot``, of which nothing live is asked.

    ``hostname`` is what to call it, where the tree does not say or says another name.

    Raises InputError when ``sysroot`` has no NUMA node and no CPU in it.
    """
    tree = Tree(sysroot)
    online = online_cpus(tree)
    cpu = processor(tree)
    nodes = read_nodes(tree, online)
    if not any(node.kind == "cpu" for node in nodes):
        raise InputError([_no_tree(tree.root)])
    online = online or tuple(sorted({cpu for node in nodes for cpu in node.cpus}))
    allowed = allowed_cpus(tree, online)
    memory = host_memory(tree, nodes)
    nvml = query_nvml() if tree.live else NvmlAnswer()
    gpus, gpu_notes = read_gpus(tree, memory.nodes, nvml, coherent=cpu.architecture in ("aarch64", "unknown"))
    shm = shared_memory(tree)
    memory_nodes = allowed_memory_nodes(tree)
    return Machine(
        hostname=os.uname().nodename if tree.live else hostname or tree.text("/proc/sys/kernel/hostname") or UNKNOWN,
        cpu_name=cpu.name,
        architecture=cpu.architecture,
        page_size_bytes=page_size_bytes(tree),
        online_cpus=online,
        allowed_cpus=allowed,
        host_memory_bytes=memory.total_bytes,
        shm_total_bytes=shm.total_bytes,
        shm_free_bytes=shm.free_bytes,
        mpam=read_mpam(tree, cpu.architecture),
        software=read_software(tree, memory.nodes, allowed, nvml.driver),
        numa_nodes=memory.nodes,
        gpus=gpus,
        memory_limit_bytes=memory.limit_bytes,
        smt_siblings=smt_siblings(tree, online),
        allowed_memory_nodes=memory_nodes,
        live=tree.live,
        notes=(*allowance_notes(tree, online, allowed), *memory_allowance_notes(nodes, memory_nodes), *memory.notes, *gpu_notes),
    )


def _no_tree(root: Path) -> Problem:
    return Problem(
        field="--sysroot",
        value=str(root),
        message="holds no /sys or /proc with CPUs in it",
        remedy="Give the folder that contains `sys/devices/system/node` of the other machine.",
    )
