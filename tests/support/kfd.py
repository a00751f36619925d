"""The topology of AMD's compute driver (KFD) on a host of four MI300A, as Linux writes it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

NODES = "/sys/class/kfd/kfd/topology/nodes"
_UNIQUE = (7843934696581995200, 11940228331418201223, 7304659965365223271, 6880943127044613004)
_SAME_SOCKET, _XGMI = 13, 15
"""Weights of links."""
_USUAL = tomllib.loads((Path(__file__).parents[1] / "data" / "kfd.toml").read_text())


def apu_files(node_mib: Sequence[int], *, partitions: int = 1) -> dict[str, str]:
    """Return the files of a host with one APU a NUMA node, each split into ``partitions``."""
    apus = len(node_mib)
    files: dict[str, str] = {}
    for apu, mib in enumerate(node_mib):
        files |= _node(apu, "\n", _changed("cpu", cpu_core_id_base=64 * apu))
        files |= _bank(apu, 0, mib)
    for apu, mib in enumerate(node_mib):
        for part in range(partitions):
            node = apus + apu * partitions + part
            files |= _node(node, "ip discovery\n", _gpu(apu, apus, part, partitions))
            files |= _bank(node, 1, mib // partitions)
            files |= _link(node, 0, apu, _SAME_SOCKET, 819200)
            others = [other for other in range(apus) if other != apu]
            for index, other in enumerate(others, 1):
                files |= _link(node, index, apus + other * partitions, _XGMI, 128000)
    return files


def _changed(kind: str, **values: int) -> str:
    """Return a properties file with some values that differ from the usual ones."""
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


def _bank(node: int, heap: int, mib: int) -> dict[str, str]:
    bank = _changed("bank", heap_type=heap, size_in_bytes=mib << 20)
    return {f"{NODES}/{node}/mem_banks/0/properties": bank}


def _link(node: int, index: int, to: int, weight: int, mib_per_s: int) -> dict[str, str]:
    speed = {"min_bandwidth": mib_per_s, "max_bandwidth": mib_per_s}
    link = _changed("link", node_from=node, node_to=to, weight=weight, **speed)
    return {f"{NODES}/{node}/io_links/{index}/properties": link}
