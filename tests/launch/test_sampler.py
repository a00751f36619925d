"""Samples of this host, of other machines' files, and of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from msgspec.structs import replace

from so_tui.launch.supervisor import samples as sampling
from so_tui.launch.supervisor.processes import ProcessLoads, ProcessTree
from so_tui.machine import inspect_machine
from so_tui.machine.system_files import SystemFiles
from so_tui.runs.liveness import read_stat
from so_tui.runs.records import ForeignProcess, GpuSample, Sample
from tests.support.machines import superchips
from tests.support.sysroots import QUAD_MI300A, build_files, build_sysroot
from tests.support.waiting import LIMIT_S, wait_for_environment, wait_until

STAT = (
    "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 10 0 10 70 10 0 0 0 5 0\ncpu3 50 0 0 50 0 0 0 0 0 0\nintr 1 2\n"
)


def cpu_ticks(pid: int) -> int:
    """Return what a living process has computed."""
    stat = read_stat(pid)
    assert stat is not None
    return stat.cpu_ticks


def sampled(root: Path) -> Sample:
    """Return a sample of the machine whose files are in a folder."""
    tree = ProcessTree(frozenset({"MARK=none"}), supervisor_pid=os.getpid())
    sampler = sampling.Sampler(inspect_machine(root), tree, attempt=1, root=root)
    sample = sampler.sample()
    sampler.gpus.close()
    assert sampler.gpus.processes() == {}
    return sample


def test_busy_share_of_a_core(tmp_path: Path) -> None:
    build_files({"/proc/stat": STAT}, tmp_path)
    assert sampling._read_cpu_times(tmp_path) == {0: (80, 100), 3: (50, 100)}
    readings = (((80, 100), (80, 200)), ((10, 100), (60, 300)), ((0, 0), (1, 2)), ((1, 2), (1, 2)))
    assert [sampling._busy_percent(*pair) for pair in readings] == [100, 75, 0, 0]


def test_memory_by_node_without_numa_and_of_the_only_node(tmp_path: Path) -> None:
    """The file of an only node is late on a virtual machine whose memory grows."""
    node = "Node 0 MemTotal: 1000 kB\nNode 0 MemFree: 400 kB\nNode 0 FilePages: 100 kB\n"
    host = "MemTotal: 3000 kB\nMemFree: 2300 kB\nCached: 50 kB\n"
    folder = "/sys/devices/system/node/node0"
    root = build_files({"/proc/meminfo": host, "/proc/stat": STAT}, tmp_path)
    files = SystemFiles(root)
    assert sampling._read_node_memory(files, 0, sole=True)["Cached"] == 51200
    build_files({f"{folder}/meminfo": node, f"{folder}/cpulist": "0\n"}, tmp_path)
    own = {"MemTotal": 1024000, "MemFree": 409600, "FilePages": 102400}
    assert sampling._read_node_memory(files, 0, sole=False) == own
    inspected = inspect_machine(root).numa_nodes[0]
    (sample,) = sampled(root).nodes
    found = (sample.memory_total_bytes, sample.memory_used_bytes, sample.file_cache_bytes)
    assert found == (3000 * 1024, 700 * 1024, 100 * 1024)
    free_bytes = sample.memory_total_bytes - sample.memory_used_bytes
    assert (inspected.memory_total_bytes, inspected.memory_free_bytes) == (found[0], free_bytes)


def test_a_real_sample_sees_the_run_work(tmp_path: Path) -> None:
    machine = inspect_machine()
    program = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    env = {**os.environ, "MARK": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], env=env) as child:
        wait_for_environment(child.pid)
        tree = ProcessTree(frozenset({f"MARK={tmp_path}"}), supervisor_pid=-1)
        tree.scan(thorough=True)
        assert [process.pid for process in tree.alive] == [child.pid]
        sampler = sampling.Sampler(machine, tree, attempt=1)
        tree.cpu_s()
        begun = cpu_ticks(child.pid)
        time.sleep(1)
        # On a busy machine it may take longer to compute for 0.2 s.
        wait_until(lambda: cpu_ticks(child.pid) > begun + 20)
        tree.scan()
        sample = sampler.sample()
        child.kill()
    sampler.gpus.close()
    assert sample.interval_s >= 1
    cores = [len(node.cores) for node in sample.nodes if node.cores]
    assert cores == [len(node.cpus) for node in machine.cpu_nodes]
    assert max(share for node in sample.nodes for share in node.cores) > 10
    assert sample.run_cpu_s > 0.1
    assert (sample.run_memory_bytes or 0) > 1_000_000
    assert (sample.run_memory_peak_bytes or 0) >= 1_000_000
    tree.scan()
    assert tree.alive == ()
    assert [process.pid for process in tree.gone] == [child.pid]


def test_other_processes_that_compute_are_named() -> None:
    program = "import ctypes\nctypes.CDLL(None).prctl(15, b'a (b) c')\nprint(flush=True)\n"
    argv = [sys.executable, "-c", f"{program}while True: pass"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            loads, found = ProcessLoads(), list[ForeignProcess]()
            assert loads.read() == (), "a first reading has nothing to compare with"
            deadline = time.monotonic() + LIMIT_S
            while not found and time.monotonic() < deadline:
                found = [load for load in loads.read() if load.pid == child.pid]
            others = {load.pid for load in loads.read(without={child.pid})}
        finally:
            child.kill()
    assert [(load.name, load.own) for load in found] == [("a (b) c", True)]
    assert found[0].cores >= 0.1
    assert found[0].cpu in sampling._read_cpu_times()
    assert child.pid not in others


def test_reasons_for_throttling() -> None:
    reasons = (0, 0x1 | 0x2 | 0x10, 0x4, 0x8 | 0x40, 0x8 | 0x80, 0x8)
    named = [(), (), ("power",), ("heat",), ("power-brake",), ("hardware",)]
    assert list(map(sampling._throttling, reasons)) == named


def imitate_nvml(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Have NVML answer these calls, and support no other."""

    def unsupported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in filter(lambda name: name.startswith("nvml"), dir(pynvml)):
        monkeypatch.setattr(pynvml, name, unsupported)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)


def test_a_driver_that_fails_at_the_end_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor closes its sampler before it concludes how the run ended, perhaps because this
    GPU was lost.
    """
    imitate_nvml(monkeypatch, nvmlInit=None)
    sampler = sampling.GpuSampler(superchips(1).gpus)
    assert sampler.sample() == ()
    sampler.close()


def test_nvml_fills_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not support stays unknown."""
    ok, mib = SimpleNamespace, 1 << 20
    powers = [(0, 700_000), (3, 0)]
    imitate_nvml(
        monkeypatch,
        nvmlInit=None,
        nvmlDeviceGetHandleByPciBusId="gpu",
        nvmlDeviceGetMemoryInfo=ok(used=40 << 30, total=96 << 30),
        nvmlDeviceGetUtilizationRates=ok(gpu=97),
        nvmlDeviceGetPowerUsage=431_000,
        nvmlDeviceGetFieldValues=[ok(nvmlReturn=r, value=ok(uiVal=mw)) for r, mw in powers],
        nvmlDeviceGetCurrentClocksEventReasons=0x4,
        nvmlDeviceGetComputeRunningProcesses=[ok(pid=7, usedGpuMemory=None)],
        nvmlGpmQueryDeviceSupport=ok(isSupportedDevice=1),
        nvmlGpmSampleAlloc="reading",
        nvmlGpmSampleGet="reading",
        nvmlGpmSampleFree=None,
        c_nvmlGpmMetricsGet_t=ok(metrics=[ok(value=2.0, nvmlReturn=0) for _ in range(4)]),
        nvmlGpmMetricsGet="done",
        nvmlShutdown=None,
    )
    sampler = sampling.GpuSampler(superchips(1).gpus)
    known = GpuSample(
        index=0,
        busy_percent=97,
        memory_used_bytes=40 << 30,
        memory_total_bytes=96 << 30,
        power_w=431.0,
        module_power_w=700.0,
        throttling=("power",),
    )
    assert sampler.sample() == (known,), "traffic takes two readings"
    ways = ("pcie_to_gpu", "pcie_to_host", "c2c_to_gpu", "c2c_to_host")
    rates: dict[str, Any] = {f"{way}_bytes_per_s": 2 * mib for way in ways}
    assert sampler.sample() == (replace(known, **rates),)
    assert sampler.processes() == {7: {0: None}}
    sampler.close()
    assert sampler.sample() == ()


@pytest.mark.gpu
def test_gpus_are_sampled() -> None:
    gpus = inspect_machine().gpus
    sampler = sampling.GpuSampler(gpus)
    sampler.sample()
    time.sleep(1)
    samples = sampler.sample()
    sampler.close()
    assert [sample.index for sample in samples] == [gpu.index for gpu in gpus]
    for sample, gpu in zip(samples, gpus, strict=True):
        always = (sample.busy_percent, sample.memory_used_bytes, sample.power_w)
        assert None not in (*always, sample.power_limit_w, sample.pcie_to_gpu_bytes_per_s)
        assert (sample.clock_mhz or 0) <= (sample.clock_max_mhz or 0)
        assert (sample.module_power_w is not None) <= bool(gpu.c2c)
        assert (sample.c2c_to_gpu_bytes_per_s is not None) == bool(gpu.c2c)


def test_gpus_of_amd_are_sampled_from_their_drivers_files(tmp_path: Path) -> None:
    files = {
        "gpu_busy_percent": "97",
        "mem_info_vram_total": "135186612224",
        "mem_info_vram_used": "64424509440",
        "hwmon/hwmon7/name": "amdgpu",
        "hwmon/hwmon7/power1_input": "431000000",
        "hwmon/hwmon7/power1_cap": "550000000",
        "hwmon/hwmon7/temp2_input": "61000",
        "hwmon/hwmon7/freq1_input": "2100000000",
    }
    device = "/sys/bus/pci/devices/0001:02:00.0"
    tree = {f"{device}/{name}": f"{text}\n" for name, text in files.items()}
    root = build_sysroot(QUAD_MI300A.listing(), tmp_path)
    build_files(tree | {"/proc/stat": "cpu  9 9 9 9\n"}, root)
    silent, measured, *_ = sampled(root).gpus
    assert silent == GpuSample(index=0, memory_total_bytes=128160 << 20)
    assert measured == GpuSample(
        index=1,
        busy_percent=97,
        memory_used_bytes=60 << 30,
        memory_total_bytes=128924 << 20,
        power_w=431.0,
        power_limit_w=550.0,
        clock_mhz=2100,
        temperature_c=61,
    )
    for content in ("", "N/A\n", "\x00" * 9, "1e3\n"):
        build_files({f"{device}/gpu_busy_percent": content}, root)
        assert sampled(root).gpus[1] == replace(measured, busy_percent=None)


def test_oom_kills_are_of_the_cgroup_or_host(tmp_path: Path) -> None:
    build_files({"/proc/vmstat": "nr_free 1\noom_kill 7\n"}, tmp_path)
    assert sampling.oom_kills(tmp_path) == 7
    events = "low 0\nmax 3\noom 2\noom_kill 2\n"
    build_files({"/sys/fs/cgroup/job/step/memory.events": events}, tmp_path)
    build_files({"/proc/self/cgroup": "0::/job/step\n"}, tmp_path)
    assert sampling.oom_kills(tmp_path) == 2
