"""Limits of this process's control group on CPUs, CPU time and memory, in both cgroup versions. None means no limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from so_tui.machine.cpulist import cpus_or_empty
from so_tui.machine.system_files import SystemFiles

_ROOT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60
"""Larger values mean no limit: cgroup v1 writes a number just below 2^63."""


def cpuset(files: SystemFiles) -> set[int] | None:
    """Return the CPUs of the nearest group that has a cpuset."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    for folder in _folders(files, "cpuset"):
        for name in names:
            if cpus := cpus_or_empty(files.text(f"{folder}/{name}")):
                return set(cpus)
    return None


def cpu_quota(files: SystemFiles) -> float | None:
    """Return the smallest limit on CPU time of the group and its ancestors, in CPUs."""
    quotas = [
        quota for folder in _folders(files, "cpu") if (quota := _quota(files, folder)) is not None
    ]
    return min(quotas, default=None)


def memory_limit_bytes(files: SystemFiles) -> int | None:
    """Return the smallest memory limit of the group and its ancestors."""
    limits = []
    for folder in _folders(files, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = files.integer(f"{folder}/{name}")
            if limit is not None and limit < _UNLIMITED_BYTES:
                limits.append(limit)
    return min(limits, default=None)


def memory_left_bytes(files: SystemFiles) -> int | None:
    """Return the smallest distance of the group and its ancestors from their memory limits. File cache counts as free."""
    left = [
        room
        for folder in _folders(files, "memory")
        if (room := _memory_left(files, folder)) is not None
    ]
    return min(left, default=None)


def process_limit(files: SystemFiles) -> int | None:
    """Return the smallest limit on processes and threads of the group and its ancestors."""
    limits = [
        limit
        for folder in _folders(files, "pids")
        if (limit := files.integer(f"{folder}/pids.max")) is not None
    ]
    return min(limits, default=None)


def _memory_left(files: SystemFiles, folder: str) -> int | None:
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = (
            files.integer(f"{folder}/{limit_name}"),
            files.integer(f"{folder}/{usage_name}"),
        )
        if limit is not None and usage is not None and limit < _UNLIMITED_BYTES:
            lines = (
                line.partition(" ")
                for line in (files.text(f"{folder}/memory.stat") or "").splitlines()
            )
            cache = sum(
                int(value)
                for name, _, value in lines
                if name in (f"{prefix}active_file", f"{prefix}inactive_file")
            )
            return max(0, limit - usage + cache)
    return None


def _quota(files: SystemFiles, folder: str) -> float | None:
    text = files.text(f"{folder}/cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    quota_us, period_us = (
        files.integer(f"{folder}/cpu.cfs_quota_us"),
        files.integer(f"{folder}/cpu.cfs_period_us"),
    )
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _folders(files: SystemFiles, controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and its ancestors, nearest first. Folders that a container hides do not exist."""
    for line in (files.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount = _ROOT
        elif controller in controllers.split(","):
            mount = (
                f"{_ROOT}/{controllers}"
                if files.exists(f"{_ROOT}/{controllers}")
                else f"{_ROOT}/{controller}"
            )
        else:
            continue
        path = PurePosixPath(group)
        for folder in (path, *path.parents):
            yield f"{mount}{folder}".rstrip("/")
