"""A script partitions cache and memory bandwidth within limits, and takes it back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.commands import mpam
from so_tui.machine.system_files import SystemFiles
from so_tui.plan.binding import bind_ranks
from so_tui.plan.plan import Binding
from tests.support.machines import superchips
from tests.support.problems import rejected
from tests.support.sysroots import build_files

GRACE = {
    "schemata": "    MB:1=100\n    L3:1=fff\n",
    "info/MB/num_closids": "64",
    "info/MB/min_bandwidth": "1",
    "info/L3/num_closids": "64",
    "info/L3/min_cbm_bits": "1",
}
"""A Grace whose only L3 cache has the id 1, as in the published example."""


def tree(folder: Path, files: dict[str, str] = GRACE, options: str = "rw,relatime") -> SystemFiles:
    everything = {f"/sys/fs/resctrl/{name}": f"{text}\n" for name, text in files.items()}
    everything["/proc/mounts"] = f"resctrl /sys/fs/resctrl resctrl {options} 0 0\n"
    return SystemFiles(build_files(everything, folder))


def read(files: SystemFiles) -> mpam._Resctrl:
    found = mpam._read_resctrl(files)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grace(tmp_path_factory: pytest.TempPathFactory) -> mpam._Resctrl:
    return read(tree(tmp_path_factory.mktemp("grace")))


def bindings(chips: int = 1) -> Binding:
    return bind_ranks(superchips(chips), chips, cpu_adam_cores_fraction=0.9)


def schemata(found: mpam._Resctrl, chips: int = 1) -> list[tuple[str, ...]]:
    return [partition.schemata for partition in mpam._partitions(found, bindings(chips), "node7")]


def test_all_caches_are_partitioned(tmp_path: Path) -> None:
    both = {"schemata": "MB:1=100;2=100\nL3:1=fff;2=fff\n"}
    assert schemata(read(tree(tmp_path, GRACE | both)), 2) == [
        ("MB:1=100;2=100", "L3:1=ff0;2=ff0"),
        ("MB:1=20;2=20", "L3:1=f;2=f"),
    ]


@pytest.mark.parametrize(
    ("limits", "adam"),
    [
        ({"least_bandwidth": 40}, ("MB:1=40", "L3:1=f")),
        ({"bandwidth": {1: 2048}}, ("MB:1=410", "L3:1=f")),  # AMD, in eighths of a GB/s
        ({"bandwidth": {1: 35}}, ("MB:1=7", "L3:1=f")),
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
    grace: mpam._Resctrl, limits: dict[str, object], adam: tuple[str, ...]
) -> None:
    assert schemata(replace(grace, **limits))[1] == adam


def test_parts_of_a_mask_are_disjoint_and_whole(grace: mpam._Resctrl) -> None:
    for bits in range(4, 33):
        cut = schemata(replace(grace, caches={"L3": {1: 2**bits - 1}}))
        main, adam = (int(lines[1].partition("=")[2], 16) for lines in cut)
        assert (main & adam, main | adam) == (0, 2**bits - 1)


def test_why_nothing_is_partitioned(grace: mpam._Resctrl) -> None:
    without = tuple(replace(binding, adam_cpus=()) for binding in bindings())
    shared = tuple(replace(binding, main_cpus=(0,), adam_cpus=(0,)) for binding in bindings())
    for code, limits, ranks in (
        ("too-few-partitions", replace(grace, most_groups=2), bindings()),
        ("no-partitions", replace(grace, bandwidth={}, caches={}), bindings()),
        ("cores-partitioned", replace(grace, groups={"theirs": (71,)}), bindings()),
        ("no-adam-cores", grace, without),
        ("no-adam-cores", grace, shared),
    ):
        with rejected(code):
            mpam._partitions(limits, ranks, "node7")


def test_bandwidth_in_bytes_is_left_alone(tmp_path: Path) -> None:
    files = {**GRACE, "schemata": "MB:1=4294967295\nL3:1=fff\n"}
    assert read(tree(tmp_path, files, options="rw,mba_MBps")).bandwidth == {}


def run_script(script: str, *arguments: str) -> None:
    argv = ["sh", *arguments]
    ran = subprocess.run(argv, input=script, text=True, capture_output=True, check=True, timeout=60)
    assert ran.stderr == ""


def test_an_administrators_script_does_the_same_and_undoes_it(tmp_path: Path) -> None:
    files, folder = tree(tmp_path), tmp_path / "sys/fs/resctrl"
    found = replace(read(files), mount=str(folder))
    wanted = mpam._partitions(found, bindings(), "node7")
    script = mpam._partition_script("quad $(touch hacked)\x1b[2J\nrm -rf", found, wanted)
    assert "\x1b" not in script
    run_script(script, "-s")
    assert read(files).groups == {f"so-tui-{part.role}": part.cpus for part in wanted}
    for file in folder.glob("so-tui-*/*"):  # resctrl removes them itself
        file.unlink()
    run_script(script, "-s", "undo")
    assert read(files).groups == {}


def test_doctor_prints_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or says why not."""
    kernel = build_files({"/proc/filesystems": "nodev\tresctrl\n"}, tmp_path / "kernel")
    for files, printed in (
        (tree(tmp_path), "MB:1=20"),
        (SystemFiles(kernel), "mount -t resctrl"),
    ):
        monkeypatch.setattr("so_tui.commands.mpam.SystemFiles", lambda files=files: files)
        assert mpam.print_mpam_script(superchips(1), None) == 0
        script = capsys.readouterr().out
        assert printed in script
        run_script(script, "-n")
    nothing = SystemFiles(tmp_path / "none")
    monkeypatch.setattr("so_tui.commands.mpam.SystemFiles", lambda: nothing)
    with rejected("no-resctrl"):
        mpam.print_mpam_script(superchips(1), None)
