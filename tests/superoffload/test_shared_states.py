"""The memory shared with the Adam worker: how it is allocated, and too little of it."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
import torch

import superoffload
from superoffload.shared_states import STATES_MEMORY_NAME, SharedStates, host_available_bytes
from superoffload.worker import MemorySize, Segment
from tests.support.problems import coded
from tests.support.shared_memory import SHARED_MEMORY, files_in_shared_memory, named_after


def bf16(numel: int) -> MemorySize:
    return MemorySize(((Segment(numel),),), 2, accumulate=False)


def shared_states(size: MemorySize) -> SharedStates:
    return SharedStates(size, torch.bfloat16, host_available_bytes, Path())


def own_memory() -> list[str]:
    """Return the engine's anonymous files that this process has open or mapped."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [
        line
        for line in (*links, *Path("/proc/self/maps").read_text().splitlines())
        if f"memfd:{STATES_MEMORY_NAME}" in line
    ]


def test_it_takes_no_room_in_dev_shm_and_has_no_name_there() -> None:
    states = shared_states(bf16(4_000_000))
    for view in (states.staging(0), states.master_weights(0), *states.moments(0)):
        view.fill_(1.0)  # pages are allocated on the first write
    mapped = [
        line.split()[3]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if f"memfd:{STATES_MEMORY_NAME}" in line
    ]
    assert mapped
    device = SHARED_MEMORY.stat().st_dev
    assert f"{os.major(device):02x}:{os.minor(device):02x}" not in mapped, (
        "room is counted by file system"
    )
    assert own_memory()
    assert not files_in_shared_memory(os.getpid())
    del view
    states.close()
    assert not own_memory()
    assert not named_after(os.getpid())


def test_more_than_the_host_has_is_refused() -> None:
    numel = 10**14
    with pytest.raises(
        superoffload.OffloadError, match=r"need 1400000\.0 GB of host memory"
    ) as caught:
        shared_states(bf16(numel))
    assert caught.value.code == "host-memory"
    available = re.search(r"only ([\d.]+) GB", str(caught.value))
    assert available is not None
    assert 0 < float(available[1]) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    assert not own_memory()


def test_a_limit_of_the_process_is_reported_with_the_size() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, before[1]))
    try:
        with coded(
            superoffload.OffloadError,
            "host-memory-limit",
            match=r"0\.4 GB of host memory .*Cannot allocate memory.*ulimit",
        ):
            shared_states(bf16(30_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not own_memory()
