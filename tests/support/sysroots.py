"""Files of /sys and /proc of other machines, as published, from short descriptions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from so_tui.machine import Machine, cpu_ranges, inspect_machine
from tests.support.kfd import apu_files

GRACE_MIDR = "0x00000000410fd4f0\n"


def build_sysroot(tab_text: str, folder: Path) -> Path:
    r"""Write files below a folder from lines ``path<TAB>content`` with ``\n`` escaped."""
    for line in tab_text.splitlines():
        name, tab, content = line.partition("\t")
        if tab and name.startswith("/"):
            file = folder / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.replace("\\n", "\n"))
    return folder


def build_files(files: dict[str, str], folder: Path) -> Path:
    """Write files below a folder from their contents by absolute path."""
    return build_sysroot(
        "\n".join(f"{name}\t{content}".replace("\n", "\\n") for name, content in files.items()),
        folder,
    )


_inspected: dict[str, Machine] = {}


@dataclass(frozen=True)
class Host:
    """A machine in short."""

    cpu: dict[int, tuple[str, int]]
    """CPU nodes: node -> (cpulist, MiB)."""
    hbm: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Nodes of GPU memory: node -> (MiB, CPU node of the GPU)."""
    empty: tuple[int, ...] = ()
    """Nodes without CPUs and memory."""
    gpus: tuple[tuple[str, int, int], ...] = ()
    """PCI address, device id and NUMA node of each GPU."""
    grace: bool = True
    apus: bool = False
    """Whether its GPUs are AMD's and share the memory of their CPU nodes."""
    smt: tuple[tuple[int, ...], ...] = ()
    """CPUs of each physical core with several threads."""
    extra: dict[str, str] = field(default_factory=dict)

    def listing(self) -> str:
        """Return the files as text for ``build_sysroot``."""
        files = {
            "/sys/devices/system/cpu/online": ",".join(cpus for cpus, _ in self.cpu.values()) + "\n"
        }
        nodes = sorted([*self.cpu, *self.hbm, *self.empty])
        lists: dict[str, Iterable[int]] = {
            "online": nodes,
            "possible": nodes,
            "has_cpu": self.cpu,
            "has_memory": [*self.cpu, *self.hbm],
            "has_normal_memory": self.cpu,
        }
        files |= {
            f"/sys/devices/system/node/{name}": f"{cpu_ranges(listed)}\n"
            for name, listed in lists.items()
        }
        for node in nodes:
            cpus, mib = self.cpu.get(node, ("", self.hbm[node][0] if node in self.hbm else 0))
            folder = f"/sys/devices/system/node/node{node}"
            files[f"{folder}/cpulist"] = f"{cpus}\n"
            files[f"{folder}/distance"] = (
                " ".join(str(self._distance(node, other)) for other in nodes) + "\n"
            )
            files[f"{folder}/meminfo"] = "".join(
                f"Node {node} {name}: {kib:>14} kB\n"
                for name, kib in (
                    ("MemTotal", mib * 1024),
                    ("MemFree", mib * 512),
                    ("FilePages", mib * 1024 // 512),
                )
            )
        for core in self.smt:
            for cpu in core:
                files[f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"] = (
                    f"{cpu_ranges(core)}\n"
                )
        for address, device, node in self.gpus:
            folder = f"/sys/bus/pci/devices/{address}"
            vendor, kind = ("0x1002", "0x120000") if self.apus else ("0x10de", "0x030200")
            files |= {
                f"{folder}/vendor": f"{vendor}\n",
                f"{folder}/device": f"{device:#06x}\n",
                f"{folder}/class": f"{kind}\n",
            }
            files |= {
                f"{folder}/numa_node": f"{node}\n",
                f"{folder}/local_cpulist": f"{self.cpu[node][0] if node >= 0 else ''}\n",
            }
        if self.grace:
            files["/sys/devices/system/cpu/cpu0/regs/identification/midr_el1"] = GRACE_MIDR
            files["/sys/devices/system/memory/auto_online_blocks"] = "online_movable\n"
        elif self.apus:
            files["/proc/cpuinfo"] = (
                "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD Instinct MI300A "
                "Accelerator\n"
            )
            files |= apu_files([mib for _, mib in self.cpu.values()])
        else:
            files["/proc/cpuinfo"] = (
                "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) "
                "Platinum 8480+\n"
            )
        return "\n".join(
            f"{name}\t{content}".replace("\n", "\\n")
            for name, content in (files | self.extra).items()
        )

    def _distance(self, node: int, other: int) -> int:
        if node == other:
            return 10
        home, other_home = self._home(node), self._home(other)
        if node in self.cpu and other in self.cpu:
            return 40
        if node in self.cpu or other in self.cpu:
            return 80 if home == other_home else 120
        if len(self.hbm) < 2:
            return 255
        return 11 if self._gpu(node) == self._gpu(other) else 40

    def _gpu(self, node: int) -> int | None:
        """Return the first of the eight node ids of the GPU that includes this node."""
        return max((first for first in self.hbm if first <= node), default=None)

    def _home(self, node: int) -> int | None:
        """Return the CPU node: the node itself, or that of the GPU whose eight ids include it."""
        if node in self.cpu:
            return node
        owner = self._gpu(node)
        return self.hbm[owner][1] if owner is not None else None

    def inspected(self, folder: Path) -> Machine:
        """Inspect the machine, with its files below ``folder``."""
        return inspect_machine(build_sysroot(self.listing(), folder))

    def machine(self) -> Machine:
        """Inspect the machine, once in a session."""
        if repr(self) not in _inspected:
            with tempfile.TemporaryDirectory() as folder:
                _inspected[repr(self)] = self.inspected(Path(folder))
        return _inspected[repr(self)]


def _partitions(hbm: Iterable[int]) -> tuple[int, ...]:
    """Return the seven empty nodes that follow each GPU's own."""
    return tuple(first + offset for first in hbm for offset in range(1, 8))


ONE_GH200 = Host(
    cpu={0: ("0-71", 490037)},
    hbm={1: (97280, 0)},
    empty=_partitions([1]),
    gpus=(("0009:01:00.0", 0x2342, 0),),
)
ONE_GH200_CDMM = Host(
    cpu={0: ("0-71", 490037)},
    gpus=(("0009:01:00.0", 0x2342, 0),),
    extra={"/proc/driver/nvidia/params": 'CoherentGPUMemoryMode: "driver"\n'},
)
ONE_GH200_HBM_ONLY = Host(
    cpu={0: ("0-71", 490037)}, hbm={1: (97280, 0)}, gpus=(("0009:01:00.0", 0x2342, 0),)
)
QUAD_GH200 = Host(
    cpu={
        n: (f"{72 * n}-{72 * n + 71}", mib)
        for n, mib in enumerate((119808, 122688, 122688, 122624))
    },
    hbm={4 + 8 * g: (97280, g) for g in range(4)},
    empty=_partitions(4 + 8 * g for g in range(4)),
    gpus=tuple((f"00{g}9:01:00.0", 0x2342, g) for g in range(4)),
)
QUAD_GH200_HBM_ONLY = Host(
    cpu=QUAD_GH200.cpu, hbm={4 + g: (97280, g) for g in range(4)}, gpus=QUAD_GH200.gpus
)
NVL2 = Host(
    cpu={0: ("0-71", 483094), 1: ("72-143", 481158)},
    hbm={2: (146176, 0), 10: (146176, 1)},
    empty=_partitions([2, 10]),
    gpus=(("0009:01:00.0", 0x2348, 0), ("0019:01:00.0", 0x2348, 1)),
)
GB200 = Host(
    cpu={0: ("0-71", 489935), 1: ("72-143", 489795)},
    hbm={2: (188416, 0), 10: (188416, 0), 18: (188416, 1), 26: (188416, 1)},
    empty=_partitions([2, 10, 18, 26]),
    gpus=tuple(
        (f"{domain}:01:00.0", 0x2941, node)
        for domain, node in (("0008", 0), ("0009", 0), ("0018", 1), ("0019", 1))
    ),
)
GB200_CDMM = Host(cpu=GB200.cpu, gpus=GB200.gpus)
EIGHT_H100 = Host(
    cpu={0: ("0-55,112-167", 1031000), 1: ("56-111,168-223", 1032000)},
    gpus=tuple(
        (f"0000:{bus}:00.0", 0x2330, node)
        for bus, node in zip(
            ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db"), [0] * 4 + [1] * 4, strict=True
        )
    ),
    grace=False,
)
EIGHT_H200 = Host(
    cpu=EIGHT_H100.cpu,
    gpus=tuple((address, 0x2335, node) for address, _, node in EIGHT_H100.gpus),
    grace=False,
)
ONE_H200_GUEST = Host(cpu={0: ("0-15", 9435)}, gpus=(("0000:05:00.0", 0x2335, -1),), grace=False)
"""A virtual machine whose memory grows, and whose bus does not report the GPU's node."""
FOUR_H100_SUBNUMA = Host(
    cpu={n: (f"{28 * n}-{28 * n + 27}", 257000) for n in range(4)},
    gpus=tuple((f"0000:{bus}:00.0", 0x2330, n) for n, bus in enumerate(("18", "5d", "9a", "db"))),
    grace=False,
    smt=tuple((first, first + 1) for first in range(0, 112, 2)),
)
"""Two sockets of two nodes each (sub-NUMA); threads of a core have consecutive numbers."""
QUAD_MI300A = Host(
    cpu={
        n: (f"{24 * n}-{24 * n + 23},{96 + 24 * n}-{96 + 24 * n + 23}", mib)
        for n, mib in enumerate((128160, 128924, 128924, 128884))
    },
    gpus=tuple((f"000{n}:02:00.0", 0x74A0, n) for n in range(4)),
    grace=False,
    apus=True,
    smt=tuple((core, core + 96) for core in range(96)),
)
"""Four APUs as one GPU and one NUMA node each (SPX, NPS1)."""
ONE_GH200_MIG = Host(
    cpu=ONE_GH200.cpu,
    hbm={1: (1024, 0), 2: (47616, 0), 3: (47616, 0)},
    empty=tuple(range(4, 9)),
    gpus=ONE_GH200.gpus,
)
"""Two MIG instances, each with its memory in one of the nodes reserved for them."""


def fake_numa(count: int) -> Host:
    """Return a GH200 started with ``numa=fake=COUNT``: every CPU is in each of the first nodes."""
    return Host(
        cpu=dict.fromkeys(range(count), ("0-71", 490037 // count)),
        hbm={count: (97280, 0)},
        empty=_partitions([count]),
        gpus=(("0009:01:00.0", 0x2342, 0),),
    )
