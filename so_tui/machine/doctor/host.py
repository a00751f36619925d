"""Check the host's processors and scheduling: which cores may be used, and kernel settings that slow a run down.

Codes: cores-far-from-gpu, gpu-memory-taken-for-hbm, fake-numa, few-cores, cpu-quota, numa-balancing, slow-governor, process-limit,
login-node.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from so_tui.machine import cgroup
from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.doctor.types import CheckContext, Finding
from so_tui.units import plural

_FEW_CORES = 8
"""Cores per GPU below which CPU Adam is slow."""
_SLOW_GOVERNORS = ("powersave", "conservative", "userspace")
_SELF_SCALING = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers that scale with load even with their default governor, ``powersave``."""
_FEW_PROCESSES = 4096


def check_cores_near_gpus(context: CheckContext) -> Iterator[Finding]:
    """Find a CPU mask without any core of a GPU's node: some sites give every task the first cores of the host."""
    allowed = set(context.machine.allowed_cpus)
    far = [gpu for gpu in context.nvidia_gpus if gpu.cpus and not allowed & set(gpu.cpus)]
    if far:
        yield Finding(
            code="cores-far-from-gpu",
            severity="warning",
            title="No allowed core is on the GPU's NUMA node",
            evidence=f"GPU {far[0].index} is attached to cores {cpu_ranges(far[0].cpus)}; allowed cores: {cpu_ranges(allowed)}",
            cost="Every copy crosses sockets, and CPU Adam uses another chip's memory.",
            remedy="Request the cores of the GPU from the scheduler: `--cpus-per-task=72` with `--gpus-per-task=1`, or a whole node.",
        )


def check_nodes_without_cpus(context: CheckContext) -> Iterator[Finding]:
    """Find hosts where half of the NUMA nodes have no CPUs: DeepSpeed's launcher takes those for fast CPU memory and prefers them."""
    nodes = context.machine.numa_nodes
    bare = [node.id for node in nodes if not node.cpus]
    if context.nvidia_gpus and bare and 2 * len(bare) == len(nodes):
        yield Finding(
            code="gpu-memory-taken-for-hbm",
            severity="note",
            title="DeepSpeed's launcher mistakes GPU memory for CPU memory",
            evidence=f"{len(nodes)} NUMA nodes, half of them ({cpu_ranges(bare)}) without CPUs",
            cost="None for so-tui, whose ranks bind themselves. In other trainers the optimizer states may be allocated in GPU memory.",
            remedy="No action needed. For other trainers: `numactl -m` with the CPU nodes, without `--bind_cores_to_rank`.",
        )


def check_fake_nodes(context: CheckContext) -> Iterator[Finding]:
    """Find NUMA nodes that list the same CPUs: a kernel started with ``numa=fake``."""
    nodes = context.machine.cpu_nodes
    shared = [node.id for node in nodes if sum(other.cpus == node.cpus for other in nodes) > 1]
    if context.is_grace and shared:
        yield Finding(
            code="fake-numa",
            severity="note",
            title="The kernel splits memory into fake NUMA nodes",
            evidence=f"nodes {cpu_ranges(shared)} list the same CPUs (numa=fake)",
            cost="None for training: ranks are bound to all of these nodes. Older kernels may mix GPU memory into one of them.",
            remedy="No action needed. Without the kernel argument `numa=fake` the NUMA map is simpler.",
        )


def check_core_count(context: CheckContext) -> Iterator[Finding]:
    gpus, cores = len(context.nvidia_gpus), len(context.machine.allowed_cpus)
    if gpus and cores < _FEW_CORES * gpus:
        yield Finding(
            code="few-cores",
            severity="warning",
            title="Few cores for CPU Adam",
            evidence=f"{plural(cores, 'allowed core')} for {plural(gpus, 'GPU')}",
            cost="CPU Adam is too slow to overlap with the GPU's work: steps take several times longer.",
            remedy="Request more cores per GPU from the scheduler (a whole Grace has 72), or offload less.",
        )


def check_cpu_quota(context: CheckContext) -> Iterator[Finding]:
    quota = cgroup.cpu_quota(context.files) if context.files else None
    if quota is not None and quota < len(context.machine.allowed_cpus):
        yield Finding(
            code="cpu-quota",
            severity="warning",
            title="A control group limits CPU time below the allowed cores",
            evidence=f"CPU time of {quota:g} cores for {len(context.machine.allowed_cpus)} allowed cores",
            cost="Threads bound to a core are paused during part of every 100 ms; the slowest thread determines the step time.",
            remedy="Give the container whole cores (`--cpuset-cpus`) instead of a share of CPU time (`--cpus`).",
        )


def check_numa_balancing(context: CheckContext) -> Iterator[Finding]:
    several = sum(node.memory_total_bytes > 0 for node in context.machine.numa_nodes) > 1
    setting = context.text("/proc/sys/kernel/numa_balancing").strip()
    if several and context.nvidia_gpus and setting not in ("", "0"):
        yield Finding(
            code="numa-balancing",
            severity="warning" if context.is_grace else "note",
            title="Automatic NUMA balancing is on",
            evidence=f"/proc/sys/kernel/numa_balancing: {setting}",
            cost="The kernel unmaps and moves pages to follow their users, which slows memory down for ranks that are already bound.",
            remedy="As root: `echo 0 > /proc/sys/kernel/numa_balancing` (NVIDIA recommends it for Grace Hopper).",
        )


def check_governor(context: CheckContext) -> Iterator[Finding]:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    name, scaling = (
        context.text(f"{folder}/scaling_governor").strip(),
        context.text(f"{folder}/scaling_driver").strip(),
    )
    if context.nvidia_gpus and name in _SLOW_GOVERNORS and scaling not in _SELF_SCALING:
        yield Finding(
            code="slow-governor",
            severity="warning",
            title=f"The CPU frequency governor is {name}",
            evidence=f"{folder}/scaling_governor: {name} (driver {scaling or 'unknown'})",
            cost="Cores stay at a low frequency, which slows down CPU Adam.",
            remedy="As root: `cpupower frequency-set -g performance`.",
        )


def check_process_limit(context: CheckContext) -> Iterator[Finding]:
    limit = cgroup.process_limit(context.files) if context.files else None
    if (
        limit is not None
        and limit < _FEW_PROCESSES
        and limit < 100 + 4 * len(context.machine.allowed_cpus)
    ):
        yield Finding(
            code="process-limit",
            severity="warning",
            title="A control group limits the number of threads",
            evidence=f"pids.max: {limit}, for {plural(len(context.machine.allowed_cpus), 'core')}",
            cost="Each rank starts a few threads per core; exceeding the limit ends the run.",
            remedy="Start the container with a higher limit (`--pids-limit`).",
        )


def check_login_node(context: CheckContext) -> Iterator[Finding]:
    """Find a host with Slurm's commands outside of a job: compute nodes may be different."""
    if "SLURM_JOB_ID" not in context.environment and shutil.which(
        "sbatch", path=context.environment.get("PATH", "")
    ):
        yield Finding(
            code="login-node",
            severity="note",
            title="This may be the login node of a cluster",
            evidence="sbatch is on PATH, and SLURM_JOB_ID is not set",
            cost="Compute nodes may have other GPUs, memory and cores than this host.",
            remedy="In a job: `so-tui inspect --json > node.json`. Then here: `so-tui plan --machine node.json`.",
        )


CHECKS = (
    check_cores_near_gpus,
    check_nodes_without_cpus,
    check_fake_nodes,
    check_core_count,
    check_cpu_quota,
    check_numa_balancing,
    check_governor,
    check_process_limit,
    check_login_node,
)
