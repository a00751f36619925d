"""Checks of GPUs: vendor, driver, compute mode, MIG, and how their memory shows up on coherent machines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from so_tui.machine.doctor.finding import Finding, Look, gib, indices
from so_tui.machine.gpus import pci_gpus
from so_tui.machine.types import NumaNode

_CACHE_SHARE = 0.02
"""Share of a GPU's memory that file cache may hold before it is worth a word."""
_CUDA_13_DRIVER = 580


def vendor(look: Look) -> Iterator[Finding]:
    amd = tuple(gpu for gpu in look.machine.gpus if gpu.vendor == "amd")
    if amd:
        yield Finding(
            severity="blocks",
            title="AMD GPUs are not supported",
            evidence=", ".join(f"GPU {gpu.index}: {gpu.name} at {gpu.pci_bus_id}" for gpu in amd),
            cost="The offload engine uses CUDA streams and pinned copies that were never run on ROCm.",
            remedy="Use a machine with NVIDIA GPUs, or hide these (a machine without visible GPUs trains on the CPU).",
        )


def driver(look: Look) -> Iterator[Finding]:
    if look.machine.gpus:
        silent = tuple(gpu for gpu in look.nvidia if gpu.uuid is None and gpu.compute_mode is None)
        answers = [note for note in look.machine.notes if "NVML" in note]
        if look.tree and silent:
            yield Finding(
                severity="warning",
                title="The NVIDIA driver is loaded, but NVML does not answer",
                evidence=" ".join([f"GPU {indices(silent)} known from the PCI bus only.", *answers]),
                cost="Memory sizes, compute mode and other users of a GPU are unknown; CUDA will probably fail as well.",
                remedy="Run `nvidia-smi`; after a driver update the kernel modules must be reloaded or the machine rebooted.",
            )
        return
    on_bus = tuple(gpu for gpu in pci_gpus(look.tree) if gpu.vendor == "nvidia") if look.tree else ()
    loaded = look.tree is not None and look.tree.exists("/proc/driver/nvidia/version")
    if any("CUDA_VISIBLE_DEVICES" in note for note in look.machine.notes):
        yield Finding(
            severity="note",
            title="All GPUs are hidden",
            evidence=f"environment variable CUDA_VISIBLE_DEVICES={look.environment.get('CUDA_VISIBLE_DEVICES', '')}",
            cost="Runs train on the CPU.",
            remedy="`unset CUDA_VISIBLE_DEVICES`, and choose with `--gpus`.",
        )
    elif on_bus:
        yield Finding(
            severity="warning",
            title="NVIDIA GPUs that this process may not use" if loaded else "NVIDIA GPUs on the PCI bus, but no driver for them here",
            evidence=", ".join(f"{gpu.name} at {gpu.bus_id}" for gpu in on_bus)
            + ("; the driver is loaded, and shows none of them" if loaded else "; no /proc/driver/nvidia/version"),
            cost="Runs train on the CPU.",
            remedy="Ask the scheduler for GPUs (`--gpus=N`), or start the container with them (`--gpus all`, `--nv`)."
            if loaded
            else "Load the NVIDIA driver, or start the container with its GPUs (`--gpus all`, `--nv`).",
        )
    else:
        yield Finding(
            severity="note",
            title="No GPU",
            evidence="neither NVML nor the PCI bus shows one",
            cost="Runs train on the CPU: good for `tiny` and for trying things out.",
            remedy="Plan for another machine with `--machine FILE` (o on the screen), from `so-tui inspect --json` run there.",
        )


def driver_age(look: Look) -> Iterator[Finding]:
    software = look.machine.software
    major = re.match(r"\d+", software.nvidia_driver or "")
    if look.nvidia and major and (software.torch_cuda or "").startswith("13") and int(major.group()) < _CUDA_13_DRIVER:
        yield Finding(
            severity="blocks",
            title="The NVIDIA driver is too old for this torch",
            evidence=f"driver {software.nvidia_driver}; torch {software.torch} is built for CUDA {software.torch_cuda}",
            cost="CUDA 13 needs a driver of 580 or newer: torch will see no GPU.",
            remedy="Install a torch built for CUDA 12 (`--index-url https://download.pytorch.org/whl/cu128`), or update the driver.",
        )


def compute_mode(look: Look) -> Iterator[Finding]:
    prohibited = tuple(gpu for gpu in look.nvidia if gpu.compute_mode == "Prohibited")
    if prohibited:
        yield Finding(
            severity="blocks",
            title="Compute mode is Prohibited",
            evidence=f"GPU {indices(prohibited)}: compute mode Prohibited (NVML)",
            cost="No process may use CUDA there.",
            remedy="As root: `nvidia-smi -c DEFAULT`; or leave these GPUs out with `--set gpus=[...]`.",
        )
    exclusive = tuple(gpu for gpu in look.nvidia if (gpu.compute_mode or "").startswith("Exclusive"))
    if exclusive:
        yield Finding(
            severity="warning",
            title="Compute mode allows one process per GPU",
            evidence=f"GPU {indices(exclusive)}: compute mode {exclusive[0].compute_mode} (NVML)",
            cost="A second process on a GPU fails; the Adam worker of DeepSpeed's own SuperOffload is one.",
            remedy="Keep `offload.engine` at `so-tui`, whose worker never touches the GPU; or as root `nvidia-smi -c DEFAULT`.",
        )


def mig(look: Look) -> Iterator[Finding]:
    sliced = tuple(gpu for gpu in look.nvidia if gpu.mig)
    if sliced:
        yield Finding(
            severity="warning",
            title="MIG is on",
            evidence=f"GPU {indices(sliced)}: MIG mode enabled (NVML)",
            cost="CUDA sees one slice of such a GPU; plans count the whole one.",
            remedy="Leave these GPUs out with `--set gpus=[...]`, or switch MIG off as root (`nvidia-smi -mig 0`).",
        )


def gpu_memory_as_node(look: Look) -> Iterator[Finding]:
    """Grace only: coherent GPU memory is a NUMA node, unless the driver keeps it to itself (CDMM) or it was not brought online."""
    hidden = tuple(gpu for gpu in look.nvidia if gpu.memory_node is None)
    if not look.grace or not hidden:
        return
    setting = re.search(r'CoherentGPUMemoryMode: "(\w*)"', look.text("/proc/driver/nvidia/params"))
    reserved = any(node.kind == "empty" for node in look.machine.numa_nodes)
    if (setting and setting.group(1) == "driver") or not reserved:
        said = f'; /proc/driver/nvidia/params: CoherentGPUMemoryMode "{setting.group(1)}"' if setting else ""
        yield Finding(
            severity="note",
            title="GPU memory is managed by the driver alone (CDMM)",
            evidence=f"GPU {indices(hidden)}: no NUMA node of its own{said}",
            cost="None for training: page cache and host allocations cannot spill into GPU memory.",
            remedy="Nothing to do.",
        )
    else:
        yield Finding(
            severity="note",
            title="GPU memory has no NUMA node with memory",
            evidence=f"GPU {indices(hidden)}: the kernel reserves empty nodes for it, and none has memory",
            cost="None for CUDA. The panel of the GPU's own node stays empty.",
            remedy="Root can bring it online before the driver loads: `auto_online_blocks=online_movable`.",
        )


def cache_in_gpu_memory(look: Look) -> Iterator[Finding]:
    owners = {gpu.memory_node: gpu for gpu in look.nvidia}
    for node in look.machine.numa_nodes:
        if node.id in owners and _cache_share(node) > _CACHE_SHARE:
            yield Finding(
                severity="warning",
                title=f"File cache sits in the memory of GPU {owners[node.id].index}",
                evidence=f"node {node.id}: FilePages {gib(node.file_cache_bytes or 0)} of {gib(node.memory_total_bytes)}",
                cost="CUDA cannot have that memory: less for the run, an out-of-memory error at worst.",
                remedy="As root: `echo 1 > /proc/sys/vm/drop_caches`. Read large files under `numactl -m` with the CPU nodes.",
            )


def _cache_share(node: NumaNode) -> float:
    return (node.file_cache_bytes or 0) / node.memory_total_bytes if node.memory_total_bytes else 0.0


def mpam(look: Look) -> Iterator[Finding]:
    state = look.machine.mpam
    if look.grace and state.state in ("off", "kernel", "firmware"):
        yield Finding(
            severity="note",
            title="Memory bandwidth partitioning (MPAM) is not in use",
            evidence=state.evidence,
            cost="Adam's memory traffic and the copies to the GPU share the bandwidth without shares of their own.",
            remedy="Nothing a user can do: it takes a kernel with MPAM and root to mount resctrl.",
        )


CHECKS = (vendor, driver, driver_age, compute_mode, mig, gpu_memory_as_node, cache_in_gpu_memory, mpam)
