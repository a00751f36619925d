"""Doctor with a plan finds each trap of a run's settings on a machine where it matters, and nothing
elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.cli import main
from so_tui.machine.doctor import CheckContext, run
from so_tui.machine.software import extensions_folder
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine
from tests.support.doctor import GIB, Needs, found, healthy, kinds, only, with_gpu, with_software
from tests.support.sysroots import ONE_GH200

IN_MEMORY = ("warning", "checkpoints-in-memory")
THEIRS = {"offload.engine": "deepspeed", "train.gradient_clipping": "0"}


def test_a_plan_that_does_not_fit_blocks() -> None:
    short, mends = (
        ("host node 0 needs 300 GiB", "each GPU needs 99 GiB"),
        ("4 GPUs hold it", "a larger part would"),
    )
    finding = only(found(healthy(), plan=Needs(fits=False, cause_texts=short, remedy_texts=mends)))
    assert (finding.severity, finding.code, finding.evidence) == (
        "blocks",
        "plan-does-not-fit",
        "; ".join(short),
    )
    assert finding.remedy == "4 GPUs hold it; or a larger part would"


@pytest.mark.parametrize(
    ("share", "kind"),
    [(0.5, None), (0.95, ("warning", "memory-limit")), (1.5, ("blocks", "memory-limit-exceeded"))],
)
def test_memory_limit_for_the_run(share: float, kind: tuple[str, str] | None) -> None:
    machine = healthy(memory_limit_bytes=100 * GIB)
    results = found(
        machine,
        plan=Needs(host_bytes_per_node={0: int(60 * share * GIB), 1: int(40 * share * GIB)}),
    )
    assert kinds(results) == ([kind] if kind else [])
    without = Needs(
        host_bytes_per_node={0: int(100 * share * GIB) + 80 * GIB}, host_optional_bytes=80 * GIB
    )
    assert kinds(found(machine, plan=without)) == kinds(results)


def test_memory_that_others_hold(tmp_path: Path) -> None:
    files = {"/proc/meminfo": f"MemAvailable: {20 * GIB // 1024} kB\n"}
    machine, needs = healthy(), Needs(host_bytes_per_node={0: 30 * GIB})
    finding = only(found(machine, files, tmp_path / "t", plan=needs))
    assert (finding.severity, finding.code) == ("warning", "memory-in-use")
    assert "available 20.0 GiB" in finding.evidence
    for other, less in (
        (machine, Needs(host_bytes_per_node={0: 10 * GIB})),
        (machine, Needs(host_bytes_per_node={0: 30 * GIB}, host_optional_bytes=15 * GIB)),
        (msgspec.structs.replace(machine, memory_grows=True), needs),
    ):
        assert found(other, files, tmp_path / "t", plan=less) == ()


def test_room_for_checkpoints(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    machine = healthy()
    absent = tmp_path / "runs" / "not yet there"
    too_large = found(machine, plan=Needs(disk_peak_bytes=free * 2), checkpoints=absent)
    assert kinds(too_large)[1:] in ([], [IN_MEMORY])
    finding = too_large[0]
    assert (finding.severity, finding.code) == ("blocks", "no-room-for-checkpoints")
    assert str(tmp_path) in finding.evidence
    fits = found(
        machine, plan=Needs(disk_peak_bytes=free // 2, disk_bytes=free // 4), checkpoints=absent
    )
    assert kinds(fits) in ([], [IN_MEMORY])  # where the tests' folder is one in memory
    assert kinds(found(machine, checkpoints=tmp_path)) in ([], [IN_MEMORY]) or free < 10_000_000_000
    assert not absent.exists(), "a check creates nothing"


def test_checkpoints_in_a_folder_that_is_host_memory(tmp_path: Path) -> None:
    machine, needs = healthy(), Needs(disk_peak_bytes=1)
    assert kinds(found(machine, plan=needs, checkpoints=Path("/dev/shm/runs"))) == [IN_MEMORY]
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    assert "/dev/shm" in only(found(machine, plan=needs, checkpoints=link / "runs")).evidence
    assert found(machine, plan=needs, checkpoints=Path("/usr/runs")) == ()


def test_largest_processes_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_LARGE_BYTES", 0)
    needs = Needs(host_bytes_per_node={0: 1 << 60})
    (finding,) = run._check_memory(CheckContext(machine=healthy(), plan=needs, files=SystemFiles()))
    assert finding.code == "memory-in-use"
    assert finding.evidence.count("(process ") == 3


# (settings over DeepSpeed's own engine, changes of the machine, code)
ENGINE_TRAPS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"train.gradient_clipping": "1"}, {}, "clipping-stops-overlap"),
    ({"offload.cpu_adam_cores_fraction": "0.9"}, {"allowed_cpus": tuple(range(9))}, "no-main-core"),
    ({}, {"compute_mode": "Exclusive_Process"}, "gpu-allows-one-process"),
    (
        {},
        {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        "expandable-segments",
    ),
]


@pytest.mark.parametrize(("settings", "changes", "code"), ENGINE_TRAPS)
def test_traps_of_deepspeeds_engine_alone(
    settings: dict[str, str], changes: dict[str, Any], code: str
) -> None:
    def codes(engine: str) -> list[str]:
        machine: Machine = healthy(ONE_GH200)
        if "compute_mode" in changes:
            machine = with_gpu(machine, compute_mode=changes["compute_mode"])
        if "allowed_cpus" in changes:
            machine = msgspec.structs.replace(machine, allowed_cpus=changes["allowed_cpus"])
        plan = Needs(changes={"gpus": "1", **THEIRS, **settings, "offload.engine": engine})
        return [
            finding.code
            for finding in found(machine, plan=plan, environment=changes.get("environment", {}))
        ]

    assert code in codes("deepspeed")
    assert code not in codes("so-tui")


def test_what_deepspeeds_adam_is_compiled_with(tmp_path: Path) -> None:
    plan = Needs(mode="zerooffload")
    without = with_software(healthy(), ninja=None, cuda_toolkit="13.0")
    assert kinds(found(without, plan=plan)) == [("blocks", "no-ninja")]
    other = with_software(healthy(), cuda_toolkit="12.8")
    assert only(found(other, plan=plan)).code == "cuda-toolkit-mismatch"
    assert found(other, plan=plan, environment={"DS_SKIP_CUDA_CHECK": "1"}) == ()
    assert found(other, plan=Needs()) == (), "our own Adam needs no toolkit"
    same = with_software(healthy(), cuda_toolkit="13.0")
    home = {"HOME": "/home/a"}
    assert (
        only(found(same, {}, tmp_path / "t", plan=plan, environment=home)).code
        == "adam-not-compiled"
    )
    built = {f"{extensions_folder(home)}/cpu_adam/cpu_adam.so": ""}
    assert found(other, built, tmp_path / "u", plan=plan, environment=home) == ()


@pytest.mark.parametrize(
    ("left_s", "settings", "step_s", "code"),
    [
        (36_000, {"train.steps": "1000"}, 10.0, None),
        (7_200, {"train.steps": "1000"}, 10.0, "job-too-short"),
        (300, {"train.epochs": "1"}, None, "job-ends-soon"),
        (36_000, {"train.epochs": "1"}, None, None),
    ],
)
def test_the_time_limit_of_a_job(
    left_s: int, settings: dict[str, str], step_s: float | None, code: str | None
) -> None:
    plan = Needs(changes=settings, step_s=step_s)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(1_000_000 + left_s)}
    results = found(healthy(), plan=plan, environment=environment, now=1_000_000.0)
    assert kinds(results) == ([("warning", code)] if code else [])


def test_the_command_checks_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "machine.json"
    host = ONE_GH200.machine()
    machine.write_bytes(msgspec.json.encode(host))
    assert main(["doctor", "--machine", str(machine)]) == 0
    capsys.readouterr()
    assert main(["doctor", "llama-3.3-70b", "--gpus", "1", "--machine", str(machine)]) == 3
    assert "The plan does not fit this machine" in capsys.readouterr().out
    assert main(["doctor", "no-such-preset"]) == 2
    assert "there is no such preset" in capsys.readouterr().err
