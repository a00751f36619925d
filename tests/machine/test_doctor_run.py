"""Doctor with a plan: each trap of a run's settings on the machine where it bites, and silence where it does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_doctor import GIB, found, healthy, needs_of, only, with_gpu, with_software

from so_tui.cli import main
from so_tui.machine.types import Machine
from tests.support.sysroots import ONE_GH200

THEIRS = {"offload.engine": "deepspeed", "train.gradient_clipping": "0"}


def test_a_plan_that_does_not_fit_blocks(tmp_path: Path) -> None:
    short, mends = ("host node 0 needs 300 GiB", "each GPU needs 99 GiB"), ("4 GPUs hold it", "a larger part would")
    finding = only(found(healthy(tmp_path), plan=needs_of(fits=False, reasons=(*short, *mends), remedies=mends)))
    assert (finding.severity, finding.evidence, finding.remedy) == ("blocks", "; ".join(short), "4 GPUs hold it; or a larger part would")


@pytest.mark.parametrize(("share", "severity"), [(0.5, None), (0.95, "warning"), (1.5, "blocks")])
def test_a_memory_limit_against_what_the_run_needs(tmp_path: Path, share: float, severity: str | None) -> None:
    machine = healthy(tmp_path, memory_limit_bytes=100 * GIB)
    results = found(machine, plan=needs_of(host_bytes_per_node={0: int(60 * share * GIB), 1: int(40 * share * GIB)}))
    assert [finding.severity for finding in results] == ([severity] if severity else [])
    assert all("limits memory" in finding.title for finding in results)


def test_memory_that_others_hold(tmp_path: Path) -> None:
    files = {"/proc/meminfo": f"MemAvailable: {20 * GIB // 1024} kB\n"}
    machine = healthy(tmp_path / "m")
    finding = only(found(machine, files, tmp_path / "t", plan=needs_of(host_bytes_per_node={0: 30 * GIB})))
    assert finding.severity == "warning"
    assert "available 20.0 GiB" in finding.evidence
    assert found(machine, files, tmp_path / "t", plan=needs_of(host_bytes_per_node={0: 10 * GIB})) == ()
    growing = msgspec.structs.replace(machine, notes=("Memory of this virtual machine may start small and grow on demand; ...",))
    assert found(growing, files, tmp_path / "t", plan=needs_of(host_bytes_per_node={0: 30 * GIB})) == ()


def test_room_for_checkpoints(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    machine = healthy(tmp_path / "m")
    absent = tmp_path / "runs" / "not yet there"
    finding = only(found(machine, plan=needs_of(disk_peak_bytes=free * 2), checkpoints=absent))
    assert finding.severity == "blocks"
    assert str(tmp_path) in finding.evidence
    assert found(machine, plan=needs_of(disk_peak_bytes=free // 2, disk_bytes=free // 4), checkpoints=absent) == ()
    assert found(machine, checkpoints=tmp_path) == () or free < 10_000_000_000
    assert not absent.exists(), "looking makes nothing"


# (settings over DeepSpeed's own engine, machine, part of the title)
ENGINE_TRAPS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"train.gradient_clipping": "1"}, {}, "clipping stops the overlap"),
    ({"offload.cpu_adam_cores_fraction": "0.9"}, {"allowed_cpus": tuple(range(9))}, "no core of its own"),
    ({}, {"compute_mode": "Exclusive_Process"}, "takes two processes"),
    ({}, {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, "expandable_segments"),
]


@pytest.mark.parametrize(("settings", "changes", "title"), ENGINE_TRAPS)
def test_traps_of_deepspeeds_engine_that_ours_does_not_have(
    tmp_path: Path, settings: dict[str, str], changes: dict[str, Any], title: str
) -> None:
    def titles(engine: str) -> list[str]:
        machine: Machine = healthy(tmp_path / engine, ONE_GH200)
        if "compute_mode" in changes:
            machine = with_gpu(machine, compute_mode=changes["compute_mode"])
        if "allowed_cpus" in changes:
            machine = msgspec.structs.replace(machine, allowed_cpus=changes["allowed_cpus"])
        plan = needs_of(changes={"gpus": "1", **THEIRS, **settings, "offload.engine": engine})
        return [finding.title for finding in found(machine, plan=plan, environment=changes.get("environment", {}))]

    assert any(title in one for one in titles("deepspeed"))
    assert not any(title in one for one in titles("so-tui"))


def test_what_deepspeeds_adam_is_compiled_with(tmp_path: Path) -> None:
    plan = needs_of(mode="zerooffload")
    without = with_software(healthy(tmp_path / "m"), ninja=None, cuda_toolkit="13.0")
    assert only(found(without, plan=plan)).severity == "blocks"
    other = with_software(healthy(tmp_path / "n"), cuda_toolkit="12.8")
    assert "not the one torch was built for" in only(found(other, plan=plan)).title
    assert found(other, plan=plan, environment={"DS_SKIP_CUDA_CHECK": "1"}) == ()
    assert found(other, plan=needs_of()) == (), "our own Adam needs no toolkit"
    same = with_software(healthy(tmp_path / "o"), cuda_toolkit="13.0")
    home = {"HOME": "/home/a"}
    assert "not compiled yet" in only(found(same, {}, tmp_path / "t", plan=plan, environment=home)).title
    built = {"/home/a/.cache/torch_extensions/py312_cu130/cpu_adam/cpu_adam.so": ""}
    assert found(other, built, tmp_path / "u", plan=plan, environment=home) == ()


@pytest.mark.parametrize(
    ("left_s", "settings", "step_s", "title"),
    [
        (36_000, {"train.steps": "1000"}, 10.0, None),
        (7_200, {"train.steps": "1000"}, 10.0, "The job ends before the run does"),
        (300, {"train.epochs": "1"}, None, "This job ends soon"),
        (36_000, {"train.epochs": "1"}, None, None),
    ],
)
def test_the_time_limit_of_a_job(tmp_path: Path, left_s: int, settings: dict[str, str], step_s: float | None, title: str | None) -> None:
    plan = needs_of(changes=settings, step_s=step_s)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(1_000_000 + left_s)}
    results = found(healthy(tmp_path), plan=plan, environment=environment, now=1_000_000.0)
    assert [finding.title for finding in results] == ([title] if title else [])


def test_the_command_knows_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "machine.json"
    host = ONE_GH200.machine(tmp_path / "root")
    machine.write_bytes(msgspec.json.encode(host))
    assert main(["doctor", "--machine", str(machine)]) == 0
    capsys.readouterr()
    assert main(["doctor", "llama-3.3-70b", "--gpus", "1", "--machine", str(machine)]) == 3
    assert "The plan does not fit this machine" in capsys.readouterr().out
    assert main(["doctor", "no-such-preset"]) == 2
    assert "there is no such preset" in capsys.readouterr().err
