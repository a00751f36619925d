"""Samples of hosts and GPUs; where the processes of a run and their memory are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from so_tui.plan.binding import bind_ranks
from so_tui.runs.liveness import identify, read_stat
from so_tui.runs.records import ForeignProcess, GpuSample, Process, RankPlacement, Sample
from tests.support.machines import superchips
from tests.support.sysroots import QUAD_MI300A, build_files, build_sysroot
from tests.support.waiting import LIMIT_S, wait_for_environment, wait_until

STAT = (
    "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 10 0 10 70 10 0 0 0 5 0\ncpu3 50 0 0 50 0 0 0 0 0 0\nintr 1 2\n"
)


def cpu_ticks(pid: int) -> int:
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
    assert (sample.run_memory_peak_bytes or 0) >= 1_000_000
    tree.scan()
    assert tree.alive == ()


def test_other_processes_that_compute_are_named() -> None:
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b'a (b) c')"
    with waiting(name, then="while True: pass") as child:
        loads, found = ProcessLoads(), list[ForeignProcess]()
        assert loads.read() == (), "a first reading has nothing to compare with"
        deadline = time.monotonic() + LIMIT_S
        while not found and time.monotonic() < deadline:
            found = [load for load in loads.read() if load.pid == child.pid]
        others = {load.pid for load in loads.read(without={child.pid})}
    assert [(load.name, load.own) for load in found] == [("a (b) c", True)]
    assert found[0].cores >= 0.1
    assert found[0].cpu in sampling._read_cpu_times()
    assert child.pid not in others


def test_reasons_for_throttling() -> None:
    reasons = (0, 0x1 | 0x2 | 0x10, 0x4, 0x8 | 0x40, 0x8 | 0x80, 0x8)
    named = [(), (), ("power",), ("heat",), ("power-brake",), ("hardware",)]
    assert list(map(sampling._throttling, reasons)) == named


def test_nvml_fills_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not support stays unknown. A driver that fails at the end is let go: how the run
    ended is concluded later, perhaps that this GPU was lost.
    """
    ok, mib = SimpleNamespace, 1 << 20
    powers = [(0, 700_000), (3, 0)]
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByPciBusId": "gpu",
        "nvmlDeviceGetMemoryInfo": ok(used=40 << 30, total=96 << 30),
        "nvmlDeviceGetUtilizationRates": ok(gpu=97),
        "nvmlDeviceGetPowerUsage": 431_000,
        "nvmlDeviceGetFieldValues": [ok(nvmlReturn=r, value=ok(uiVal=mw)) for r, mw in powers],
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetComputeRunningProcesses": [ok(pid=7, usedGpuMemory=None)],
        "nvmlGpmQueryDeviceSupport": ok(isSupportedDevice=1),
        "nvmlGpmSampleAlloc": "reading",
        "nvmlGpmSampleGet": "reading",
        "nvmlGpmSampleFree": None,
        "c_nvmlGpmMetricsGet_t": ok(metrics=[ok(value=2.0, nvmlReturn=0) for _ in range(4)]),
        "nvmlGpmMetricsGet": "done",
    }

    def unsupported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in filter(lambda name: name.startswith("nvml"), dir(pynvml)):
        monkeypatch.setattr(pynvml, name, unsupported)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
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
    build_files({f"{device}/gpu_busy_percent": "N/A\n"}, root)
    assert sampled(root).gpus[1] == replace(measured, busy_percent=None)


def test_oom_kills_are_of_the_cgroup_or_host(tmp_path: Path) -> None:
    build_files({"/proc/vmstat": "nr_free 1\noom_kill 7\n"}, tmp_path)
    assert sampling.oom_kills(tmp_path) == 7
    events = "low 0\nmax 3\noom 2\noom_kill 2\n"
    build_files({"/sys/fs/cgroup/job/step/memory.events": events}, tmp_path)
    build_files({"/proc/self/cgroup": "0::/job/step\n"}, tmp_path)
    assert sampling.oom_kills(tmp_path) == 2


BINDING = bind_ranks(superchips(2), 2, cpu_adam_cores_fraction=0.9)[1]
MAIN, ADAM = BINDING.main_cpus, BINDING.adam_cpus
RIGHT = RankPlacement(rank=1, cpus=MAIN, adam_cpus=ADAM, node_bytes={1: 99 << 30, 0: 1 << 30})
NUMA_MAPS = b"""\
7f0000000000 bind:1 anon=3 dirty=3 active=0 N0=1 N1=2 kernelpagesize_kB=64
7f0000100000 bind:1 file=/dev/shm/so_tui_12_states mapped=4 N1=4 kernelpagesize_kB=2048
7f0000200000 default file=/usr/lib/libtorch.so mapped=9 mapmax=4 N0=9 kernelpagesize_kB=64
7f0000300000 default file=/srv/data\\040N7=7/tokens.bin mapped=9 N0=9 kernelpagesize_kB=64
7f0000400000 default
7f0000500000 default heap anon=1 dirty=1 N1=1 kernelpagesize_kB=64
"""


def test_memory_by_node_leaves_out_files() -> None:
    assert sampling._node_bytes(NUMA_MAPS) == {0: 64 << 10, 1: 3 * (64 << 10) + 4 * (2 << 20)}
    assert sampling._node_bytes(b"") == {}


@pytest.mark.parametrize(
    ("cpus", "adam_cpus", "main_cpus", "wrong"),
    [
        (MAIN, ADAM, MAIN, False),
        (BINDING.cpus, (), MAIN, False),  # while it loads, before there is a worker
        (MAIN, (), MAIN, False),  # the worker of a run that stopped
        (MAIN, (), BINDING.cpus, True),  # without a worker, all cores are the rank's
        (MAIN, MAIN, MAIN, True),
        ((*MAIN, 0), ADAM, MAIN, True),
    ],
)
def test_cores_other_than_planned_or_fewer_are_misplaced(
    cpus: tuple[int, ...], adam_cpus: tuple[int, ...], main_cpus: tuple[int, ...], *, wrong: bool
) -> None:
    placement = replace(RIGHT, cpus=cpus, adam_cpus=adam_cpus)
    assert sampling.misplaced(placement, BINDING.cpus, main_cpus) == wrong


def test_the_share_of_memory_on_the_right_node() -> None:
    assert BINDING.memory_policy.nodes == (1,)
    wrong, unknown = replace(RIGHT, node_bytes={0: 5}), replace(RIGHT, node_bytes={})
    shares = [sampling.share_on_nodes(each, (1,)) for each in (RIGHT, wrong, unknown)]
    assert shares == [0.99, 0.0, None]
    assert sampling.share_on_nodes(RIGHT, ()) is None  # any node will do
    assert sampling.share_on_nodes(wrong, ()) == 1.0  # a host with one node


@contextmanager
def waiting(program: str = "", then: str = "input()") -> Iterator[Process]:
    """Have a process run a program, and wait then."""
    argv = [sys.executable, "-c", f"{program}\nprint(flush=True)\n{then}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = identify(child.pid, "rank")
        assert process is not None
        try:
            yield replace(process, rank=3)
        finally:
            child.kill()


def test_a_real_process_is_found_where_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a thread of it has just ended: a training process has threads that come and go."""
    with waiting() as sleeper:
        (cpu, *_) = os.sched_getaffinity(0)
        os.sched_setaffinity(sleeper.pid, {cpu})
        os.setpriority(os.PRIO_PROCESS, sleeper.pid, 19)
        other, listed = identify(os.getpid()), os.listdir
        assert other is not None
        monkeypatch.setattr(os, "listdir", lambda path: [str(1 << 30), *listed(path)])
        (placement,) = sampling._read_placements([other, sleeper])
    assert (placement.rank, placement.cpus, placement.adam_cpus) == (3, (cpu,), ())
    # The tests themselves may run with idle priority.
    assert placement.nice in (19, sampling.IDLE_NICE)
    assert sum(placement.node_bytes.values()) > 1 << 20
    assert sampling._read_placements([sleeper]) == (RankPlacement(rank=3, cpus=()),), "it has ended"


RANKS = tuple(Process(pid=10 + rank, start_time=1, role="rank", rank=rank) for rank in (0, 1))
WORKERS = tuple(Process(pid=20 + rank, start_time=1, role="adam", rank=rank) for rank in (0, 1))


def status(
    root: Path, process: Process, resident: int, files: int = 0, shared: int = 0, highest: int = 0
) -> None:
    """Write what the kernel says of the memory of a process, in MiB."""
    sizes = {"VmHWM": highest or resident, "VmRSS": resident, "RssFile": files, "RssShmem": shared}
    lines = "".join(f"{name}:\t{1024 * size} kB\n" for name, size in sizes.items())
    build_files({f"/proc/{process.pid}/status": f"Name:\tpython\n{lines}"}, root)


def test_memory_that_was_given_back_is_remembered() -> None:
    with waiting("b = bytearray(200_000_000); b[::4096] = b'1' * len(b[::4096]); del b") as process:
        highest = sampling._HighWater().read([process])
    assert highest is not None
    assert 200_000_000 < highest < 260_000_000


def test_what_processes_share_counts_once(tmp_path: Path) -> None:
    """Each rank's arena, though its worker touched more of it, and the libraries."""
    for rank, worker in zip(RANKS, WORKERS, strict=True):
        status(tmp_path, rank, 5_000 + 1_000 + 40_000, 1_000, 40_000)
        status(tmp_path, worker, 10 + 5 + 50_000, 5, 50_000)
    highest = sampling._HighWater().read([*RANKS, *WORKERS], tmp_path)
    assert highest == (2 * (5_000 + 10 + 50_000) + 1_000) << 20


def test_memory_that_moves_between_processes_is_not_added(tmp_path: Path) -> None:
    """A rank's weights, and shared memory when one of its processes lets go of it."""
    water, (rank, worker) = sampling._HighWater(), (RANKS[0], WORKERS[0])
    status(tmp_path, rank, 10_000, 1_000)
    assert water.read([rank], tmp_path) == 10_000 << 20
    status(tmp_path, worker, 56_000, 0, 56_000)
    for highest in (10_000, 9_999, 10_000):  # as exact as the kernel's counters
        status(tmp_path, rank, 2_000, 1_000, highest=highest)
        assert water.read([rank, worker], tmp_path) == 58_000 << 20
    status(tmp_path, rank, 60_000, 1_000, 50_000)
    assert water.read([rank, worker], tmp_path) == 66_000 << 20
    status(tmp_path, rank, 3_000, 1_000, highest=60_000)
    status(tmp_path, worker, 10, 5, highest=56_000)
    assert water.read([rank, worker], tmp_path) == 66_000 << 20


def test_peak_between_looks_counts_with_what_others_have(tmp_path: Path) -> None:
    water = sampling._HighWater()
    assert water.read(RANKS, tmp_path) is None, "processes that tell nothing are no reading"
    for process in RANKS:
        status(tmp_path, process, 2_000)
    assert water.read(RANKS, tmp_path) == 4_000 << 20
    status(tmp_path, RANKS[0], 2_000, highest=9_000)
    assert water.read(RANKS, tmp_path) == 11_000 << 20
    assert water.read([WORKERS[0]], tmp_path) == 11_000 << 20
