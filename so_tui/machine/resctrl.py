"""Read the resctrl file system: what of caches and memory bandwidth can be partitioned, and between which groups it is.

Arm's MPAM, Intel's RDT and AMD's QoS have the same files. ``schemata`` has a line for each resource (``MB:1=100;2=100``), by L3 cache.
"""

from __future__ import annotations

import gzip
import re

from msgspec import Struct

from so_tui.machine.host import cpus_or_empty
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Mpam

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


# Detect memory bandwidth partitioning (MPAM), as far as an unprivileged user can see it.
#
# A mounted resctrl file system counts on any processor: Intel's RDT and AMD's QoS speak the same
# interface. Where it is not mounted, it takes a kernel with MPAM and firmware that describes the
# hardware, in this order.


_KERNEL_OPTION = re.compile(r"^CONFIG_\w*MPAM\w*=[ym]$", re.MULTILINE)
_OFF_ARGUMENTS = ("arm64.nompam", "arm64.nompam=1")


def read_mpam(files: SystemFiles, architecture: str) -> Mpam:
    """Return the furthest state reached, with its evidence."""
    if mounted := resctrl_mount(files):
        return Mpam(
            state="mounted", evidence=f"resctrl at {mounted[0]}: {_controls(files, mounted[0])}"
        )
    if architecture not in ("aarch64", "unknown"):
        return Mpam(state="off", evidence=f"{architecture}: MPAM is an Arm feature")
    if any(argument in _OFF_ARGUMENTS for argument in (files.text("/proc/cmdline") or "").split()):
        return Mpam(state="off", evidence="disabled on the kernel command line (arm64.nompam)")
    config = _kernel_config(files)
    in_kernel = _KERNEL_OPTION.search(config) if config is not None else None
    filesystems = files.text("/proc/filesystems")
    resctrl = "resctrl" in (filesystems or "").split()
    firmware = "MPAM" in files.names("/sys/firmware/acpi/tables")
    if in_kernel or resctrl:
        seen = in_kernel.group() if in_kernel else "resctrl in /proc/filesystems"
        if firmware:
            return Mpam(
                state="firmware",
                evidence=f"{seen}; the firmware has an MPAM table; resctrl is not mounted (needs root)",
            )
        return Mpam(state="kernel", evidence=f"{seen}; no MPAM table of the firmware is visible")
    if config is None and filesystems is None:
        return Mpam(
            state="unknown",
            evidence="neither the kernel's configuration nor /proc/filesystems can be read",
        )
    table = "; the firmware has an MPAM table" if firmware else ""
    return Mpam(state="off", evidence=f"this kernel has no MPAM support{table}")


def _kernel_config(files: SystemFiles) -> str | None:
    release = files.text("/proc/sys/kernel/osrelease")
    text = files.text(f"/boot/config-{release}") if release else None
    if text is not None:
        return text
    try:
        return gzip.decompress(files.path("/proc/config.gz").read_bytes()).decode(errors="replace")
    except (OSError, EOFError):
        return None


def _controls(files: SystemFiles, mount: str) -> str:
    controls = [
        name
        for name in files.names(f"{mount}/info")
        if files.exists(f"{mount}/info/{name}/num_closids")
    ]
    group = (files.text("/proc/self/cpu_resctrl_groups") or "").replace("\n", " ")
    return ", ".join(controls or ["no controls"]) + (
        f"; this process is in group {group}" if group else ""
    )
