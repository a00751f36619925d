"""Cache and memory bandwidth are partitioned within the limits of the hardware, and nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.commands.mpam import print_mpam_script
from so_tui.launch import prepare
from so_tui.launch.supervisor.host import Job
from so_tui.launch.supervisor.mpam import (
    VARIABLE,
    Partitioning,
    mount_script,
    partition_script,
    possible,
    remove_leftovers,
)
from so_tui.launch.supervisor.samples import group_of
from so_tui.machine.resctrl import Resctrl, read_groups, read_resctrl
from so_tui.machine.system_files import SystemFiles
from so_tui.plan.binding import bind_ranks
from so_tui.plan.partitions import partitions
from so_tui.plan.plan import RankBinding
from so_tui.runs import create_run, new_attempt
from so_tui.runs.liveness import this_host
from so_tui.spec import InputError, find_preset, with_values
from tests.support.machines import superchips
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


def grace(tmp_path: Path) -> Resctrl:
    found = read_resctrl(tree(tmp_path, GRACE, dict.fromkeys(range(72), 1)))
    assert found is not None
    return found


def test_the_published_example_follows_from_the_tree(tmp_path: Path) -> None:
    seven_main = 65 / 72
    wanted = partitions(grace(tmp_path), bindings(fraction=seven_main))
    assert not isinstance(wanted, str)
    main, adam = wanted
    assert (main.role, main.cpus, main.schemata) == (
        "main",
        tuple(range(7)),
        ("MB:1=100", "L3:1=ff0"),
    )
    assert (adam.role, adam.cpus, adam.schemata) == (
        "adam",
        tuple(range(7, 72)),
        ("MB:1=20", "L3:1=f"),
    )


def schemata(found: Resctrl, chips: int = 1) -> list[tuple[str, ...]]:
    wanted = partitions(found, bindings(chips))
    assert not isinstance(wanted, str)
    return [partition.schemata for partition in wanted]


def test_each_rank_is_partitioned_in_its_own_cache(tmp_path: Path) -> None:
    files = {**GRACE, "schemata": "MB:1=100;2=100;3=100\nL3:1=fff;2=fff;3=fff\n"}
    found = read_resctrl(tree(tmp_path, files, {cpu: 1 + cpu // 72 for cpu in range(144)}))
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
    for bits in range(4, 33):
        main, adam = (
            int(lines[1].partition("=")[2], 16)
            for lines in schemata(replace(grace(tmp_path), caches={"L3": {1: 2**bits - 1}}))
        )
        assert main & adam == 0
        assert main | adam == 2**bits - 1


def test_why_nothing_is_partitioned(tmp_path: Path) -> None:
    found = grace(tmp_path)
    assert partitions(replace(found, most_groups=2), bindings()) == "too-few-groups"
    assert partitions(replace(found, bandwidth={}, caches={}), bindings()) == "no-controls"
    assert partitions(replace(found, groups={"theirs": (71,)}), bindings()) == "cores-taken"
    without = tuple(replace(binding, adam_cpus=()) for binding in bindings())
    assert partitions(found, without) == "no-adam-cores"
    shared = tuple(replace(binding, main_cpus=(0,), adam_cpus=(0,)) for binding in bindings())
    assert partitions(found, shared) == "no-adam-cores"


def test_bandwidth_in_bytes_is_left_alone(tmp_path: Path) -> None:
    files = {**GRACE, "schemata": "MB:1=4294967295\nL3:1=fff\n"}
    found = read_resctrl(tree(tmp_path, files, {0: 1}, "rw,mba_MBps"))
    assert found is not None
    assert found.bandwidth == {}
    assert read_resctrl(SystemFiles(tmp_path / "nothing")) is None


@pytest.fixture
def _kernel_removes_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the files of a group with its folder, as resctrl does."""
    remove_folder = os.rmdir

    def rmdir(group: Path) -> None:
        for file in group.iterdir():
            file.unlink()
        remove_folder(group)

    monkeypatch.setattr(os, "rmdir", rmdir)
    monkeypatch.setenv(VARIABLE, "on")


@pytest.mark.usefixtures("_kernel_removes_files")
def test_groups_are_made_and_removed(tmp_path: Path) -> None:
    files = tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))
    partitioning = Partitioning(tmp_path)
    main, adam = partitioning.apply(bindings())
    groups = read_groups(files, "/sys/fs/resctrl")
    assert sorted(groups.values()) == sorted([main.cpus, adam.cpus])
    (name,) = (name for name in groups if name.startswith("so-tui-adam-"))
    assert (tmp_path / "sys/fs/resctrl" / name / "schemata").read_text() == "MB:1=20\nL3:1=f\n"
    assert group_of(adam.cpus[3:9], groups) == name
    assert group_of((0, 71), groups) == group_of((), groups) == ""
    assert (
        Partitioning(tmp_path).apply(bindings()) == ()
    )  # another run of this host: the first one lives
    assert remove_leftovers(files) == ()
    partitioning.remove()
    partitioning.remove()
    assert read_groups(files, "/sys/fs/resctrl") == {}


def test_partitions_are_possible_where_resctrl_may_be_written_and_ranks_have_adam_cores(
    tmp_path: Path,
) -> None:
    assert not possible(bindings(), tmp_path)
    tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))
    assert possible(bindings(), tmp_path)
    assert not possible([replace(rank, adam_cpus=()) for rank in bindings()], tmp_path)


@pytest.mark.usefixtures("_kernel_removes_files")
def test_what_a_dead_supervisor_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    files = tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    namespace = this_host().pid_namespace
    left = f"so-tui-adam-{namespace}-{ended.pid}-17"
    foreign = f"so-tui-adam-{namespace + 1}-{ended.pid}-17"
    for name, cpus in ((left, "7-71"), (foreign, "200"), ("theirs", "201")):
        build_files({f"/sys/fs/resctrl/{name}/cpus_list": f"{cpus}\n"}, tmp_path)
    assert len(Partitioning(tmp_path).apply(bindings())) == 2
    names = read_groups(files, "/sys/fs/resctrl")
    assert left not in names
    assert {foreign, "theirs"} <= names.keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of another user")
def test_a_group_of_another_user_stays_although_its_supervisor_is_not_seen(tmp_path: Path) -> None:
    files = tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))
    name = f"so-tui-adam-{this_host().pid_namespace}-{2**22 + 1}-17"
    build_files({f"/sys/fs/resctrl/{name}/cpus_list": "7-71\n"}, tmp_path)
    os.chown(tmp_path / "sys/fs/resctrl" / name, 65534, 65534)
    assert remove_leftovers(files) == ()
    assert name in read_groups(files, "/sys/fs/resctrl")


@pytest.mark.usefixtures("_kernel_removes_files")
def test_nothing_is_made_unasked_and_an_error_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))
    with monkeypatch.context() as unasked:
        unasked.delenv(VARIABLE)
        assert Partitioning(tmp_path).apply(bindings()) == ()
    assert read_groups(files, "/sys/fs/resctrl") == {}
    written = Path.write_text

    def refusing(path: Path, text: str) -> int:
        if path.name == "cpus_list" and "7" in text:
            raise OSError(22, "Invalid argument")
        return written(path, text)

    with monkeypatch.context() as refused:
        refused.setattr(Path, "write_text", refusing)
        with pytest.raises(OSError, match="Invalid"):
            Partitioning(tmp_path).apply(bindings())
    assert read_groups(files, "/sys/fs/resctrl") == {}


@pytest.mark.usefixtures("_kernel_removes_files")
def test_a_run_has_its_partitions_as_long_as_its_supervisor_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(
        "so_tui.launch.supervisor.host.Partitioning", partial(Partitioning, tmp_path)
    )
    machine = replace(superchips(1), gpus=())
    launch = prepare(
        with_values(find_preset("tiny").spec, {"gpus": "1", "offload.mode": "superoffload"}),
        machine,
        force=True,
    )
    run = create_run(launch.spec, tmp_path / "runs")
    job = Job(run, new_attempt(run), machine.hostname, launch)
    job.take_over()  # as after a supervisor was killed; starting it would take its host
    assert sorted(map(len, read_groups(files, "/sys/fs/resctrl").values())) == [8, 64]
    job.release()
    assert read_groups(files, "/sys/fs/resctrl") == {}


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
    wanted = partitions(found, bindings())
    assert not isinstance(wanted, str)
    script = partition_script("quad $(touch hacked)\x1b[2J\nrm -rf", found, wanted)
    assert "\x1b" not in script
    ran = run_script(script)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert read_groups(files, "/sys/fs/resctrl") == {
        f"so-tui-{partition.role}": partition.cpus for partition in wanted
    }
    for group in (tmp_path / "sys/fs/resctrl").glob("so-tui-*"):  # resctrl removes them itself
        for file in group.iterdir():
            file.unlink()
    assert run_script(script, "undo").returncode == 0
    assert read_groups(files, "/sys/fs/resctrl") == {}
    assert (
        subprocess.run(
            ["sh", "-n"], input=mount_script("host"), text=True, check=False, timeout=60
        ).returncode
        == 0
    )


def test_doctor_prints_the_script_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = superchips(1)
    assert print_mpam_script(machine, None, tree(tmp_path, GRACE, dict.fromkeys(range(72), 1))) == 0
    assert "MB:1=20" in capsys.readouterr().out
    assert (
        print_mpam_script(
            machine,
            None,
            SystemFiles(
                build_files({"/proc/filesystems": "nodev\tresctrl\n"}, tmp_path / "kernel")
            ),
        )
        == 0
    )
    assert "mount -t resctrl" in capsys.readouterr().out
    with pytest.raises(InputError) as refused:
        print_mpam_script(machine, None, SystemFiles(tmp_path / "none"))
    assert [problem.code for problem in refused.value.problems] == ["no-resctrl"]
