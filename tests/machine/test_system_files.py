"""Lists of CPUs, what a control group allows in both versions of the interface, and adapters of a
cluster's network.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from so_tui.machine import host
from so_tui.machine.host import (
    available_bytes,
    contiguous_runs,
    cpu_ranges,
    cpus_or_empty,
    parse_cpus,
)
from so_tui.machine.system_files import SystemFiles, read_network
from tests.support.sysroots import DATA, build_files

FILES = tomllib.loads((DATA / "system_files.toml").read_text())


def system_files(files: dict[str, str], folder: Path) -> SystemFiles:
    return SystemFiles(build_files(files, folder))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", (0, 1, 2, 3, 8)), ("\n", ()), ("7", (7,)), ("4,2-3", (2, 3, 4))],
)
def test_kernel_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(cpu_ranges(cpus)) == cpus


def test_ranges() -> None:
    assert cpu_ranges([3, 1, 2, 9]) == "1-3,9"
    assert contiguous_runs([5, 1, 2]) == ((1, 2), (5,))


@pytest.mark.parametrize("text", ["1-x", "65536", "0-70000", "3,70000-70001"])
def test_other_text_and_numbers_beyond_any_cpu_are_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|beyond any CPU"):
        parse_cpus(text)
    assert cpus_or_empty(text) == ()


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("v2", ({8, 9, 10, 11}, 64 << 30, 2.5)),
        ("v1", ({8, 9, 10, 11}, 64 << 30, 2.5)),
        ("hidden", ({8, 9, 10, 11}, 64 << 30, 2.5)),
        ("free", (None, None, None)),
        ("none", (None, None, None)),
    ],
)
def test_limits(tmp_path: Path, name: str, limits: tuple[object, ...]) -> None:
    found = system_files(FILES["cgroup"][name], tmp_path)
    assert (host._cpuset(found), host._memory_limit_bytes(found), host.cpu_quota(found)) == limits


@pytest.mark.parametrize("name", ["v2", "v1"])
def test_memory_left_counts_the_file_cache(tmp_path: Path, name: str) -> None:
    found = system_files(FILES["cgroup"][name], tmp_path)
    assert available_bytes(found) == (64 << 30) - 68_000_000_000 + 23


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("infiniband", (600, "mlx5_0:1, mlx5_1:1")),
        ("slingshot", (400, "hsn0, hsn1")),
        ("none", None),
        ("ethernet", None),
        ("no-number", None),
    ],
)
def test_network_adapters_that_are_up_add_up(
    name: str, network: tuple[float, str] | None, tmp_path: Path
) -> None:
    found = read_network(system_files(FILES["network"][name], tmp_path))
    assert (found and (found.gbit_per_s, found.source)) == network
