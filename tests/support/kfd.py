"""The topology of AMD's compute driver (KFD) on a host of four MI300A, as Linux writes it:

as published with a Kubernetes device plugin; banks and links as in ``kfd_crat.c``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NODES = "/sys/class/kfd/kfd/topology/nodes"
_UNIQUE = (7843934696581995200, 11940228331418201223, 7304659965365223271, 6880943127044613004)
_SAME_SOCKET, _XGMI = 13, 15
"""Weights of links."""


def apu_files(node_mib: Sequence[int], *, partitions: int = 1) -> dict[str, str]:
    """Return the files of a host with one APU a NUMA node, each split into ``partitions``."""
    apus = len(node_mib)
    files: dict[str, str] = {}
    for apu, mib in enumerate(node_mib):
        files |= _cpu(apu, mib)
    for apu, mib in enumerate(node_mib):
        for part in range(partitions):
            files |= _gpu(
                apus + apu * partitions + part, apu, apus, mib // partitions, part, partitions
            )
    return files


def lines(values: Mapping[str, int]) -> str:
    """Return a properties file."""
    return "".join(f"{name} {value}\n" for name, value in values.items())


_CPU = """cpu_cores_count 48 simd_count 0 mem_banks_count 1 caches_count 0 io_links_count 4
p2p_links_count 3 cpu_core_id_base 0 gfx_target_version 0 vendor_id 0 device_id 0 location_id 0
domain 0 drm_render_minor 0 hive_id 9034655720432782706 max_engine_clk_ccompute 3700"""
_GPU = """cpu_cores_count 0 simd_count 912 mem_banks_count 1 caches_count 470 io_links_count 4
p2p_links_count 3 cpu_core_id_base 0 max_waves_per_simd 8 lds_size_in_kb 64 array_count 24
simd_per_cu 4 gfx_target_version 90402 vendor_id 4098 device_id 29856 location_id 512 domain 0
drm_render_minor 128 hive_id 9034655720432782706 local_mem_size 0 fw_version 138
capability 1013424768 unique_id 0 num_xcc 6 max_engine_clk_ccompute 3700"""
_BANK = "heap_type 0 size_in_bytes 0 flags 0 width 8192 mem_clk_max 2600"
_LINK = """type 11 version_major 0 version_minor 0 node_from 0 node_to 0 weight 0 min_latency 0
max_latency 0 min_bandwidth 0 max_bandwidth 0 recommended_transfer_size 0
recommended_sdma_engine_id_mask 0 flags 1"""


def _changed(usual: str, **values: int) -> str:
    words = usual.split()
    known = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    assert known.keys() >= values.keys()
    return lines(known | values)


def _cpu(apu: int, mib: int) -> dict[str, str]:
    return {
        f"{NODES}/{apu}/gpu_id": "0\n",
        f"{NODES}/{apu}/name": "\n",
        f"{NODES}/{apu}/properties": _changed(_CPU, cpu_core_id_base=64 * apu),
        f"{NODES}/{apu}/mem_banks/0/properties": _changed(_BANK, size_in_bytes=mib << 20),
    }


def _gpu(node: int, apu: int, apus: int, mib: int, part: int, partitions: int) -> dict[str, str]:
    properties = _changed(
        _GPU,
        simd_count=912 // partitions,
        io_links_count=apus,
        p2p_links_count=apus - 1,
        location_id=512 | part,
        domain=apu,
        drm_render_minor=128 + 8 * apu + part,
        unique_id=_UNIQUE[apu],
        num_xcc=6 // partitions,
    )
    others = [other for other in range(apus) if other != apu]
    files = {
        f"{NODES}/{node}/gpu_id": f"{4000 + node}\n",
        f"{NODES}/{node}/name": "ip discovery\n",
        f"{NODES}/{node}/properties": properties,
        f"{NODES}/{node}/mem_banks/0/properties": _changed(
            _BANK, heap_type=1, size_in_bytes=mib << 20
        ),
        f"{NODES}/{node}/io_links/0/properties": _link(node, apu, _SAME_SOCKET, 819200),
    }
    for index, other in enumerate(others, 1):
        files[f"{NODES}/{node}/io_links/{index}/properties"] = _link(
            node, apus + other * partitions, _XGMI, 128000
        )
    return files


def _link(node_from: int, node_to: int, weight: int, mib_per_s: int) -> str:
    speed = {"min_bandwidth": mib_per_s, "max_bandwidth": mib_per_s}
    return _changed(_LINK, node_from=node_from, node_to=node_to, weight=weight, **speed)
