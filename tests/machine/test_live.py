"""This machine itself: whatever it is, the snapshot must agree with what the kernel says
elsewhere.
"""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from so_tui.machine import Machine, inspect_machine, load_machine
from tests.support.machines import machine_json
from tests.support.python_path import printed


@pytest.fixture(scope="module")
def here() -> Machine:
    return inspect_machine()


def test_agrees_with_the_kernel(here: Machine) -> None:
    assert here.live
    assert here.hostname == os.uname().nodename
    assert here.architecture == os.uname().machine
    assert here.page_size_bytes == os.sysconf("SC_PAGE_SIZE")
    assert set(here.allowed_cpus) == os.sched_getaffinity(0)
    assert set(here.allowed_cpus) <= set(here.online_cpus)
    assert here.host_memory_bytes > 0
    assert here.cpu_name != "unknown"
    assert sorted({cpu for node in here.cpu_nodes for cpu in node.cpus}) == list(here.online_cpus)


def test_versions_are_those_installed(here: Machine) -> None:
    installed = {each.name.lower(): each.version for each in metadata.distributions()}
    assert here.software.torch == installed.get("torch")
    assert here.software.deepspeed == installed.get("deepspeed")
    assert (here.software.numactl is None) == (shutil.which("numactl") is None)
    if here.software.numactl is None:
        assert here.software.numactl_works is False


def test_a_smaller_affinity_is_respected() -> None:
    code = """
import os
from so_tui.machine import inspect_machine

first = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {first})
found = inspect_machine()
assert found.allowed_cpus == (first,), found.allowed_cpus
assert len(found.online_cpus) == 1 or any("may use 1 of" in note for note in found.notes)
"""
    printed("-c", code)


def test_a_live_inspection_is_quick_and_loads_nothing_heavy() -> None:
    code = """
import sys, time
from so_tui.machine import inspect_machine

start = time.process_time()
inspect_machine()
spent = time.process_time() - start
heavy = {"torch", "deepspeed", "transformers", "textual", "rich", "psutil", "numpy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert spent < 0.15, spent
"""
    printed("-c", code)


def test_a_machine_survives_its_file(here: Machine, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(machine_json(here))
    assert load_machine(file) == here
    newer = msgspec.json.decode(machine_json(here)) | {"field_of_a_later_version": 1}
    file.write_bytes(msgspec.json.encode(newer))
    assert load_machine(file) == here
