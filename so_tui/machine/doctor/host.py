"""Checks of the host's processors and scheduling: what may be used of them, and what the kernel does behind a run's back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from so_tui.machine import cgroup
from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.doctor.finding import Finding, Look

_FEW_CORES = 8
_SLOW_GOVERNORS = ("powersave", "conservative", "userspace")
_SELF_SCALING = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose `powersave` is the usual setting and does scale with load."""
_FEW_PROCESSES = 4096


def cores_away_from_gpus(look: Look) -> Iterator[Finding]:
    """A task's CPU mask that leaves out the node its GPU hangs off: some sites give every task the first cores of the node."""
    allowed = set(look.machine.allowed_cpus)
    far = [gpu for gpu in look.nvidia if gpu.cpus and not allowed & set(gpu.cpus)]
    if far:
        yield Finding(
            severity="warning",
            title="None of our cores is on the GPU's node",
            evidence=f"GPU {far[0].index} hangs off cores {cpu_ranges(far[0].cpus)}; we may use {cpu_ranges(allowed)}",
            cost="Every copy crosses the sockets, and CPU Adam works with another chip's memory.",
            remedy="Ask the scheduler for the cores of the GPU: `--cpus-per-task=72` with `--gpus-per-task=1`, or a whole node.",
        )


def memory_taken_for_a_cpus(look: Look) -> Iterator[Finding]:
    """As many nodes without CPUs as with them: DeepSpeed's launcher takes the former for fast memory of the CPU, and prefers it."""
    nodes = look.machine.numa_nodes
    bare = [node.id for node in nodes if not node.cpus]
    if look.nvidia and bare and 2 * len(bare) == len(nodes):
        yield Finding(
            severity="note",
            title="DeepSpeed's launcher takes the GPUs' memory for the processors' own",
            evidence=f"{len(nodes)} NUMA nodes, of which half ({cpu_ranges(bare)}) have no CPUs",
            cost="None for runs of so-tui: ranks bind themselves. By hand, the optimizer's states come to lie in the GPUs' memory.",
            remedy="Nothing must be done; for trainers started by hand: `numactl -m` with the CPU nodes, no `--bind_cores_to_rank`.",
        )


def fake_nodes(look: Look) -> Iterator[Finding]:
    """Several nodes that list the same CPUs: a kernel started with ``numa=fake``."""
    nodes = look.machine.cpu_nodes
    shared = [node.id for node in nodes if sum(other.cpus == node.cpus for other in nodes) > 1]
    if look.grace and shared:
        yield Finding(
            severity="note",
            title="The kernel cuts memory into fake NUMA nodes",
            evidence=f"nodes {cpu_ranges(shared)} list the same CPUs (numa=fake)",
            cost="None for training: ranks are bound to all the pieces. Older kernels mix the GPU's memory into one of them.",
            remedy="Nothing must be done; without `numa=fake` among the kernel's arguments the map is plainer.",
        )


def few_cores(look: Look) -> Iterator[Finding]:
    gpus, cores = len(look.nvidia), len(look.machine.allowed_cpus)
    if gpus and cores < _FEW_CORES * gpus:
        yield Finding(
            severity="warning",
            title="Few cores for CPU Adam",
            evidence=f"{cores} cores may be used, for {gpus} GPU{'s' if gpus > 1 else ''}",
            cost="Offload hides behind the GPU's work only while Adam has cores enough: steps become several times longer.",
            remedy="Ask the scheduler for more cores per GPU (72 make a whole Grace), or offload less.",
        )


def cpu_quota(look: Look) -> Iterator[Finding]:
    quota = cgroup.cpu_quota(look.tree) if look.tree else None
    if quota is not None and quota < len(look.machine.allowed_cpus):
        yield Finding(
            severity="warning",
            title="A control group limits CPU time below the cores that may be used",
            evidence=f"time of {quota:g} CPUs for {len(look.machine.allowed_cpus)} cores",
            cost="Threads that are bound to a core are stopped for parts of every tenth of a second; the slowest decides the step.",
            remedy="Give the container whole cores (`--cpuset-cpus`) instead of a share of time (`--cpus`).",
        )


def numa_balancing(look: Look) -> Iterator[Finding]:
    several = sum(node.memory_total_bytes > 0 for node in look.machine.numa_nodes) > 1
    if several and look.nvidia and look.text("/proc/sys/kernel/numa_balancing").strip() not in ("", "0"):
        yield Finding(
            severity="warning" if look.grace else "note",
            title="Automatic NUMA balancing is on",
            evidence=f"/proc/sys/kernel/numa_balancing: {look.text('/proc/sys/kernel/numa_balancing').strip()}",
            cost="The kernel unmaps pages to see who uses them, and moves them: slower memory for ranks that are bound already.",
            remedy="As root: `echo 0 > /proc/sys/kernel/numa_balancing` (NVIDIA advises it for Grace Hopper).",
        )


def governor(look: Look) -> Iterator[Finding]:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    name, scaling = look.text(f"{folder}/scaling_governor").strip(), look.text(f"{folder}/scaling_driver").strip()
    if look.nvidia and name in _SLOW_GOVERNORS and scaling not in _SELF_SCALING:
        yield Finding(
            severity="warning",
            title=f"The processor's frequency governor is {name}",
            evidence=f"{folder}/scaling_governor: {name} (driver {scaling or 'unknown'})",
            cost="Cores stay at a low frequency: CPU Adam takes longer.",
            remedy="As root: `cpupower frequency-set -g performance`.",
        )


def process_limit(look: Look) -> Iterator[Finding]:
    limit = cgroup.process_limit(look.tree) if look.tree else None
    if limit is not None and limit < _FEW_PROCESSES and limit < 100 + 4 * len(look.machine.allowed_cpus):
        yield Finding(
            severity="warning",
            title="A control group limits processes and threads",
            evidence=f"pids.max: {limit}, for {len(look.machine.allowed_cpus)} cores",
            cost="Each rank starts a few threads per core; the one too many ends the run.",
            remedy="Start the container with a higher limit (`--pids-limit`).",
        )


def login_node(look: Look) -> Iterator[Finding]:
    """Slurm's commands are here and this is no job: what is seen may not be what a job gets."""
    if "SLURM_JOB_ID" not in look.environment and shutil.which("sbatch", path=look.environment.get("PATH", "")):
        yield Finding(
            severity="note",
            title="This may be the login node of a cluster",
            evidence="sbatch is on PATH, and SLURM_JOB_ID is not set",
            cost="Compute nodes may have other GPUs, memory and cores than this host.",
            remedy="In a job: `so-tui inspect --json > node.json`; then here `so-tui plan --machine node.json`.",
        )


CHECKS = (
    cores_away_from_gpus,
    memory_taken_for_a_cpus,
    fake_nodes,
    few_cores,
    cpu_quota,
    numa_balancing,
    governor,
    process_limit,
    login_node,
)
