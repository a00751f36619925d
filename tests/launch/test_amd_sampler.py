"""Samples of AMD's GPUs, from a generated tree of their driver's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from so_tui.launch.supervisor.processes import ProcessTree
from so_tui.launch.supervisor.samples import GpuSampler, Sampler
from so_tui.machine import inspect_machine
from so_tui.runs.records import GpuSample
from tests.support.sysroots import QUAD_MI300A, build_files, build_sysroot

DEVICE = "/sys/bus/pci/devices/0001:02:00.0"
FILES = {
    f"{DEVICE}/gpu_busy_percent": "97\n",
    f"{DEVICE}/mem_info_vram_total": "135186612224\n",
    f"{DEVICE}/mem_info_vram_used": "64424509440\n",
    f"{DEVICE}/hwmon/hwmon7/name": "amdgpu\n",
    f"{DEVICE}/hwmon/hwmon7/power1_input": "431000000\n",
    f"{DEVICE}/hwmon/hwmon7/power1_cap": "550000000\n",
    f"{DEVICE}/hwmon/hwmon7/temp2_input": "61000\n",
    f"{DEVICE}/hwmon/hwmon7/freq1_input": "2100000000\n",
}
MEASURED = GpuSample(
    index=1,
    busy_percent=97,
    memory_used_bytes=60 << 30,
    memory_total_bytes=128924 << 20,
    power_w=431.0,
    power_limit_w=550.0,
    clock_mhz=2100,
    temperature_c=61,
)


def sampled(root: Path) -> tuple[GpuSample, ...]:
    sampler = GpuSampler(inspect_machine(root).gpus, root)
    samples = sampler.sample()
    sampler.close()
    assert sampler.processes() == {}
    return samples


def test_what_the_driver_says_and_what_it_does_not(tmp_path: Path) -> None:
    files = FILES | {"/proc/stat": "cpu  9 9 9 9\n"}
    root = build_files(files, build_sysroot(QUAD_MI300A.listing(), tmp_path))
    silent, measured, *_ = sampled(root)
    assert measured == MEASURED
    assert silent == GpuSample(index=0, memory_total_bytes=128160 << 20)
    tree = ProcessTree(frozenset({"MARK=none"}), supervisor_pid=os.getpid())
    sampler = Sampler(inspect_machine(root), tree, attempt=1, root=root)
    assert sampler.sample().gpus[1] == MEASURED
    sampler.gpus.close()


@pytest.mark.parametrize("content", ["", "N/A\n", "\x00" * 9, "1e3\n"])
def test_what_is_no_number_is_unknown(tmp_path: Path, content: str) -> None:
    root = build_files(
        FILES | {f"{DEVICE}/gpu_busy_percent": content},
        build_sysroot(QUAD_MI300A.listing(), tmp_path),
    )
    assert sampled(root)[1].busy_percent is None
