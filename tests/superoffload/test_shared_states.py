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


def shared_states(numel: int) -> SharedStates:
    size = MemorySize(((Segment(numel),),), 2, accumulate=False)
    return SharedStates(size, torch.bfloat16, host_available_bytes, Path())


def own_memory() -> list[str]:
    """Return the engine's anonymous files that this process has open or mapped."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*links, *maps) if f"memfd:{STATES_MEMORY_NAME}" in line]


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(superoffload.OffloadError) as caught:
        shared_states(10**14)
    assert caught.value.code == "host-memory"
    said = re.search(r"need 1400000\.0 GB of host memory.*only ([\d.]+) GB", str(caught.value))
    assert said is not None
    assert 0 < float(said[1]) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    assert not own_memory()


def test_a_limit_of_the_process_is_reported_with_the_size() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, before[1]))
    said = r"0\.4 GB of host memory .*Cannot allocate memory.*ulimit"
    try:
        with coded(superoffload.OffloadError, "host-memory-limit", match=said):
            shared_states(30_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not own_memory()
