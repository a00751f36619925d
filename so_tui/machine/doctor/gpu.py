"""Check GPUs: vendor, driver, compute mode, MIG, and how the kernel exposes their memory.

Codes: amd-gpus, never-run, partitioned, nvml-unavailable, gpus-hidden, gpus-not-granted,
no-nvidia-driver, no-gpu, driver-too-old, compute-prohibited, compute-exclusive, mig-enabled,
gpu-memory-driver-managed, gpu-memory-offline, file-cache-in-gpu-memory, mpam-unused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from so_tui.machine.doctor.checks import CheckContext, Finding, Findings, gpu_list
from so_tui.machine.doctor.host import run_of
from so_tui.machine.gpus import GpuHealth, pci_gpus
from so_tui.machine.types import Gpu, NumaNode
from so_tui.units import memory_size

_CACHE_SHARE = 0.02
"""Share of a GPU's memory that file cache may hold without a finding."""
_CUDA_13_DRIVER = 580


def _check_vendor(context: CheckContext) -> Findings:
    amd = tuple(gpu for gpu in context.machine.gpus if gpu.vendor == "amd")
    named = ", ".join(f"GPU {gpu.index}: {gpu.name} at {gpu.pci_bus_id}" for gpu in amd)
    if any(not gpu.shares_memory for gpu in amd):
        yield Finding(
            "amd-gpus",
            "blocks",
            "AMD GPUs with memory of their own are not supported",
            evidence=named,
            cost=(
                "Nothing is known of their speed, and nothing was tested on them; of AMD's, MI300A "
                "alone is planned for."
            ),
            remedy=(
                "Use a machine with NVIDIA GPUs, or hide these: without visible GPUs a run trains "
                "on the CPU."
            ),
        )
    elif amd:
        yield Finding(
            "never-run",
            "warning",
            "so-tui has never run on these GPUs",
            evidence=named,
            cost=(
                "Plans are unproven here: speeds follow from publications, and memory from "
                "measurements on NVIDIA GPUs."
            ),
            remedy="Begin with a short run of `tiny`, and report what happens.",
        )
    if split := tuple(gpu for gpu in amd if gpu.mig):
        yield Finding(
            "partitioned",
            "warning",
            "GPUs are split into compute partitions",
            evidence=(
                f"GPU {gpu_list(split)}: several devices at {split[0].pci_bus_id} (KFD topology)"
            ),
            cost="so-tui trains on whole GPUs and does not use these.",
            remedy="As root: `amd-smi set --compute-partition SPX`.",
        )


def _check_driver(context: CheckContext) -> Findings:
    if context.machine.gpus:
        silent = tuple(
            gpu for gpu in context.nvidia_gpus if gpu.uuid is None and gpu.compute_mode is None
        )
        if context.files and silent:
            yield Finding(
                "nvml-unavailable",
                "warning",
                "The NVIDIA driver is loaded, but NVML does not respond",
                evidence=" ".join(
                    [
                        f"GPU {gpu_list(silent)} found on the PCI bus only.",
                        *context.machine.nvml_errors,
                    ]
                ),
                cost=(
                    "Memory sizes, compute mode and other users of the GPUs are unknown. CUDA will "
                    "probably fail as well."
                ),
                remedy=(
                    "Run `nvidia-smi`. After a driver update, reload the kernel modules or reboot."
                ),
            )
    else:
        yield _why_no_gpu(context)


def _why_no_gpu(context: CheckContext) -> Finding:
    """Return the finding that explains why the machine shows no GPU."""
    if context.machine.hidden_gpus:
        return Finding(
            "gpus-hidden",
            "note",
            "All GPUs are hidden",
            evidence=(
                "environment variable "
                f"CUDA_VISIBLE_DEVICES={context.environment.get('CUDA_VISIBLE_DEVICES', '')}"
            ),
            cost="Runs train on the CPU.",
            remedy="`unset CUDA_VISIBLE_DEVICES`, and choose GPUs with `--gpus`.",
        )
    on_bus = (
        tuple(gpu for gpu in pci_gpus(context.files) if gpu.vendor == "nvidia")
        if context.files
        else ()
    )
    names = ", ".join(f"{gpu.name} at {gpu.pci_bus_id}" for gpu in on_bus)
    if on_bus and context.files and context.files.exists("/proc/driver/nvidia/version"):
        return Finding(
            "gpus-not-granted",
            "warning",
            "This process may not use the NVIDIA GPUs",
            evidence=f"{names}; the driver is loaded, but lists none of them",
            cost="Runs train on the CPU.",
            remedy=(
                "Request GPUs from the scheduler (`--gpus=N`), or start the container with them "
                "(`--gpus all`, `--nv`)."
            ),
        )
    if on_bus:
        return Finding(
            "no-nvidia-driver",
            "warning",
            "NVIDIA GPUs on the PCI bus, but no driver",
            evidence=f"{names}; no /proc/driver/nvidia/version",
            cost="Runs train on the CPU.",
            remedy=(
                "Load the NVIDIA driver, or start the container with its GPUs (`--gpus all`, "
                "`--nv`)."
            ),
        )
    return Finding(
        "no-gpu",
        "note",
        "No GPU",
        evidence="neither NVML nor the PCI bus lists one",
        cost="Runs train on the CPU, which is enough for `tiny` and for trying things out.",
        remedy=(
            "To plan for another machine, run `so-tui inspect --json` there and pass the file with "
            "`--machine FILE` (o on the screen)."
        ),
    )


def _check_driver_version(context: CheckContext) -> Findings:
    software = context.machine.software
    major = re.match(r"\d+", software.nvidia_driver or "")
    if (
        context.nvidia_gpus
        and major
        and (software.torch_cuda or "").startswith("13")
        and int(major.group()) < _CUDA_13_DRIVER
    ):
        yield Finding(
            "driver-too-old",
            "blocks",
            "The NVIDIA driver is too old for this torch",
            evidence=(
                f"driver {software.nvidia_driver}; torch {software.torch} is built for CUDA "
                f"{software.torch_cuda}"
            ),
            cost="CUDA 13 needs driver 580 or newer: torch will see no GPU.",
            remedy=(
                "Install a torch built for CUDA 12 (`--index-url "
                "https://download.pytorch.org/whl/cu128`), or update the driver."
            ),
        )


def _check_compute_mode(context: CheckContext) -> Findings:
    prohibited = tuple(gpu for gpu in context.nvidia_gpus if gpu.compute_mode == "Prohibited")
    if prohibited:
        yield Finding(
            "compute-prohibited",
            "blocks",
            "Compute mode is Prohibited",
            evidence=f"GPU {gpu_list(prohibited)}: compute mode Prohibited (NVML)",
            cost="No process can use CUDA on these GPUs.",
            remedy=(
                "As root: `nvidia-smi -c DEFAULT`; or leave these GPUs out with `--set gpus=[...]`."
            ),
        )
    exclusive = tuple(
        gpu for gpu in context.nvidia_gpus if (gpu.compute_mode or "").startswith("Exclusive")
    )
    if exclusive:
        yield Finding(
            "compute-exclusive",
            "warning",
            "Compute mode allows one process per GPU",
            evidence=f"GPU {gpu_list(exclusive)}: compute mode {exclusive[0].compute_mode} (NVML)",
            cost=(
                "A second process on a GPU fails, such as the Adam worker of DeepSpeed's own "
                "SuperOffload."
            ),
            remedy=(
                "Leave `offload.engine` at `so-tui`, whose Adam worker does not use the GPU; or as "
                "root: `nvidia-smi -c DEFAULT`."
            ),
        )


def _check_mig(context: CheckContext) -> Findings:
    sliced = tuple(gpu for gpu in context.nvidia_gpus if gpu.mig)
    if sliced:
        yield Finding(
            "mig-enabled",
            "warning",
            "MIG is enabled",
            evidence=f"GPU {gpu_list(sliced)}: MIG mode enabled (NVML)",
            cost="CUDA sees one slice of such a GPU, but plans count the whole GPU.",
            remedy=(
                "Leave these GPUs out with `--set gpus=[...]`, or disable MIG as root (`nvidia-smi "
                "-mig 0`)."
            ),
        )


def _check_gpu_memory_node(context: CheckContext) -> Findings:
    """On Grace, find GPUs whose memory is not a NUMA node: the driver manages it (CDMM), or it was
    not brought online.
    """
    hidden = tuple(gpu for gpu in context.nvidia_gpus if gpu.memory_node is None)
    if not context.is_grace or not hidden:
        return
    setting = re.search(
        r'CoherentGPUMemoryMode: "(\w*)"', context.text("/proc/driver/nvidia/params")
    )
    reserved = any(node.kind == "empty" for node in context.machine.numa_nodes)
    if (setting and setting.group(1) == "driver") or not reserved:
        parameter = (
            f'; /proc/driver/nvidia/params: CoherentGPUMemoryMode "{setting.group(1)}"'
            if setting
            else ""
        )
        yield Finding(
            "gpu-memory-driver-managed",
            "note",
            "The driver manages GPU memory (CDMM)",
            evidence=f"GPU {gpu_list(hidden)}: no NUMA node of its own{parameter}",
            cost="None for training: page cache and host allocations cannot spill into GPU memory.",
            remedy="No action needed.",
        )
    else:
        yield Finding(
            "gpu-memory-offline",
            "note",
            "GPU memory has no NUMA node",
            evidence=(
                f"GPU {gpu_list(hidden)}: the kernel reserves empty nodes for it, but none has "
                "memory"
            ),
            cost="None for CUDA. The panel of the GPU's memory node stays empty.",
            remedy=(
                "Root can bring it online before the driver loads: "
                "`auto_online_blocks=online_movable`."
            ),
        )


def _check_cache_in_gpu_memory(context: CheckContext) -> Findings:
    owners = {gpu.memory_node: gpu for gpu in context.nvidia_gpus}
    for node in context.machine.numa_nodes:
        if node.id in owners and _cache_share(node) > _CACHE_SHARE:
            yield Finding(
                "file-cache-in-gpu-memory",
                "warning",
                f"File cache occupies memory of GPU {owners[node.id].index}",
                evidence=(
                    f"node {node.id}: FilePages {memory_size(node.file_cache_bytes or 0)} of "
                    f"{memory_size(node.memory_total_bytes)}"
                ),
                cost=(
                    "CUDA cannot allocate that memory: the run has less, and may run out of memory."
                ),
                remedy=(
                    "As root: `echo 1 > /proc/sys/vm/drop_caches`. Read large files under `numactl "
                    "-m` with the CPU nodes."
                ),
            )


def _cache_share(node: NumaNode) -> float:
    return (
        (node.file_cache_bytes or 0) / node.memory_total_bytes if node.memory_total_bytes else 0.0
    )


def _check_mpam(context: CheckContext) -> Findings:
    mpam = context.machine.mpam
    if context.is_grace and mpam.state in ("off", "kernel", "firmware"):
        yield Finding(
            "mpam-unused",
            "note",
            "Memory bandwidth partitioning (MPAM) is not in use",
            evidence=mpam.evidence,
            cost="CPU Adam and the copies to the GPU compete for memory bandwidth.",
            remedy=(
                "It takes a kernel with MPAM, and root: `so-tui doctor --mpam` prints what an "
                "administrator can run."
            ),
        )


CHECKS = (
    _check_vendor,
    _check_driver,
    _check_driver_version,
    _check_compute_mode,
    _check_mig,
    _check_gpu_memory_node,
    _check_cache_in_gpu_memory,
    _check_mpam,
)


# Check the current state of GPUs: other users, memory errors, persistence mode, and kernels for
# their architecture.
#
# Codes: gpu-training, gpu-busy, gpu-memory-broken, gpu-memory-errors, persistence-off, arch-list-
# without-gpu, torch-too-old-for-gpu, gpu-without-bf16.


_AMPERE = (8, 0)
_BLACKWELL = (10, 0)
_CUDA_FOR_BLACKWELL = (12, 8)
_NAMED_ARCHITECTURES = frozenset(("Ada", "Ampere", "Blackwell", "Hopper", "Turing", "Volta"))


def _check_in_use(context: CheckContext) -> Findings:
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
                "gpu-training",
                "note",
                f"GPU {gpu.index} is training",
                evidence=(
                    f"process {named}; run {', '.join(sorted(Path(run).name for run in runs))}"
                ),
                cost="The GPU is occupied until that run ends.",
                remedy="Watch the run with `so-tui watch`; choose other GPUs with `--gpus`.",
            )
        else:
            yield Finding(
                "gpu-busy",
                "warning",
                f"Other processes use GPU {gpu.index}",
                evidence=f"process {named} (NVML)",
                cost="They take memory that plans count on, and GPU time.",
                remedy="End them if they are yours, or choose other GPUs with `--gpus`.",
            )


def _check_memory_errors(context: CheckContext) -> Findings:
    for gpu, health in _pairs(context):
        if health.row_remap_failed:
            yield Finding(
                "gpu-memory-broken",
                "blocks",
                f"The memory of GPU {gpu.index} is defective",
                evidence="row remapping failed (NVML)",
                cost="Values may be wrong without an error, or the run ends with an Xid error.",
                remedy=(
                    "Leave this GPU out with `--gpus`, and report it to the site: it must be "
                    "replaced."
                ),
            )
        elif health.row_remap_pending or health.uncorrected_ecc_errors:
            pending = "; a row is waiting to be remapped" if health.row_remap_pending else ""
            yield Finding(
                "gpu-memory-errors",
                "warning",
                f"GPU {gpu.index} had memory errors",
                evidence=(
                    f"{health.uncorrected_ecc_errors or 0} uncorrected ECC errors since the driver "
                    f"was loaded{pending} (NVML)"
                ),
                cost="Each of them ended a process, and more may follow.",
                remedy=(
                    "Ask the site to reset the GPU or to restart the node; use another GPU until "
                    "then."
                ),
            )


def _check_persistence(context: CheckContext) -> Findings:
    off = tuple(gpu for gpu, health in _pairs(context) if health.persistence is False)
    if off:
        yield Finding(
            "persistence-off",
            "note",
            "Persistence mode is off",
            evidence=f"GPU {gpu_list(off)} (NVML)",
            cost=(
                "The driver initialises again for each first process, which adds seconds to every "
                "start."
            ),
            remedy="As root: `nvidia-smi -pm 1`.",
        )


def _check_architectures(context: CheckContext) -> Findings:
    """Find GPUs for which torch has no kernels, or for which extensions would be compiled
    without.
    """
    capabilities = {
        health.compute_capability for _, health in _pairs(context) if health.compute_capability
    }
    listed = context.environment.get("TORCH_CUDA_ARCH_LIST", "")
    for capability in sorted(capabilities):
        number = f"{capability[0]}.{capability[1]}"
        if listed and not _covers(listed, capability):
            yield Finding(
                "arch-list-without-gpu",
                "warning",
                "TORCH_CUDA_ARCH_LIST leaves out this GPU",
                evidence=(
                    f"environment variable TORCH_CUDA_ARCH_LIST={listed}; the GPU has {number} "
                    "(NVML)"
                ),
                cost="Kernels compiled with this setting do not run on the GPU.",
                remedy=f"`export TORCH_CUDA_ARCH_LIST={number}`, or unset it.",
            )
        if capability < _AMPERE:
            yield Finding(
                "gpu-without-bf16",
                "blocks",
                "This GPU cannot compute in bf16",
                evidence=f"compute capability {number}, older than Ampere's 8.0 (NVML)",
                cost=(
                    "so-tui trains in bf16, which torch only emulates there: a step takes many "
                    "times as long, and kernels may fail."
                ),
                remedy="Use a GPU from the Ampere generation or newer.",
            )
        cuda = _version(context.machine.software.torch_cuda)
        if capability >= _BLACKWELL and cuda and cuda < _CUDA_FOR_BLACKWELL:
            yield Finding(
                "torch-too-old-for-gpu",
                "blocks",
                "This torch has no kernels for the GPU",
                evidence=(
                    f"compute capability {number}; torch is built for CUDA "
                    f"{context.machine.software.torch_cuda}"
                ),
                cost='Every kernel fails with "no kernel image is available".',
                remedy="Install a torch built for CUDA 12.8 or newer.",
            )


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


def _version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


HEALTH_CHECKS = (_check_in_use, _check_memory_errors, _check_persistence, _check_architectures)
