"""Check GPUs: vendor, driver, modes, memory, other users, and kernels for their architecture.

Codes: amd-gpus, never-run, partitioned, nvml-unavailable, gpus-hidden, gpus-not-granted,
no-nvidia-driver, no-gpu, driver-too-old, compute-prohibited, compute-exclusive, mig-enabled,
file-cache-in-gpu-memory, mpam-unused, gpu-training, gpu-busy, gpu-memory-broken, gpu-memory-errors,
persistence-off, arch-list-without-gpu, torch-too-old-for-gpu, gpu-without-bf16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from so_tui.doctor.checks import CheckContext, Finding, Findings, finding
from so_tui.doctor.host import run_of
from so_tui.machine.gpus import GpuHealth, pci_gpus
from so_tui.machine.types import Gpu, version_numbers
from so_tui.units import memory_size

_CACHE_SHARE = 0.02
"""Share of a GPU's memory that file cache may hold without a finding."""
_CUDA_13_DRIVER = (580,)
_AMPERE = (8, 0)
_BLACKWELL = (10, 0)
_CUDA_FOR_BLACKWELL = (12, 8)
_NAMED_ARCHITECTURES = frozenset(("Ada", "Ampere", "Blackwell", "Hopper", "Turing", "Volta"))


def _check_amd(context: CheckContext) -> Findings:
    amd = [gpu for gpu in context.machine.gpus if gpu.vendor == "amd"]
    if amd:
        named = ", ".join(f"GPU {gpu.index}: {gpu.name} at {gpu.pci_bus_id}" for gpu in amd)
        yield finding("never-run" if all(gpu.shares_memory for gpu in amd) else "amd-gpus", named)
    if split := [gpu for gpu in amd if gpu.mig]:
        yield finding(
            "partitioned",
            f"GPU {_listed(split)}: several devices at {split[0].pci_bus_id} (KFD topology)",
        )


def _check_driver(context: CheckContext) -> Findings:
    software, gpus = context.machine.software, context.nvidia_gpus
    silent = [gpu for gpu in gpus if gpu.uuid is None and gpu.compute_mode is None]
    if not context.machine.gpus:
        yield _why_no_gpu(context)
    elif context.is_this_host and silent:
        on_bus = f"GPU {_listed(silent)} found on the PCI bus only."
        yield finding("nvml-unavailable", " ".join([on_bus, *context.machine.nvml_errors]))
    cuda_13 = version_numbers(software.torch_cuda)[:1] == (13,)
    if gpus and cuda_13 and () < version_numbers(software.nvidia_driver) < _CUDA_13_DRIVER:
        yield finding(
            "driver-too-old",
            f"driver {software.nvidia_driver}; torch {software.torch} is built for CUDA "
            f"{software.torch_cuda}",
        )


def _why_no_gpu(context: CheckContext) -> Finding:
    """Return the finding that explains why the machine shows no GPU."""
    if context.machine.hidden_gpus:
        hidden_by = context.environment.get("CUDA_VISIBLE_DEVICES", "")
        return finding("gpus-hidden", f"environment variable CUDA_VISIBLE_DEVICES={hidden_by}")
    on_bus = pci_gpus(context.files)
    names = ", ".join(f"{gpu.name} at {gpu.pci_bus_id}" for gpu in on_bus if gpu.vendor == "nvidia")
    if not names:
        return finding("no-gpu", "neither NVML nor the PCI bus lists one")
    if context.files.text("/proc/driver/nvidia/version"):
        return finding("gpus-not-granted", f"{names}; the driver is loaded, but lists none of them")
    return finding("no-nvidia-driver", f"{names}; no /proc/driver/nvidia/version")


def _check_modes(context: CheckContext) -> Findings:
    gpus, exclusive = context.nvidia_gpus, context.exclusive_gpus
    prohibited = [gpu for gpu in gpus if gpu.compute_mode == "Prohibited"]
    for name, found, mode in (
        ("compute-prohibited", prohibited, "compute mode Prohibited"),
        *(
            ("compute-exclusive", exclusive, f"compute mode {gpu.compute_mode}")
            for gpu in exclusive[:1]
        ),
        ("mig-enabled", [gpu for gpu in gpus if gpu.mig], "MIG mode enabled"),
    ):
        if found:
            yield finding(name, f"GPU {_listed(found)}: {mode} (NVML)")


def _check_memory(context: CheckContext) -> Findings:
    """Find file cache in the memory node of a GPU, and on Grace unpartitioned bandwidth."""
    owners = {gpu.memory_node: gpu.index for gpu in context.nvidia_gpus}
    for node in context.machine.numa_nodes:
        cached = node.file_cache_bytes or 0
        if node.id in owners and cached > _CACHE_SHARE * node.memory_total_bytes:
            yield finding(
                "file-cache-in-gpu-memory",
                f"node {node.id}: FilePages {memory_size(cached)} of "
                f"{memory_size(node.memory_total_bytes)}",
                gpu=owners[node.id],
            )
    mpam = context.machine.mpam
    if context.is_grace and mpam.state in ("off", "kernel", "firmware"):
        yield finding("mpam-unused", mpam.evidence)


def _check_in_use(context: CheckContext) -> Findings:
    for gpu, health in _pairs(context):
        if not health.pids:
            continue
        named = ", ".join(
            f"{pid} ({context.files.text(f'/proc/{pid}/comm') or 'not visible here'})"
            for pid in health.pids
        )
        found = [run_of(context.files, pid) for pid in health.pids]
        if runs := ", ".join(sorted({Path(run).name for run in found if run})):
            yield finding("gpu-training", f"process {named}; run {runs}", gpu=gpu.index)
        else:
            yield finding("gpu-busy", f"process {named} (NVML)", gpu=gpu.index)


def _check_health(context: CheckContext) -> Findings:
    for gpu, health in _pairs(context):
        if health.row_remap_failed:
            yield finding("gpu-memory-broken", "row remapping failed (NVML)", gpu=gpu.index)
        elif health.row_remap_pending or health.uncorrected_ecc_errors:
            pending = "; a row is waiting to be remapped" if health.row_remap_pending else ""
            yield finding(
                "gpu-memory-errors",
                f"{health.uncorrected_ecc_errors or 0} uncorrected ECC errors since the driver was "
                f"loaded{pending} (NVML)",
                gpu=gpu.index,
            )
    if off := [gpu for gpu, health in _pairs(context) if health.persistence is False]:
        yield finding("persistence-off", f"GPU {_listed(off)} (NVML)")


def _check_architectures(context: CheckContext) -> Findings:
    """Find GPUs for which torch has no kernels, or for which extensions would be compiled
    without.
    """
    listed = context.environment.get("TORCH_CUDA_ARCH_LIST", "")
    torch_cuda = context.machine.software.torch_cuda
    capabilities = {health.compute_capability for _, health in _pairs(context)}
    for capability in sorted(capability for capability in capabilities if capability):
        number = f"{capability[0]}.{capability[1]}"
        built_for = version_numbers(torch_cuda)
        for name, holds, evidence in (
            (
                "arch-list-without-gpu",
                listed and not _covers(listed, capability),
                f"environment variable TORCH_CUDA_ARCH_LIST={listed}; the GPU has {number} (NVML)",
            ),
            (
                "gpu-without-bf16",
                capability < _AMPERE,
                f"compute capability {number}, older than Ampere's 8.0 (NVML)",
            ),
            (
                "torch-too-old-for-gpu",
                capability >= _BLACKWELL and () < built_for < _CUDA_FOR_BLACKWELL,
                f"compute capability {number}; torch is built for CUDA {torch_cuda}",
            ),
        ):
            if holds:
                yield finding(name, evidence, number=number)


def _covers(listed: str, capability: tuple[int, int]) -> bool:
    """Return whether an architecture list includes a compute capability, directly or through
    PTX.
    """
    entries = re.findall(r"(\d+)\.(\d+)[a-z]?(\+PTX)?", listed)
    named = any(name in listed for name in _NAMED_ARCHITECTURES)
    return named or any(
        (int(major), int(minor)) == capability or (ptx and (int(major), int(minor)) <= capability)
        for major, minor, ptx in entries
    )


def _pairs(context: CheckContext) -> Iterator[tuple[Gpu, GpuHealth]]:
    by_bus_id = {health.bus_id: health for health in context.health}
    for gpu in context.nvidia_gpus:
        if gpu.pci_bus_id in by_bus_id:
            yield gpu, by_bus_id[gpu.pci_bus_id]


def _listed(gpus: Iterable[Gpu]) -> str:
    """Return the indices of GPUs for a message: ``0, 2``."""
    return ", ".join(str(gpu.index) for gpu in gpus)


CHECKS = (
    _check_amd,
    _check_driver,
    _check_modes,
    _check_memory,
    _check_in_use,
    _check_health,
    _check_architectures,
)
