"""Checks of what GPUs are doing now: who else computes there, errors of their memory, the driver's own settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from so_tui.machine.doctor.finding import Finding, Look
from so_tui.machine.doctor.processes import run_of
from so_tui.machine.gpus import normal_bus_id
from so_tui.machine.nvml import GpuHealth
from so_tui.machine.types import Gpu

_BLACKWELL = (10, 0)
_CUDA_FOR_BLACKWELL = (12, 8)


def in_use(look: Look) -> Iterator[Finding]:
    for gpu, health in _pairs(look):
        if not health.pids:
            continue
        runs = {run for pid in health.pids if look.tree and (run := run_of(look.tree, pid))}
        named = ", ".join(f"{pid} ({look.text(f'/proc/{pid}/comm') or 'not seen from here'})" for pid in health.pids)
        if runs:
            yield Finding(
                severity="note",
                title=f"GPU {gpu.index} is training",
                evidence=f"process {named}; run {', '.join(sorted(Path(run).name for run in runs))}",
                cost="It is taken until that run ends.",
                remedy="`so-tui watch` shows it; choose other GPUs with `--gpus`.",
            )
        else:
            yield Finding(
                severity="warning",
                title=f"GPU {gpu.index} is used by other processes",
                evidence=f"process {named} (NVML)",
                cost="They hold memory that plans count on, and time.",
                remedy="End them if they are yours, or choose other GPUs with `--gpus`.",
            )


def memory_errors(look: Look) -> Iterator[Finding]:
    for gpu, health in _pairs(look):
        if health.row_remap_failed:
            yield Finding(
                severity="blocks",
                title=f"The memory of GPU {gpu.index} is broken",
                evidence="row remapping failed (NVML)",
                cost="Values may be wrong without a word, or the run ends with an Xid error.",
                remedy="Leave this GPU out with `--gpus`, and tell the site: it is to be replaced.",
            )
        elif health.row_remap_pending or health.uncorrected_ecc_errors:
            pending = "; a row waits to be remapped" if health.row_remap_pending else ""
            yield Finding(
                severity="warning",
                title=f"GPU {gpu.index} had memory errors",
                evidence=f"{health.uncorrected_ecc_errors or 0} uncorrected ECC errors since the driver was loaded{pending} (NVML)",
                cost="Each of them ended a process; more may come.",
                remedy="Ask the site to reset the GPU or to restart the node; use another one until then.",
            )


def persistence(look: Look) -> Iterator[Finding]:
    off = [gpu for gpu, health in _pairs(look) if health.persistence is False]
    if off:
        yield Finding(
            severity="note",
            title="Persistence mode is off",
            evidence=f"GPU {', '.join(str(gpu.index) for gpu in off)} (NVML)",
            cost="The driver starts anew with each first process: seconds for every start.",
            remedy="As root: `nvidia-smi -pm 1`.",
        )


def architectures(look: Look) -> Iterator[Finding]:
    """Whether what is compiled or was built fits the GPU."""
    capabilities = {health.compute_capability for _, health in _pairs(look) if health.compute_capability}
    listed = look.environment.get("TORCH_CUDA_ARCH_LIST", "")
    for capability in sorted(capabilities):
        number = f"{capability[0]}.{capability[1]}"
        if listed and not _covers(listed, capability):
            yield Finding(
                severity="warning",
                title="TORCH_CUDA_ARCH_LIST leaves out this GPU",
                evidence=f"environment variable TORCH_CUDA_ARCH_LIST={listed}; the GPU has {number} (NVML)",
                cost="Kernels that are compiled here do not run on it.",
                remedy=f"`export TORCH_CUDA_ARCH_LIST={number}`, or unset it.",
            )
        cuda = _version(look.machine.software.torch_cuda)
        if capability >= _BLACKWELL and cuda and cuda < _CUDA_FOR_BLACKWELL:
            yield Finding(
                severity="blocks",
                title="This torch has no kernels for the GPU",
                evidence=f"compute capability {number}; torch is built for CUDA {look.machine.software.torch_cuda}",
                cost="Every kernel fails: no kernel image is available.",
                remedy="Install a torch built for CUDA 12.8 or newer.",
            )


def _covers(listed: str, capability: tuple[int, int]) -> bool:
    entries = re.findall(r"(\d+)\.(\d+)[a-z]?(\+PTX)?", listed)
    named = any(word in listed for word in ("Hopper", "Ampere", "Ada", "Blackwell", "Volta", "Turing"))
    return named or any(
        (int(major), int(minor)) == capability or (ptx and (int(major), int(minor)) <= capability) for major, minor, ptx in entries
    )


def _pairs(look: Look) -> Iterator[tuple[Gpu, GpuHealth]]:
    by_bus_id = {normal_bus_id(health.bus_id): health for health in look.health}
    for gpu in look.nvidia:
        if gpu.pci_bus_id in by_bus_id:
            yield gpu, by_bus_id[gpu.pci_bus_id]


def _version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


CHECKS = (in_use, memory_errors, persistence, architectures)
