"""Doctor with a plan finds each trap of a run's settings on a machine where it matters, and nothing
elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from so_tui.cli import main
from so_tui.machine.software import extensions_folder
from tests.support.doctor import GIB, Needs, brief, examined, found, healthy, only
from tests.support.machines import machine_json
from tests.support.sysroots import ONE_GH200

IN_MEMORY = "warning checkpoints-in-memory"


def test_a_plan_that_does_not_fit_blocks() -> None:
    short = ("host node 0 needs 300 GiB", "each GPU needs 99 GiB")
    mends = ("4 GPUs hold it", "a larger part would")
    finding = only(found(healthy(), plan=Needs(fits=False, cause_texts=short, remedy_texts=mends)))
    assert brief((finding,)) == "blocks plan-does-not-fit"
    assert finding.evidence == "; ".join(short)
    assert finding.remedy == "4 GPUs hold it; or a larger part would"


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(50, ""), (95, "warning memory-limit"), (150, "blocks memory-limit-exceeded")],
)
def test_memory_limit_for_the_run(needed: int, expected: str) -> None:
    machine = healthy(memory_limit_bytes=100 * GIB)
    for needs in (
        Needs(host_bytes_per_node={0: 40 * GIB, 1: (needed - 40) * GIB}),
        Needs(host_bytes_per_node={0: (needed + 80) * GIB}, host_optional_bytes=80 * GIB),
    ):
        assert brief(found(machine, plan=needs)) == expected


def test_memory_that_others_hold(tmp_path: Path) -> None:
    files = {"/proc/meminfo": f"MemAvailable: {20 * GIB // 1024} kB\n"}
    needs = Needs(host_bytes_per_node={0: 30 * GIB})
    finding = only(found(healthy(), files, tmp_path, plan=needs))
    assert brief((finding,)) == "warning memory-in-use"
    assert "available 20.0 GiB" in finding.evidence
    assert examined(tmp_path, plan=needs, machine={"memory_grows": True}) == ""
    for less in (
        Needs(host_bytes_per_node={0: 10 * GIB}),
        Needs(host_bytes_per_node={0: 30 * GIB}, host_optional_bytes=15 * GIB),
    ):
        assert examined(tmp_path, plan=less) == ""


def test_room_for_checkpoints(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    absent = tmp_path / "runs" / "not yet there"
    too_large = found(healthy(), plan=Needs(least_disk_bytes=free * 2), checkpoints=absent)
    in_memory = ("", IN_MEMORY)  # where the tests' folder is one in memory
    assert brief(too_large[:1]) == "blocks no-room-for-checkpoints"
    assert brief(too_large[1:]) in in_memory
    assert str(tmp_path) in too_large[0].evidence
    fits = Needs(least_disk_bytes=free // 2, disk_bytes=free // 4)
    assert brief(found(healthy(), plan=fits, checkpoints=absent)) in in_memory
    known = brief(found(healthy(), checkpoints=tmp_path))
    assert known in in_memory or free < 10_000_000_000
    assert not absent.exists(), "a check creates nothing"


def test_checkpoints_in_a_folder_that_is_host_memory(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    for folder, expected in (("/dev/shm/runs", IN_MEMORY), (link, IN_MEMORY), ("/usr/runs", "")):
        results = found(healthy(), plan=Needs(least_disk_bytes=1), checkpoints=Path(folder))
        assert brief(results) == expected
        assert all("/dev/shm" in finding.evidence for finding in results)


@pytest.mark.parametrize(
    ("settings", "changes", "code"),
    [
        ({"train.gradient_clipping": "1"}, {}, "clipping-stops-overlap"),
        (
            {"offload.cpu_adam_cores_fraction": "0.9"},
            {"machine": {"allowed_cpus": tuple(range(9))}},
            "no-main-core",
        ),
        ({}, {"gpu": {"compute_mode": "Exclusive_Process"}}, "gpu-allows-one-process"),
        (
            {},
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            "expandable-segments",
        ),
    ],
)
def test_traps_of_deepspeeds_engine_alone(
    settings: dict[str, str], changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    chosen = {"gpus": "1", "train.gradient_clipping": "0", **settings}
    for engine, trapped in (("deepspeed", True), ("so-tui", False)):
        plan = Needs(changes={**chosen, "offload.engine": engine})
        assert (code in examined(tmp_path, host=ONE_GH200, plan=plan, **changes)) == trapped


BUILT = {f"{extensions_folder({'HOME': '/home/a'})}/cpu_adam/cpu_adam.so": ""}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"software": {"ninja": None, "cuda_toolkit": "13.0"}}, "blocks no-ninja"),
        ({"software": {"cuda_toolkit": "12.8"}}, "warning cuda-toolkit-mismatch"),
        ({"environment": {"DS_SKIP_CUDA_CHECK": "1"}, "software": {"cuda_toolkit": "12.8"}}, ""),
        ({"plan": Needs(), "software": {"cuda_toolkit": "12.8"}}, ""),  # our own needs no toolkit
        ({"files": {}, "software": {"cuda_toolkit": "13.0"}}, "note adam-not-compiled"),
        ({"files": BUILT, "software": {"cuda_toolkit": "12.8"}}, ""),
    ],
)
def test_what_deepspeeds_adam_is_compiled_with(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    usual = {"plan": Needs(mode="zerooffload"), "environment": {"HOME": "/home/a"}}
    folder = tmp_path if "files" in changes else None
    assert examined(folder, **{**usual, **changes}) == expected


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
    assert brief(results) == (f"warning {code}" if code else "")


def test_the_command_checks_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "machine.json"
    machine.write_bytes(machine_json(ONE_GH200.machine()))
    assert main(["doctor", "--machine", str(machine)]) == 0
    capsys.readouterr()
    assert main(["doctor", "llama-3.3-70b", "--gpus", "1", "--machine", str(machine)]) == 3
    assert "The plan does not fit this machine" in capsys.readouterr().out
    assert main(["doctor", "no-such-preset"]) == 2
    assert "there is no such preset" in capsys.readouterr().err
