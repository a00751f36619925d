"""Files of /sys and /proc of other machines, as published, from short descriptions."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from so_tui.machine import Machine, cpu_ranges, inspect_machine

DATA = Path(__file__).parents[1] / "data"
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
    return build_sysroot(listed(files), folder)


def listed(files: dict[str, str]) -> str:
    """Return files as the text that ``build_sysroot`` reads."""
    return "\n".join(f"{name}\t{text}".replace("\n", "\\n") for name, text in files.items())


CPU = "processor\t: 0\nvendor_id\t: {}\nmodel name\t: {}\n"
INTEL_CPU = CPU.format("GenuineIntel", "Intel(R) Xeon(R) Platinum 8480+")
AMD_CPU = CPU.format("AuthenticAMD", "AMD Instinct MI300A Accelerator")
_inspected: dict[str, Machine] = {}


@dataclass(frozen=True)
class Host:
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
        online = ",".join(cpus for cpus, _ in self.cpu.values())
        files = {"/sys/devices/system/cpu/online": f"{online}\n"}
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
            distances = (str(self._distance(node, other)) for other in nodes)
            files[f"{folder}/distance"] = f"{' '.join(distances)}\n"
            shares = {"MemTotal": mib * 1024, "MemFree": mib * 512, "FilePages": mib * 2}
            files[f"{folder}/meminfo"] = "".join(
                f"Node {node} {name}: {kib:>14} kB\n" for name, kib in shares.items()
            )
        for core in self.smt:
            for cpu in core:
                name = f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"
                files[name] = f"{cpu_ranges(core)}\n"
        for address, device, node in self.gpus:
            folder = f"/sys/bus/pci/devices/{address}"
            vendor, kind = ("0x1002", "0x120000") if self.apus else ("0x10de", "0x030200")
            files |= {
                f"{folder}/vendor": f"{vendor}\n",
                f"{folder}/device": f"{device:#06x}\n",
                f"{folder}/class": f"{kind}\n",
                f"{folder}/numa_node": f"{node}\n",
                f"{folder}/local_cpulist": f"{self.cpu[node][0] if node >= 0 else ''}\n",
            }
        if self.grace:
            files["/sys/devices/system/cpu/cpu0/regs/identification/midr_el1"] = GRACE_MIDR
            files["/sys/devices/system/memory/auto_online_blocks"] = "online_movable\n"
        else:
            files["/proc/cpuinfo"] = AMD_CPU if self.apus else INTEL_CPU
        if self.apus:
            files |= apu_files(len(self.cpu))
        return listed(files | self.extra)

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
        return inspect_machine(build_sysroot(self.listing(), folder))

    def machine(self) -> Machine:
        """Inspect the machine, once in a session."""
        if repr(self) not in _inspected:
            with tempfile.TemporaryDirectory() as folder:
                _inspected[repr(self)] = self.inspected(Path(folder))
        return _inspected[repr(self)]


def fake_numa(count: int) -> Host:
    """Return a GH200 started with ``numa=fake=COUNT``: every CPU is in each of the first nodes."""
    return Host(
        cpu=dict.fromkeys(range(count), ("0-71", 490037 // count)),
        hbm={count: (97280, 0)},
        empty=tuple(range(count + 1, count + 8)),
        gpus=(("0009:01:00.0", 0x2342, 0),),
    )


HOSTS = msgspec.toml.decode((DATA / "hosts.toml").read_bytes(), type=dict[str, Host])
SMT = {
    "FOUR_H100_SUBNUMA": tuple((first, first + 1) for first in range(0, 112, 2)),
    "QUAD_MI300A": tuple((core, core + 96) for core in range(96)),
}
HOSTS |= {name: replace(HOSTS[name], smt=smt) for name, smt in SMT.items()}
HOSTS |= {f"FAKE_NUMA_{count}": fake_numa(count) for count in (4, 8)}

ONE_GH200 = HOSTS["ONE_GH200"]
ONE_GH200_CDMM = HOSTS["ONE_GH200_CDMM"]
ONE_GH200_HBM_ONLY = HOSTS["ONE_GH200_HBM_ONLY"]
ONE_GH200_MIG = HOSTS["ONE_GH200_MIG"]
QUAD_GH200 = HOSTS["QUAD_GH200"]
NVL2 = HOSTS["NVL2"]
GB200 = HOSTS["GB200"]
GB200_CDMM = HOSTS["GB200_CDMM"]
EIGHT_H100 = HOSTS["EIGHT_H100"]
EIGHT_H200 = HOSTS["EIGHT_H200"]
ONE_H200_GUEST = HOSTS["ONE_H200_GUEST"]
QUAD_MI300A = HOSTS["QUAD_MI300A"]


NODES = "/sys/class/kfd/kfd/topology/nodes"
_UNIQUE = (7843934696581995200, 11940228331418201223, 7304659965365223271, 6880943127044613004)
_SAME_SOCKET, _XGMI = 13, 15
"""Weights of links."""
_USUAL = tomllib.loads((DATA / "kfd.toml").read_text())


def apu_files(apus: int, *, partitions: int = 1) -> dict[str, str]:
    """Return the files of a host with one APU a NUMA node, each split into ``partitions``."""
    files: dict[str, str] = {}
    for apu in range(apus):
        files |= _node(apu, "\n", _changed("cpu", cpu_core_id_base=64 * apu))
    for apu in range(apus):
        for part in range(partitions):
            node = apus + apu * partitions + part
            files |= _node(node, "ip discovery\n", _gpu(apu, apus, part, partitions))
            files |= _link(node, 0, apu, _SAME_SOCKET, 819200)
            others = [other for other in range(apus) if other != apu]
            for index, other in enumerate(others, 1):
                files |= _link(node, index, apus + other * partitions, _XGMI, 128000)
    return files


def _changed(kind: str, **values: int) -> str:
    assert _USUAL[kind].keys() >= values.keys()
    changed = _USUAL[kind] | values
    return "".join(f"{name} {value}\n" for name, value in changed.items())


def _node(node: int, name: str, properties: str) -> dict[str, str]:
    is_gpu = "cpu_cores_count 0\n" in properties
    return {
        f"{NODES}/{node}/gpu_id": f"{4000 + node}\n" if is_gpu else "0\n",
        f"{NODES}/{node}/name": name,
        f"{NODES}/{node}/properties": properties,
    }


def _gpu(apu: int, apus: int, part: int, partitions: int) -> str:
    return _changed(
        "gpu",
        simd_count=912 // partitions,
        io_links_count=apus,
        p2p_links_count=apus - 1,
        location_id=512 | part,
        domain=apu,
        drm_render_minor=128 + 8 * apu + part,
        unique_id=_UNIQUE[apu],
        num_xcc=6 // partitions,
    )


def _link(node: int, index: int, to: int, weight: int, mib_per_s: int) -> dict[str, str]:
    speed = {"min_bandwidth": mib_per_s, "max_bandwidth": mib_per_s}
    link = _changed("link", node_from=node, node_to=to, weight=weight, **speed)
    return {f"{NODES}/{node}/io_links/{index}/properties": link}
