"""A script partitions cache and memory bandwidth within the limits of the hardware, and takes it
back.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.commands.mpam import (
    _partition_script,
    _partitions,
    _read_resctrl,
    _Resctrl,
    print_mpam_script,
)
from so_tui.machine.system_files import SystemFiles
from so_tui.plan.binding import bind_ranks
from so_tui.plan.plan import RankBinding
from tests.support.machines import superchips
from tests.support.problems import rejected
from tests.support.sysroots import build_files

GRACE = {
    "schemata": "    MB:1=100\n    L3:1=fff\n",
    "info/MB/num_closids": "64",
    "info/MB/min_bandwidth": "1",
    "info/MB/bandwidth_gran": "1",
    "info/L3/num_closids": "64",
    "info/L3/min_cbm_bits": "1",
}
"""A Grace whose only L3 cache has the id 1, as in the published example."""


def tree(
    folder: Path, files: dict[str, str], caches: dict[int, int], options: str = "rw,relatime"
) -> SystemFiles:
    """Write a copy of a resctrl tree, and which L3 cache each CPU has."""
    mount = f"{folder}/sys/fs/resctrl" if options == "own" else "/sys/fs/resctrl"
    everything = {f"/sys/fs/resctrl/{name}": f"{text}\n" for name, text in files.items()}
    everything["/proc/mounts"] = f"proc /proc proc rw 0 0\nresctrl {mount} resctrl {options} 0 0\n"
    everything["/sys/devices/system/cpu/online"] = ",".join(map(str, caches))
    for cpu, cache in caches.items():
        everything[f"/sys/devices/system/cpu/cpu{cpu}/cache/index0/level"] = "1"
        everything[f"/sys/devices/system/cpu/cpu{cpu}/cache/index3/level"] = "3"
        everything[f"/sys/devices/system/cpu/cpu{cpu}/cache/index3/id"] = str(cache)
    return SystemFiles(build_files(everything, folder))


def bindings(chips: int = 1, fraction: float = 0.9) -> tuple[RankBinding, ...]:
    return bind_ranks(
        superchips(chips), chips, mode="superoffload", cpu_adam_cores_fraction=fraction
    )


def grace(tmp_path: Path) -> _Resctrl:
    found = _read_resctrl(tree(tmp_path, GRACE, dict.fromkeys(range(72), 1)))
    assert found is not None
    return found


def test_the_published_example_follows_from_the_tree(tmp_path: Path) -> None:
    seven_main = 65 / 72
    found = _partitions(grace(tmp_path), bindings(fraction=seven_main), "node7")
    assert [(part.role, part.cpus, part.schemata) for part in found] == [
        ("main", tuple(range(7)), ("MB:1=100", "L3:1=ff0")),
        ("adam", tuple(range(7, 72)), ("MB:1=20", "L3:1=f")),
    ]


def schemata(found: _Resctrl, chips: int = 1) -> list[tuple[str, ...]]:
    return [partition.schemata for partition in _partitions(found, bindings(chips), "node7")]


def test_each_rank_is_partitioned_in_its_own_cache(tmp_path: Path) -> None:
    files = {**GRACE, "schemata": "MB:1=100;2=100;3=100\nL3:1=fff;2=fff;3=fff\n"}
    found = _read_resctrl(tree(tmp_path, files, {cpu: 1 + cpu // 72 for cpu in range(144)}))
    assert found is not None
    assert schemata(found, 2) == [
        ("MB:1=100;2=100", "L3:1=ff0;2=ff0"),
        ("MB:1=20;2=20", "L3:1=f;2=f"),
    ]
    assert schemata(replace(found, cache_of={}), 2)[1] == (
        "MB:1=20;2=20;3=20",
        "L3:1=f;2=f;3=f",
    )  # caches of CPUs not known


@pytest.mark.parametrize(
    ("limits", "adam"),
    [
        ({"bandwidth_step": 10, "least_bandwidth": 10}, ("MB:1=20", "L3:1=f")),  # Intel
        ({"bandwidth_step": 15}, ("MB:1=30", "L3:1=f")),
        ({"least_bandwidth": 40, "bandwidth_step": 10}, ("MB:1=40", "L3:1=f")),
        ({"bandwidth": {1: 2048}}, ("MB:1=410", "L3:1=f")),  # AMD, in eighths of a GB/s
        ({"bandwidth": {}}, ("L3:1=f",)),
        ({"caches": {}}, ("MB:1=20",)),
        ({"caches": {"L3": {1: 0x7FF0}}, "least_bits": 2}, ("MB:1=20", "L3:1=f0")),
        (
            {"caches": {"L3CODE": {1: 0xFF}, "L3DATA": {1: 0xFF}}},
            ("MB:1=20", "L3CODE:1=7", "L3DATA:1=7"),
        ),
        ({"caches": {"L3": {1: 0x3}}, "least_bits": 2}, ("MB:1=20", "L3:1=3")),  # too narrow to cut
        ({"caches": {"L3": {1: 0b110101}}}, ("MB:1=20", "L3:1=35")),
    ],
)
def test_limits_of_other_hardware(
    tmp_path: Path, limits: dict[str, object], adam: tuple[str, ...]
) -> None:
    assert schemata(replace(grace(tmp_path), **limits))[1] == adam


def test_parts_of_a_mask_are_disjoint_and_whole(tmp_path: Path) -> None:
    found = grace(tmp_path)
    for bits in range(4, 33):
        main, adam = (
            int(lines[1].partition("=")[2], 16)
            for lines in schemata(replace(found, caches={"L3": {1: 2**bits - 1}}))
        )
        assert main & adam == 0
        assert main | adam == 2**bits - 1


def test_why_nothing_is_partitioned(tmp_path: Path) -> None:
    found = grace(tmp_path)
    without = tuple(replace(binding, adam_cpus=()) for binding in bindings())
    shared = tuple(replace(binding, main_cpus=(0,), adam_cpus=(0,)) for binding in bindings())
    for code, limits, ranks in (
        ("too-few-partitions", replace(found, most_groups=2), bindings()),
        ("no-partitions", replace(found, bandwidth={}, caches={}), bindings()),
        ("cores-partitioned", replace(found, groups={"theirs": (71,)}), bindings()),
        ("no-adam-cores", found, without),
        ("no-adam-cores", found, shared),
    ):
        with rejected(code):
            _partitions(limits, ranks, "node7")


def test_bandwidth_in_bytes_is_left_alone(tmp_path: Path) -> None:
    files = {**GRACE, "schemata": "MB:1=4294967295\nL3:1=fff\n"}
    found = _read_resctrl(tree(tmp_path, files, {0: 1}, "rw,mba_MBps"))
    assert found is not None
    assert found.bandwidth == {}
    assert _read_resctrl(SystemFiles(tmp_path / "nothing")) is None


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-s", *arguments],
        input=script,
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_an_administrators_script_does_the_same_and_undoes_it(tmp_path: Path) -> None:
    files = tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))
    found = replace(grace(tmp_path), mount=str(tmp_path / "sys/fs/resctrl"))
    wanted = _partitions(found, bindings(), "node7")
    script = _partition_script("quad $(touch hacked)\x1b[2J\nrm -rf", found, wanted)
    assert "\x1b" not in script
    ran = run_script(script)
    assert (ran.returncode, ran.stderr) == (0, "")
    made = {f"so-tui-{partition.role}": partition.cpus for partition in wanted}
    left = _read_resctrl(files)
    assert left is not None
    assert left.groups == made
    for group in (tmp_path / "sys/fs/resctrl").glob("so-tui-*"):  # resctrl removes them itself
        for file in group.iterdir():
            file.unlink()
    assert run_script(script, "undo").returncode == 0
    left = _read_resctrl(files)
    assert left is not None
    assert left.groups == {}


def test_doctor_prints_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or says why not."""
    kernel = build_files({"/proc/filesystems": "nodev\tresctrl\n"}, tmp_path / "kernel")
    for files, printed in (
        (tree(tmp_path, GRACE, dict.fromkeys(range(72), 1)), "MB:1=20"),
        (SystemFiles(kernel), "mount -t resctrl"),
    ):
        monkeypatch.setattr("so_tui.commands.mpam.SystemFiles", lambda files=files: files)
        assert print_mpam_script(superchips(1), None) == 0
        script = capsys.readouterr().out
        assert printed in script
        told = subprocess.run(["sh", "-n"], input=script, text=True, check=False, timeout=60)
        assert told.returncode == 0
    nothing = SystemFiles(tmp_path / "none")
    monkeypatch.setattr("so_tui.commands.mpam.SystemFiles", lambda: nothing)
    with rejected("no-resctrl"):
        print_mpam_script(superchips(1), None)
