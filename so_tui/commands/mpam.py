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
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from so_tui.machine.host import cpu_ranges, cpus_or_empty
from so_tui.machine.resctrl import resctrl_mount
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan, RankBinding
from so_tui.spec.errors import reject
from so_tui.trust.text import printable_line

MOUNT = "/sys/fs/resctrl"
"""Where resctrl is mounted by convention."""
_CACHES = ("L3", "L3CODE", "L3DATA")
"""With code and data prioritization, an L3 cache is two resources."""
_NO_GROUPS = ("info", "mon_groups", "mon_data")
_LINE = re.compile(r"^\s*(\w+):(.+)$", re.MULTILINE)
_PART = re.compile(r"(\d+)=([0-9a-fA-F]+)")

ADAM_BANDWIDTH = 0.2
ADAM_CACHE = 1 / 3
_LEAST_BANDWIDTH = 0.06
"""Grace's hardware keeps at least 5 % between the least and the most bandwidth of a partition
(erratum T241-MPAM-4).
"""
_GROUPS = 3
"""Both partitions, and the default group."""

Role = Literal["main", "adam"]

_NOT_MOUNTED = """\
mount -t resctrl resctrl {mount}
echo 'Mounted. Now run "so-tui doctor --mpam" again: \
it reads the limits of this hardware and prints the partitions.'"""


class Resctrl(Struct, frozen=True, kw_only=True):
    """A mounted resctrl file system."""

    mount: str
    most_groups: int
    """Partitions that the hardware has, the default group among them."""
    bandwidth: dict[int, int]
    """L3 cache -> memory bandwidth of the default group, in the unit of this hardware; empty where
    it cannot be limited by shares.
    """
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


class Partition(Struct, frozen=True, kw_only=True):
    """One control group."""

    role: Role
    cpus: tuple[int, ...]
    schemata: tuple[str, ...]
    """Its lines: ``MB:1=20``, ``L3:1=f``."""


def print_mpam_script(machine: Machine, plan: Plan | None, files: SystemFiles | None = None) -> int:
    """Print the script for the binding of a plan, or of a run on all GPUs.

    Args:
        machine: This host.
        plan: Of a preset, if one was named.
        files: This host's /sys and /proc, or a copy.

    Raises:
        InputError: Nothing can be partitioned here.
    """
    files = files or SystemFiles()
    found = _read_resctrl(files)
    if found is None:
        if "resctrl" not in (files.text("/proc/filesystems") or "").split():
            raise reject(
                "no-resctrl",
                "--mpam",
                machine.label,
                "the kernel has no resctrl file system",
                "It takes a kernel with MPAM (Arm), RDT (Intel) or QoS (AMD).",
            )
        print(_mount_script(machine.label))
        return 0
    bindings = plan.binding if plan is not None else _on_all_gpus(machine)
    wanted = _partitions(found, bindings, machine.label)
    print(_partition_script(machine.label, found, wanted))
    return 0


def _read_resctrl(files: SystemFiles) -> Resctrl | None:
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
        groups=_read_groups(files, mount),
    )


def _read_groups(files: SystemFiles, mount: str) -> dict[str, tuple[int, ...]]:
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


def _partitions(
    found: Resctrl, bindings: Sequence[RankBinding], host: str
) -> tuple[Partition, Partition]:
    """Return a partition of the main cores of all ranks and one of their Adam cores."""
    adam = {cpu for binding in bindings for cpu in binding.adam_cpus}
    main = {cpu for binding in bindings for cpu in binding.main_cpus} - adam
    if not adam or not main:
        raise reject(
            "no-adam-cores",
            "--mpam",
            host,
            "no rank has Adam cores beside its main cores",
            "Name a preset that trains with superoffload, on two cores or more.",
        )
    if len(found.groups) + _GROUPS > found.most_groups:
        raise reject(
            "too-few-partitions",
            "--mpam",
            host,
            "the hardware has no two partitions left",
            "Remove groups in /sys/fs/resctrl that are not used.",
        )
    if any((adam | main).intersection(cpus) for cpus in found.groups.values()):
        raise reject(
            "cores-partitioned",
            "--mpam",
            host,
            "a group in /sys/fs/resctrl has some of the run's cores already",
            "Remove that group (`rmdir`) first, or keep it.",
        )
    wanted = (_partition(found, "main", main), _partition(found, "adam", adam))
    if not any(partition.schemata for partition in wanted):
        raise reject(
            "no-partitions",
            "--mpam",
            host,
            "neither memory bandwidth nor the L3 cache can be partitioned by shares",
            "Mount resctrl without `mba_MBps`, if it has that option.",
        )
    return wanted


def _partition(found: Resctrl, role: Role, cpus: set[int]) -> Partition:
    lines = tuple(_schemata(found, role == "adam", {found.cache_of.get(cpu) for cpu in cpus}))
    return Partition(role=role, cpus=tuple(sorted(cpus)), schemata=lines)


def _schemata(found: Resctrl, adam: bool, caches: Iterable[int | None]) -> Iterator[str]:
    """Yield the lines of a partition for the L3 caches of its CPUs; where those are not known, for
    all.
    """
    own = set(caches)

    def line(name: str, values: dict[int, str]) -> Iterator[str]:
        parts = [
            f"{cache}={value}" for cache, value in values.items() if cache in own or None in own
        ]
        if parts:
            yield f"{name}:{';'.join(parts)}"

    yield from line(
        "MB",
        {
            cache: str(_bandwidth(found, full) if adam else full)
            for cache, full in found.bandwidth.items()
        },
    )
    for name, masks in found.caches.items():
        yield from line(
            name,
            {cache: f"{_cut(mask, found.least_bits)[adam]:x}" for cache, mask in masks.items()},
        )


def _bandwidth(found: Resctrl, full: int) -> int:
    """Return the bandwidth of the Adam cores, in whole steps."""
    least = max(found.least_bandwidth, math.ceil(_LEAST_BANDWIDTH * full))
    steps = math.ceil(round(max(least, ADAM_BANDWIDTH * full) / found.bandwidth_step, 6))
    return min(full, steps * found.bandwidth_step)


def _cut(mask: int, least_bits: int) -> tuple[int, int]:
    """Return the masks of main and Adam cores: parts of ``mask``, or all of it for both where it
    has too few bits.
    """
    first = mask & -mask
    low = max(least_bits, round(mask.bit_count() * ADAM_CACHE))
    contiguous = (mask + first) & mask == 0  # as all but a few processors have them
    if not contiguous or mask.bit_count() - low < max(1, least_bits):
        return mask, mask
    adam = ((1 << low) - 1) * first
    return mask & ~adam, adam


def _partition_script(host: str, found: Resctrl, wanted: Sequence[Partition]) -> str:
    """Return a script that makes the groups."""
    folders = [shlex.quote(f"{found.mount}/so-tui-{partition.role}") for partition in wanted]
    made = [
        line
        for folder, partition in zip(folders, wanted, strict=True)
        for line in _group(folder, partition)
    ]
    return _script(
        host,
        "partitions cache and memory bandwidth along main and Adam cores",
        made,
        [f"rmdir {' '.join(folders)}"],
    )


def _group(folder: str, partition: Partition) -> Iterator[str]:
    yield f"mkdir {folder}"
    yield from (f"echo {shlex.quote(line)} > {folder}/schemata" for line in partition.schemata)
    yield f"echo {cpu_ranges(partition.cpus)} > {folder}/cpus_list"


def _mount_script(host: str) -> str:
    """Return a script that mounts resctrl, whose limits are only known then."""
    return _script(host, "mounts resctrl", [_NOT_MOUNTED.format(mount=MOUNT)], [f"umount {MOUNT}"])


def _script(host: str, does: str, apply: Sequence[str], undo: Sequence[str]) -> str:
    lines = [
        "#!/bin/sh",
        f"# {printable_line(host)}: {does} for so-tui. Run it as root, or as who may write there;",
        "# with the argument `undo` it takes everything back. Nothing of it survives a reboot.",
        "set -eu",
        'if [ "${1:-}" = undo ]; then',
        *(f"    {line}" for line in undo),
        "    exit",
        "fi",
        *apply,
    ]
    return "\n".join(lines)


def _on_all_gpus(machine: Machine) -> tuple[RankBinding, ...]:
    from so_tui.plan.binding import bind_ranks, whole_gpus
    from so_tui.spec.run_spec import OffloadSpec

    gpus = tuple(gpu.index for gpu in whole_gpus(machine)) or 1
    return bind_ranks(
        machine,
        gpus,
        mode="superoffload",
        cpu_adam_cores_fraction=OffloadSpec().cpu_adam_cores_fraction,
    )
