"""Detect memory bandwidth partitioning (MPAM), as far as an unprivileged user can see it.

A mounted resctrl file system counts on any processor: Intel's RDT and AMD's QoS speak the same
interface. Where it is not mounted, it takes a kernel with MPAM and firmware that describes the
hardware, in this order.
"""

from __future__ import annotations

import gzip
import re

from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Mpam

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
    if any(argument in _OFF_ARGUMENTS for argument in files.text("/proc/cmdline").split()):
        return Mpam(state="off", evidence="disabled on the kernel command line (arm64.nompam)")
    config = _kernel_config(files)
    in_kernel = _KERNEL_OPTION.search(config)
    filesystems = files.text("/proc/filesystems")
    resctrl = "resctrl" in filesystems.split()
    firmware = "MPAM" in files.names("/sys/firmware/acpi/tables")
    if in_kernel or resctrl:
        seen = in_kernel.group() if in_kernel else "resctrl in /proc/filesystems"
        if firmware:
            return Mpam(
                state="firmware",
                evidence=(
                    f"{seen}; the firmware has an MPAM table; resctrl is not mounted (needs root)"
                ),
            )
        return Mpam(state="kernel", evidence=f"{seen}; no MPAM table of the firmware is visible")
    if not config and not filesystems:
        return Mpam(
            state="unknown",
            evidence="neither the kernel's configuration nor /proc/filesystems can be read",
        )
    table = "; the firmware has an MPAM table" if firmware else ""
    return Mpam(state="off", evidence=f"this kernel has no MPAM support{table}")


def resctrl_mount(files: SystemFiles) -> tuple[str, str] | None:
    """Return where resctrl is mounted, and its options."""
    mounts = (line.split() for line in files.text("/proc/mounts").splitlines())
    found = (mount for mount in mounts if len(mount) > 3 and mount[2] == "resctrl")
    return next(((mount[1], mount[3]) for mount in found), None)


def _kernel_config(files: SystemFiles) -> str:
    """Return the kernel's configuration; empty if it cannot be read."""
    if text := files.text(f"/boot/config-{files.text('/proc/sys/kernel/osrelease')}"):
        return text
    try:
        return gzip.decompress(files.path("/proc/config.gz").read_bytes()).decode(errors="replace")
    except (OSError, EOFError):
        return ""


def _controls(files: SystemFiles, mount: str) -> str:
    controls = [
        name
        for name in files.names(f"{mount}/info")
        if files.exists(f"{mount}/info/{name}/num_closids")
    ]
    group = files.text("/proc/self/cpu_resctrl_groups").replace("\n", " ")
    return ", ".join(controls or ["no controls"]) + (
        f"; this process is in group {group}" if group else ""
    )
