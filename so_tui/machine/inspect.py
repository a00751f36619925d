"""Inspect a machine: assemble what the other modules read."""

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
from so_tui.machine.network import read_network
from so_tui.machine.numa import read_nodes
from so_tui.machine.nvml import NvmlAnswer, query_nvml
from so_tui.machine.software import read_software
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import UNKNOWN, Machine
from so_tui.spec.errors import InputError, Problem


def inspect_machine(sysroot: Path | None = None, *, hostname: str | None = None) -> Machine:
    """Return this machine, or the one whose /sys and /proc were copied below ``sysroot``.

    Args:
        sysroot: Folder with the copies; this machine if absent.
        hostname: Name of the copied machine, if the copy has none or another.

    Raises:
        InputError: With code ``no-cpus`` if ``sysroot`` contains neither NUMA nodes nor CPUs.
    """
    files = SystemFiles(sysroot)
    online = online_cpus(files)
    cpu = processor(files)
    nodes = read_nodes(files, online)
    if not any(node.kind == "cpu" for node in nodes):
        raise InputError([_no_cpus(files.root)])
    online = online or tuple(sorted({cpu for node in nodes for cpu in node.cpus}))
    allowed = allowed_cpus(files, online)
    memory = host_memory(files, nodes)
    nvml = query_nvml() if files.live else NvmlAnswer()
    found = read_gpus(
        files, memory.nodes, nvml, coherent=cpu.architecture in ("aarch64", "unknown")
    )
    shm = shared_memory(files)
    memory_nodes = allowed_memory_nodes(files)
    return Machine(
        hostname=os.uname().nodename
        if files.live
        else hostname or files.text("/proc/sys/kernel/hostname") or UNKNOWN,
        cpu_name=cpu.name,
        architecture=cpu.architecture,
        page_size_bytes=page_size_bytes(files),
        online_cpus=online,
        allowed_cpus=allowed,
        host_memory_bytes=memory.total_bytes,
        network=read_network(files),
        shm_total_bytes=shm.total_bytes,
        shm_free_bytes=shm.free_bytes,
        mpam=read_mpam(files, cpu.architecture),
        software=read_software(files, memory.nodes, allowed, nvml.driver),
        numa_nodes=memory.nodes,
        gpus=found.gpus,
        memory_limit_bytes=memory.limit_bytes,
        smt_siblings=smt_siblings(files, online),
        allowed_memory_nodes=memory_nodes,
        live=files.live,
        notes=(
            *allowance_notes(files, online, allowed),
            *memory_allowance_notes(nodes, memory_nodes),
            *memory.notes,
            *found.notes,
        ),
        hidden_gpus=found.hidden,
        nvml_errors=nvml.errors,
        memory_grows=memory.grows,
    )


def _no_cpus(root: Path) -> Problem:
    return Problem(
        code="no-cpus",
        field="--sysroot",
        value=str(root),
        message="contains no /sys or /proc with CPUs",
        remedy="Give the folder that contains `sys/devices/system/node` of the other machine.",
    )
