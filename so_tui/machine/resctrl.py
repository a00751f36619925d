"""Read the resctrl file system: what of caches and memory bandwidth can be partitioned, and between which groups it is.

Arm's MPAM, Intel's RDT and AMD's QoS have the same files. ``schemata`` has a line for each resource (``MB:1=100;2=100``), by L3 cache.
"""

from __future__ import annotations

import re

from msgspec import Struct

from so_tui.machine.cpulist import cpus_or_empty
from so_tui.machine.system_files import SystemFiles

MOUNT = "/sys/fs/resctrl"
"""Where resctrl is mounted by convention."""
_CACHES = ("L3", "L3CODE", "L3DATA")
"""With code and data prioritization, an L3 cache is two resources."""
_NO_GROUPS = ("info", "mon_groups", "mon_data")
_LINE = re.compile(r"^\s*(\w+):(.+)$", re.MULTILINE)
_PART = re.compile(r"(\d+)=([0-9a-fA-F]+)")


class Resctrl(Struct, frozen=True, kw_only=True):
    """A mounted resctrl file system."""

    mount: str
    most_groups: int
    """Partitions that the hardware has, the default group among them."""
    bandwidth: dict[int, int]
    """L3 cache -> memory bandwidth of the default group, in the unit of this hardware; empty where it cannot be limited by shares."""
    least_bandwidth: int
    bandwidth_step: int
    caches: dict[str, dict[int, int]]
    """Resource (``L3``) -> L3 cache -> mask of the default group."""
    least_bits: int
    """The fewest bits of a mask."""
    cache_of: dict[int, int]
    """CPU -> its L3 cache."""
    groups: dict[str, tuple[int, ...]]
    """Control group -> its CPUs, without the default group."""


def read_resctrl(files: SystemFiles) -> Resctrl | None:
    """Return what can be partitioned; None where resctrl is not mounted, or not readable."""
    mounted = resctrl_mount(files)
    if mounted is None:
        return None
    mount, options = mounted
    text = files.text(f"{mount}/schemata")
    if text is None:
        return None
    lines: dict[str, str] = dict(_LINE.findall(text))
    names = [name for name in ("MB", *_CACHES) if name in lines]
    in_bytes = "mba_MBps" in options.split(",")
    return Resctrl(
        mount=mount,
        most_groups=min(
            (files.integer(f"{mount}/info/{name}/num_closids") or 0 for name in names), default=0
        ),
        bandwidth=_parts(lines["MB"], 10) if "MB" in lines and not in_bytes else {},
        least_bandwidth=files.integer(f"{mount}/info/MB/min_bandwidth") or 1,
        bandwidth_step=files.integer(f"{mount}/info/MB/bandwidth_gran") or 1,
        caches={name: _parts(lines[name], 16) for name in _CACHES if name in lines},
        least_bits=max(
            (
                files.integer(f"{mount}/info/{name}/min_cbm_bits") or 1
                for name in _CACHES
                if name in lines
            ),
            default=1,
        ),
        cache_of=_caches_of_cpus(files),
        groups=read_groups(files, mount),
    )


def resctrl_mount(files: SystemFiles) -> tuple[str, str] | None:
    """Return where resctrl is mounted, and its options."""
    for line in (files.text("/proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[2] == "resctrl":
            return fields[1], fields[3]
    return None


def read_groups(files: SystemFiles, mount: str) -> dict[str, tuple[int, ...]]:
    """Return the control groups and their CPUs, without the default group."""
    names = (
        name
        for name in files.names(mount)
        if name not in _NO_GROUPS and files.exists(f"{mount}/{name}/cpus_list")
    )
    return {name: cpus_or_empty(files.text(f"{mount}/{name}/cpus_list")) for name in names}


def _parts(text: str, base: int) -> dict[int, int]:
    return {int(cache): int(value, base) for cache, value in _PART.findall(text)}


def _caches_of_cpus(files: SystemFiles) -> dict[int, int]:
    """Return the L3 cache of each CPU that is online."""
    found = {}
    for cpu in cpus_or_empty(files.text("/sys/devices/system/cpu/online")):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/cache"
        for index in files.names(folder):
            if (
                files.integer(f"{folder}/{index}/level") == 3
                and (cache := files.integer(f"{folder}/{index}/id")) is not None
            ):
                found[cpu] = cache
    return found
