"""The worker process, threads and memory of a rank: where they run, and that nothing stays."""

from __future__ import annotations

import gc
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import superoffload
from so_tui.plan.plan import MemoryPolicy
from so_tui.plan.step_time import ACCUMULATE_BYTES, ADAM_BYTES
from so_tui_trainer import binding
from superoffload import worker
from superoffload.shared_states import STATES_MEMORY_NAME, SharedStates, host_available_bytes
from superoffload.transfers import Transfer, Transfers, _CudaTransfers
from superoffload.worker import Command, GradientSource, MemorySize, Moments, Operation, Segment
from tests.support import engine as support
from tests.support.hostile_files import full_disk
from tests.support.problems import coded
from tests.support.waiting import LIMIT_S

SHARED_MEMORY = Path("/dev/shm")


def files_in_shared_memory(pid: int) -> set[str]:
    """Return the files of /dev/shm that a process has open or mapped, but for semaphores."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(link.readlink()))
    maps = [line.partition("/")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    paths = {*links, *(f"/{path}" for path in maps)}
    return {
        path
        for path in paths
        if path.startswith(f"{SHARED_MEMORY}/")
        and not path.startswith(f"{tempfile.gettempdir()}/")  # which may be in memory, too
        and not Path(path).name.startswith("sem.")
    }


def named_after(*numbers: int) -> set[str]:
    """Return the files of /dev/shm with a number, of a process or a port, in their names."""
    wanted = {str(number) for number in numbers}
    return {
        path.name for path in SHARED_MEMORY.iterdir() if wanted & set(re.findall(r"\d+", path.name))
    }


def test_nothing_is_left_behind() -> None:
    support.ensure_process_group()
    # DeepSpeed's and torch's names have one of them.
    numbers = (os.getpid(), int(os.environ["MASTER_PORT"]))
    before, used = named_after(*numbers), files_in_shared_memory(os.getpid())
    with support.offloading() as made:
        support.train(made, support.batches(1))
        pid = superoffload.worker_pid(made)
        assert pid is not None
        assert superoffload.worker_pid(made) is not None
        assert os.sched_getaffinity(pid) == set(support.binding().adam_cpus)
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        assert (files_in_shared_memory(pid), files_in_shared_memory(os.getpid())) == (set(), used)
    assert not Path(f"/proc/{pid}").exists()
    gc.collect()
    assert STATES_MEMORY_NAME not in Path("/proc/self/maps").read_text()
    assert files_in_shared_memory(os.getpid()) == used
    assert named_after(pid, *numbers) == before
    superoffload.close(made)  # a second call is harmless


def test_shared_memory_follows_the_memory_policy_of_the_rank() -> None:
    """The worker touches the pages first, so they are allocated by the policy that it inherits."""
    policy = MemoryPolicy(mode="bind", nodes=(0,))
    unbound = binding._memory_policy()
    bound = binding.bind(replace(support.binding(), memory_policy=policy))
    if bound.problem or unbound != "default":
        pytest.skip(bound.problem or f"the memory policy {unbound} cannot be set again")
    try:
        with support.offloading() as made:
            maps = Path(f"/proc/{superoffload.worker_pid(made)}/numa_maps").read_text().splitlines()
            (shared,) = [line for line in maps if STATES_MEMORY_NAME in line]
            assert "bind:0" in shared
            assert "N0=" in shared
    finally:
        binding.bind(support.binding())


def test_only_attached_threads_copy_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    attached, copying = {threading.get_ident()}, set[int]()
    copy = Transfers.weights_to_gpu

    def recording(self: Transfers, *tensors: torch.Tensor) -> Transfer:
        copying.add(threading.get_ident())
        return copy(self, *tensors)

    monkeypatch.setattr(Transfers, "attach", lambda self: attached.add(threading.get_ident()))
    monkeypatch.setattr(Transfers, "weights_to_gpu", recording)
    with support.offloading() as made:
        support.train(made, support.batches(2))
        superoffload.synchronize(made)
    assert copying
    assert copying <= attached


def test_the_plan_counts_the_traffic_that_the_worker_reports() -> None:
    step = Command(Operation.STEP, 0)
    early = step._replace(operation=Operation.SPECULATE)
    summed = step._replace(gradient=GradientSource.ACCUMULATED_AND_STAGING)
    assert step.bytes_moved(1, 2) == early.bytes_moved(1, 2) == ADAM_BYTES
    assert summed.bytes_moved(1, 2) == ADAM_BYTES + 4
    assert Command(Operation.ACCUMULATE, 0).bytes_moved(1, 2) == ACCUMULATE_BYTES
    assert [step.bytes_moved(1, 2, moments) for moments in Moments] == [28, 20, 16]


def test_a_worker_without_settings_ends_with_its_starter() -> None:
    """Another process that was forked meanwhile has the pipe open, so that settings never end."""
    start = (
        "import os, subprocess, sys; from superoffload import worker\n"
        "command = [sys.executable, '-I', '-S', worker.__file__, str(os.getpid())]\n"
        "print(subprocess.Popen(command).pid, flush=True); sys.stdout.close(); os.read(3, 1)"
    )
    ours, theirs = os.pipe()
    waits, ends = os.pipe()
    command = [sys.executable, "-c", f"import os; os.dup2({waits}, 3)\n{start}"]
    piped: dict[str, Any] = {"stdin": ours, "stdout": subprocess.PIPE, "pass_fds": (waits,)}
    with subprocess.Popen(command, text=True, **piped) as starter:
        assert starter.stdout is not None
        worker_process = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
    try:
        assert select.select([worker_process], [], [], LIMIT_S)[0]
    finally:
        signal.pidfd_send_signal(worker_process, signal.SIGKILL)
        for descriptor in (ours, theirs, waits, ends, worker_process):
            os.close(descriptor)


@pytest.mark.parametrize("settings", [b"", b'{"cpus": [0]', b'{"cpus": [0]}'])
def test_a_worker_whose_settings_were_cut_short_ends(settings: bytes) -> None:
    command = [sys.executable, "-I", "-S", worker.__file__, str(os.getpid())]
    piped: dict[str, Any] = {"input": settings, "capture_output": True}
    done = subprocess.run(command, timeout=LIMIT_S, check=False, **piped)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_memory_that_cannot_be_had_is_refused_with_its_size() -> None:
    def allocate(numel: int) -> None:
        size = MemorySize(((Segment(numel),),), 2, accumulate=False)
        SharedStates(size, torch.bfloat16, host_available_bytes, Path())

    most = r"need 1400000\.0 GB of host memory.*only [\d.]+ GB"
    with coded(superoffload.OffloadError, "host-memory", match=most):
        allocate(10**14)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, before[1]))
    said = r"0\.4 GB of host memory .*Cannot allocate memory.*ulimit"
    try:
        with coded(superoffload.OffloadError, "host-memory-limit", match=said):
            allocate(30_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    gc.collect()
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert STATES_MEMORY_NAME not in " ".join(links) + Path("/proc/self/maps").read_text()


def test_a_limit_of_file_sizes_is_named() -> None:
    said = r"0\.4 GB of host memory .*largest file.*ulimit -f"
    with full_disk(2**20), coded(superoffload.OffloadError, "file-size-limit", match=said):
        SharedStates(
            MemorySize(((Segment(30_000_000),),), 2, accumulate=False),
            torch.bfloat16,
            host_available_bytes,
            Path(),
        )


def test_an_attached_thread_uses_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other would get a context, which takes half a gigabyte of its memory."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    transfers = object.__new__(_CudaTransfers)
    transfers._d2h = SimpleNamespace(device=1)  # type: ignore[assignment]
    transfers.attach()
    assert chosen == [1]
