"""``doctor --mpam``: a script that partitions memory bandwidth and cache between main and Adam
cores, and takes that back.

SuperOffload's authors published the split for a Grace: the main cores keep all bandwidth and two
thirds of the L3 cache, the Adam cores, which stream through memory, get 20 % and the other third.
Arm's MPAM, Intel's RDT and AMD's QoS have the same files: ``schemata`` has a line for each resource
(``MB:1=100;2=100``), by L3 cache. Who may write to resctrl runs the script; so-tui itself writes
nothing there.

Problem codes:
    no-resctrl: The kernel has no resctrl file system.
    no-adam-cores, no-partitions, too-few-partitions, cores-partitioned: Nothing can be partitioned
    here.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from so_tui.machine.host import cpu_ranges, cpus_or_empty
from so_tui.machine.resctrl import resctrl_mount
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine
from so_tui.plan.plan import Binding, Plan, RankBinding
from so_tui.spec.errors import reject
from so_tui.trust.text import printable_line

MOUNT = "/sys/fs/resctrl"
"""Where resctrl is mounted by convention."""
_CACHES = ("L3", "L3CODE", "L3DATA")
"""With code and data prioritization, an L3 cache is two resources."""
_NO_GROUPS = ("info", "mon_groups", "mon_data")
_LINE = re.compile(r"^\s*(\w+):(.+)$", re.MULTILINE)
_PART = re.compile(r"(\d+)=([0-9a-fA-F]+)")

_ADAM_BANDWIDTH = 1 / 5
"""Above the 5 % that Grace's hardware keeps between the least and the most bandwidth of a partition
(erratum T241-MPAM-4).
"""
_ADAM_CACHE = 1 / 3
_GROUPS = 3
"""Both partitions, and the default group."""

Role = Literal["main", "adam"]

_NOT_MOUNTED = """\
mount -t resctrl resctrl {mount}
echo 'Mounted. Now run "so-tui doctor --mpam" again: \
it reads the limits of this hardware and prints the partitions.'"""


class _Resctrl(Struct, frozen=True, kw_only=True):
    """A mounted resctrl file system."""

    mount: str
    most_groups: int
    """Partitions that the hardware has, the default group among them."""
    bandwidth: dict[int, int]
    """L3 cache -> memory bandwidth of the default group, in the unit of this hardware; empty where
    it cannot be limited by shares.
    """
    least_bandwidth: int
    caches: dict[str, dict[int, int]]
    """Resource (``L3``) -> L3 cache -> mask of the default group."""
    least_bits: int
    """The fewest bits of a mask."""
    groups: dict[str, tuple[int, ...]]
    """Control group -> its CPUs, without the default group."""


class _Partition(Struct, frozen=True, kw_only=True):
    """One control group."""

    role: Role
    cpus: tuple[int, ...]
    schemata: tuple[str, ...]
    """Its lines: ``MB:1=20``, ``L3:1=f``."""


def print_mpam_script(machine: Machine, plan: Plan | None) -> int:
    """Print the script for the binding of a plan, or of a run on all GPUs.

    Args:
        machine: This host.
        plan: Of a preset, if one was named.

    Raises:
        InputError: Nothing can be partitioned here.
    """
    files = SystemFiles()
    if found := _read_resctrl(files):
        bindings = plan.binding if plan is not None else _on_all_gpus(machine)
        print(_partition_script(machine.label, found, _partitions(found, bindings, machine.label)))
        return 0
    if "resctrl" not in files.text("/proc/filesystems").split():
        raise reject(
            "no-resctrl",
            "--mpam",
            machine.label,
            "the kernel has no resctrl file system",
            "It takes a kernel with MPAM (Arm), RDT (Intel) or QoS (AMD).",
        )
    # The limits of the hardware are only known once resctrl is mounted.
    print(
        _script(
            machine.label, "mounts resctrl", [_NOT_MOUNTED.format(mount=MOUNT)], f"umount {MOUNT}"
        )
    )
    return 0


def _read_resctrl(files: SystemFiles) -> _Resctrl | None:
    """Return what can be partitioned; None where resctrl is not mounted, or not readable."""
    mount, options = resctrl_mount(files) or ("", "")
    text = files.text(f"{mount}/schemata")
    if not mount or not text:
        return None

    def limit(name: str, default: int = 1) -> int:
        return files.integer(f"{mount}/info/{name}") or default

    lines: dict[str, str] = dict(_LINE.findall(text))
    caches = [name for name in _CACHES if name in lines]
    resources = ["MB", *caches] if "MB" in lines else caches
    in_bytes = "mba_MBps" in options.split(",")
    return _Resctrl(
        mount=mount,
        most_groups=min((limit(f"{name}/num_closids", 0) for name in resources), default=0),
        bandwidth={} if in_bytes else _parts(lines.get("MB", ""), 10),
        least_bandwidth=limit("MB/min_bandwidth"),
        caches={name: _parts(lines[name], 16) for name in caches},
        least_bits=max((limit(f"{name}/min_cbm_bits") for name in caches), default=1),
        groups={
            name: cpus_or_empty(files.text(f"{mount}/{name}/cpus_list"))
            for name in files.names(mount)
            if name not in _NO_GROUPS and files.exists(f"{mount}/{name}/cpus_list")
        },
    )


def _parts(text: str, base: int) -> dict[int, int]:
    return {int(cache): int(value, base) for cache, value in _PART.findall(text)}


def _partitions(
    found: _Resctrl, bindings: Sequence[RankBinding], host: str
) -> tuple[_Partition, _Partition]:
    """Return a partition of the main cores of all ranks and one of their Adam cores."""
    adam = {cpu for binding in bindings for cpu in binding.adam_cpus}
    main = {cpu for binding in bindings for cpu in binding.main_cpus} - adam
    wanted = (_partition(found, "main", main), _partition(found, "adam", adam))
    for wrong, problem in (
        (
            not adam or not main,
            reject(
                "no-adam-cores",
                "--mpam",
                host,
                "no rank has Adam cores beside its main cores",
                "Name a preset that trains with superoffload, on two cores or more.",
            ),
        ),
        (
            len(found.groups) + _GROUPS > found.most_groups,
            reject(
                "too-few-partitions",
                "--mpam",
                host,
                "the hardware has no two partitions left",
                "Remove groups in /sys/fs/resctrl that are not used.",
            ),
        ),
        (
            any((adam | main).intersection(cpus) for cpus in found.groups.values()),
            reject(
                "cores-partitioned",
                "--mpam",
                host,
                "a group in /sys/fs/resctrl has some of the run's cores already",
                "Remove that group (`rmdir`) first, or keep it.",
            ),
        ),
        (
            not any(partition.schemata for partition in wanted),
            reject(
                "no-partitions",
                "--mpam",
                host,
                "neither memory bandwidth nor the L3 cache can be partitioned by shares",
                "Mount resctrl without `mba_MBps`, if it has that option.",
            ),
        ),
    ):
        if wrong:
            raise problem
    return wanted


def _partition(found: _Resctrl, role: Role, cpus: set[int]) -> _Partition:
    """Return a partition with lines for all L3 caches: those of others do not concern its CPUs."""
    adam = role == "adam"
    values: dict[str, dict[int, object]] = {
        "MB": {
            # The kernel rounds it to steps of the hardware, and refuses less than the least.
            cache: max(found.least_bandwidth, math.ceil(round(_ADAM_BANDWIDTH * full, 6)))
            if adam
            else full
            for cache, full in found.bandwidth.items()
        }
    }
    for name, masks in found.caches.items():
        values[name] = {
            cache: f"{_cut(mask, found.least_bits)[adam]:x}" for cache, mask in masks.items()
        }
    return _Partition(
        role=role,
        cpus=tuple(sorted(cpus)),
        schemata=tuple(
            f"{name}:{';'.join(f'{cache}={value}' for cache, value in parts.items())}"
            for name, parts in values.items()
            if parts
        ),
    )


def _cut(mask: int, least_bits: int) -> tuple[int, int]:
    """Return the masks of main and Adam cores: parts of ``mask``, or all of it for both where it
    has too few bits.
    """
    first = mask & -mask
    low = max(least_bits, round(mask.bit_count() * _ADAM_CACHE))
    contiguous = (mask + first) & mask == 0  # as all but a few processors have them
    if not contiguous or mask.bit_count() - low < max(1, least_bits):
        return mask, mask
    adam = ((1 << low) - 1) * first
    return mask & ~adam, adam


def _partition_script(host: str, found: _Resctrl, wanted: Sequence[_Partition]) -> str:
    """Return a script that makes the groups."""
    made, folders = [], []
    for partition in wanted:
        folder = shlex.quote(f"{found.mount}/so-tui-{partition.role}")
        folders.append(folder)
        made.append(f"mkdir {folder}")
        made += [f"echo {shlex.quote(line)} > {folder}/schemata" for line in partition.schemata]
        made.append(f"echo {cpu_ranges(partition.cpus)} > {folder}/cpus_list")
    return _script(
        host,
        "partitions cache and memory bandwidth along main and Adam cores",
        made,
        f"rmdir {' '.join(folders)}",
    )


def _script(host: str, does: str, apply: Sequence[str], undo: str) -> str:
    return "\n".join(
        [
            "#!/bin/sh",
            f"# {printable_line(host)}: {does} for so-tui. "
            "Run it as root, or as who may write there;",
            "# with the argument `undo` it takes everything back. Nothing of it survives a reboot.",
            "set -eu",
            'if [ "${1:-}" = undo ]; then',
            f"    {undo}",
            "    exit",
            "fi",
            *apply,
        ]
    )


def _on_all_gpus(machine: Machine) -> Binding:
    from so_tui.plan.binding import bind_ranks, whole_gpus
    from so_tui.spec.run_spec import OffloadSpec

    return bind_ranks(
        machine,
        tuple(gpu.index for gpu in whole_gpus(machine)) or 1,
        cpu_adam_cores_fraction=OffloadSpec().cpu_adam_cores_fraction,
    )
