"""What the control group of this process allows: CPUs, CPU time, memory. Both cgroup versions; None where nothing is limited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from so_tui.machine.cpulist import cpus_or_empty
from so_tui.machine.tree import Tree

_ROOT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number just below 2^63."""


def cpuset(tree: Tree) -> set[int] | None:
    """CPUs of the nearest group that has a cpuset."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    for folder in _folders(tree, "cpuset"):
        for name in names:
            if cpus := cpus_or_empty(tree.text(f"{folder}/{name}")):
                return set(cpus)
    return None


def cpu_quota(tree: Tree) -> float | None:
    """CPUs' worth of time, the smallest over the group and its ancestors."""
    quotas = [quota for folder in _folders(tree, "cpu") if (quota := _quota(tree, folder)) is not None]
    return min(quotas, default=None)


def memory_limit_bytes(tree: Tree) -> int | None:
    """The smallest memory limit over the group and its ancestors."""
    limits = []
    for folder in _folders(tree, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = tree.integer(f"{folder}/{name}")
            if limit is not None and limit < _UNLIMITED_BYTES:
                limits.append(limit)
    return min(limits, default=None)


def memory_left_bytes(tree: Tree) -> int | None:
    """How far the group and its ancestors are from their memory limits, the smallest; file cache counts as free, as the kernel drops it."""
    left = [room for folder in _folders(tree, "memory") if (room := _memory_left(tree, folder)) is not None]
    return min(left, default=None)


def process_limit(tree: Tree) -> int | None:
    """Most processes and threads, the smallest over the group and its ancestors."""
    limits = [limit for folder in _folders(tree, "pids") if (limit := tree.integer(f"{folder}/pids.max")) is not None]
    return min(limits, default=None)


def _memory_left(tree: Tree, folder: str) -> int | None:
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = tree.integer(f"{folder}/{limit_name}"), tree.integer(f"{folder}/{usage_name}")
        if limit is not None and usage is not None and limit < _UNLIMITED_BYTES:
            lines = (line.partition(" ") for line in (tree.text(f"{folder}/memory.stat") or "").splitlines())
            cache = sum(int(value) for name, _, value in lines if name in (f"{prefix}active_file", f"{prefix}inactive_file"))
            return max(0, limit - usage + cache)
    return None


def _quota(tree: Tree, folder: str) -> float | None:
    text = tree.text(f"{folder}/cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    quota_us, period_us = tree.integer(f"{folder}/cpu.cfs_quota_us"), tree.integer(f"{folder}/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _folders(tree: Tree, controller: str) -> Iterator[str]:
    """The folder of this process's group and of each ancestor, nearest first. Those that a container hides simply do not exist."""
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount = _ROOT
        elif controller in controllers.split(","):
            mount = f"{_ROOT}/{controllers}" if tree.exists(f"{_ROOT}/{controllers}") else f"{_ROOT}/{controller}"
        else:
            continue
        path = PurePosixPath(group)
        for folder in (path, *path.parents):
            yield f"{mount}{folder}".rstrip("/")
