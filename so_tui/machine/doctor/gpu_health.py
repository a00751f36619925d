"""Check the current state of GPUs: other users, memory errors, persistence mode, and kernels for their architecture.

Codes: gpu-training, gpu-busy, gpu-memory-broken, gpu-memory-errors, persistence-off, arch-list-without-gpu, torch-too-old-for-gpu,
gpu-without-bf16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from so_tui.machine.doctor.processes import run_of
from so_tui.machine.doctor.types import CheckContext, Finding, gpu_list
from so_tui.machine.gpus import normal_bus_id
from so_tui.machine.nvml import GpuHealth
from so_tui.machine.types import Gpu

_AMPERE = (8, 0)
_BLACKWELL = (10, 0)
_CUDA_FOR_BLACKWELL = (12, 8)
_NAMED_ARCHITECTURES = frozenset(("Ada", "Ampere", "Blackwell", "Hopper", "Turing", "Volta"))


def check_in_use(context: CheckContext) -> Iterator[Finding]:
    for gpu, health in _pairs(context):
        if not health.pids:
            continue
        runs = {run for pid in health.pids if context.files and (run := run_of(context.files, pid))}
        named = ", ".join(
            f"{pid} ({context.text(f'/proc/{pid}/comm') or 'not visible here'})"
            for pid in health.pids
        )
        if runs:
            yield Finding(
                code="gpu-training",
                severity="note",
                title=f"GPU {gpu.index} is training",
                evidence=f"process {named}; run {', '.join(sorted(Path(run).name for run in runs))}",
                cost="The GPU is occupied until that run ends.",
                remedy="Watch the run with `so-tui watch`; choose other GPUs with `--gpus`.",
            )
        else:
            yield Finding(
                code="gpu-busy",
                severity="warning",
                title=f"Other processes use GPU {gpu.index}",
                evidence=f"process {named} (NVML)",
                cost="They take memory that plans count on, and GPU time.",
                remedy="End them if they are yours, or choose other GPUs with `--gpus`.",
            )


def check_memory_errors(context: CheckContext) -> Iterator[Finding]:
    for gpu, health in _pairs(context):
        if health.row_remap_failed:
            yield Finding(
                code="gpu-memory-broken",
                severity="blocks",
                title=f"The memory of GPU {gpu.index} is defective",
                evidence="row remapping failed (NVML)",
                cost="Values may be wrong without an error, or the run ends with an Xid error.",
                remedy="Leave this GPU out with `--gpus`, and report it to the site: it must be replaced.",
            )
        elif health.row_remap_pending or health.uncorrected_ecc_errors:
            pending = "; a row is waiting to be remapped" if health.row_remap_pending else ""
            yield Finding(
                code="gpu-memory-errors",
                severity="warning",
                title=f"GPU {gpu.index} had memory errors",
                evidence=f"{health.uncorrected_ecc_errors or 0} uncorrected ECC errors since the driver was loaded{pending} (NVML)",
                cost="Each of them ended a process, and more may follow.",
                remedy="Ask the site to reset the GPU or to restart the node; use another GPU until then.",
            )


def check_persistence(context: CheckContext) -> Iterator[Finding]:
    off = tuple(gpu for gpu, health in _pairs(context) if health.persistence is False)
    if off:
        yield Finding(
            code="persistence-off",
            severity="note",
            title="Persistence mode is off",
            evidence=f"GPU {gpu_list(off)} (NVML)",
            cost="The driver initialises again for each first process, which adds seconds to every start.",
            remedy="As root: `nvidia-smi -pm 1`.",
        )


def check_architectures(context: CheckContext) -> Iterator[Finding]:
    """Find GPUs for which torch has no kernels, or for which extensions would be compiled without."""
    capabilities = {
        health.compute_capability for _, health in _pairs(context) if health.compute_capability
    }
    listed = context.environment.get("TORCH_CUDA_ARCH_LIST", "")
    for capability in sorted(capabilities):
        number = f"{capability[0]}.{capability[1]}"
        if listed and not _covers(listed, capability):
            yield Finding(
                code="arch-list-without-gpu",
                severity="warning",
                title="TORCH_CUDA_ARCH_LIST leaves out this GPU",
                evidence=f"environment variable TORCH_CUDA_ARCH_LIST={listed}; the GPU has {number} (NVML)",
                cost="Kernels compiled with this setting do not run on the GPU.",
                remedy=f"`export TORCH_CUDA_ARCH_LIST={number}`, or unset it.",
            )
        if capability < _AMPERE:
            yield Finding(
                code="gpu-without-bf16",
                severity="blocks",
                title="This GPU cannot compute in bf16",
                evidence=f"compute capability {number}, older than Ampere's 8.0 (NVML)",
                cost="so-tui trains in bf16, which torch only emulates there: a step takes many times as long, and kernels may fail.",
                remedy="Use a GPU from the Ampere generation or newer.",
            )
        cuda = _version(context.machine.software.torch_cuda)
        if capability >= _BLACKWELL and cuda and cuda < _CUDA_FOR_BLACKWELL:
            yield Finding(
                code="torch-too-old-for-gpu",
                severity="blocks",
                title="This torch has no kernels for the GPU",
                evidence=f"compute capability {number}; torch is built for CUDA {context.machine.software.torch_cuda}",
                cost='Every kernel fails with "no kernel image is available".',
                remedy="Install a torch built for CUDA 12.8 or newer.",
            )


def _covers(listed: str, capability: tuple[int, int]) -> bool:
    """Return whether an architecture list includes a compute capability, directly or through PTX."""
    entries = re.findall(r"(\d+)\.(\d+)[a-z]?(\+PTX)?", listed)
    named = any(name in listed for name in _NAMED_ARCHITECTURES)
    return named or any(
        (int(major), int(minor)) == capability or (ptx and (int(major), int(minor)) <= capability)
        for major, minor, ptx in entries
    )


def _pairs(context: CheckContext) -> Iterator[tuple[Gpu, GpuHealth]]:
    by_bus_id = {normal_bus_id(health.bus_id): health for health in context.health}
    for gpu in context.nvidia_gpus:
        if gpu.pci_bus_id in by_bus_id:
            yield gpu, by_bus_id[gpu.pci_bus_id]


def _version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


CHECKS = (check_in_use, check_memory_errors, check_persistence, check_architectures)
