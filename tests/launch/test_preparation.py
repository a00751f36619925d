"""From a spec and a machine object to the launch, without starting anything."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from so_tui.launch.command import Placeholder
from so_tui.launch.launch import launch_of, prepare, preview, read_launch, visible_machine
from so_tui.launch.show import shown_launch
from so_tui.machine import Machine
from so_tui.runs import create_run, new_attempt
from so_tui.spec import Refused, RunSpec, find_preset, with_values
from tests.support.plans import cpu_machine, launch_with, plan_of, quad_gh200, spec_of
from tests.support.problems import refused
from tests.support.supervising import prepared_run


@pytest.fixture(scope="module")
def tiny() -> RunSpec:
    return find_preset("tiny").spec


def with_gpus(spec: RunSpec, gpus: int | tuple[int, ...]) -> RunSpec:
    return msgspec.structs.replace(spec, gpus=gpus)


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_two_of_four_superchips_are_bound_to_their_nodes(tiny: RunSpec) -> None:
    launch = prepare(with_gpus(tiny, 2), quad_gh200())
    assert launch.argv[:3] == (sys.executable, "-m", "deepspeed.launcher.runner")
    assert option(launch.argv, "--include") == "localhost:0,1"
    assert "--bind_cores_to_rank" in launch.argv
    assert option(launch.argv, "--bind_core_list") == "0-143"
    first, second = launch.plan.binding
    assert (first.numa_node, first.cpus) == (0, tuple(range(72)))
    assert (second.numa_node, second.cpus) == (1, tuple(range(72, 144)))


def test_a_list_of_gpus_is_kept(tiny: RunSpec) -> None:
    launch = prepare(with_gpus(tiny, (3, 1)), quad_gh200())
    assert option(launch.argv, "--include") == "localhost:1,3"
    assert option(launch.argv, "--bind_core_list") == "72-143,216-287"


def test_dry_run_json_has_the_shape_of_the_contract(
    tiny: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its schema does not say; tests/commands/test_schemas.py holds the rest."""
    spec = msgspec.structs.replace(with_gpus(tiny, 2), nodes=2)
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    launch = prepare(spec, quad_gh200())
    document = json.loads(msgspec.json.encode(shown_launch(launch)))
    assert document["placeholders"].keys() == {placeholder.value for placeholder in Placeholder}
    rank = document["binding"][1]
    assert rank["cpus"] == rank["deepspeed"]["cpus"] == list(range(72, 144))
    assert rank["deepspeed_alone"]["cpus"] == list(range(144, 288)), (
        "of all cores it would take the second half, two sockets"
    )
    assert document["env"]["KMP_AFFINITY"] is None
    assert document["ds_config"]["gradient_clipping"] == tiny.train.gradient_clipping
    assert document["plan"]["gpus"] == 4


def test_a_machine_without_gpus_takes_a_number_of_ranks(tiny: RunSpec) -> None:
    launch = prepare(with_gpus(tiny, 2), cpu_machine())
    assert option(launch.argv, "--num_gpus") == "2"
    assert "--include" not in launch.argv
    assert launch.plan.mode != "gpu"


def test_without_numactl_the_launcher_does_not_bind() -> None:
    launch = launch_with(plan_of(spec_of()))
    resolved = launch.resolved(
        {
            Placeholder.RUN: "/runs/a",
            Placeholder.RUN_ID: "",
            Placeholder.ATTEMPT: "2",
            Placeholder.RENDEZVOUS: "file:///tmp/meeting/store",
        }
    )
    command = resolved.argv
    assert "--bind_cores_to_rank" not in command
    assert command[-6:] == ("--module", "so_tui_trainer", "--run", "/runs/a", "--attempt", "2")
    values = {variable.name: variable.value for variable in resolved.environment}
    assert values["SO_TUI_RENDEZVOUS"] == "file:///tmp/meeting/store"
    assert not set(Placeholder) & {*command, *values.values()}


def test_a_hostfile_of_the_site_is_never_read(tiny: RunSpec) -> None:
    assert option(prepare(tiny, cpu_machine()).argv, "--hostfile") == "/dev/null"


@pytest.mark.parametrize(
    ("preset", "changes", "machine", "code", "forceable"),
    [
        ("tiny", {"gpus": "8"}, quad_gh200(), "too-few-gpus", False),
        ("tiny", {"offload.mode": "gpu"}, cpu_machine(), "mode-needs-gpu", False),
        (
            "tiny",
            {"offload.mode": "superoffload", "offload.engine": "deepspeed"},
            cpu_machine(),
            "engine-needs-gpu",
            False,
        ),
        ("qwen3-14b", {"gpus": "1"}, quad_gh200(), "shortage", True),
    ],
)
def test_what_cannot_run_here_is_refused(
    preset: str, changes: dict[str, str], machine: Machine, code: str, forceable: bool
) -> None:
    spec = with_values(find_preset(preset).spec, changes)
    with pytest.raises(Refused) as caught:
        prepare(spec, machine, force=not forceable)
    assert (caught.value.codes[0], caught.value.forceable) == (code, forceable)
    if forceable:
        assert not prepare(spec, machine, force=True).plan.fits


def test_only_visible_gpus_are_used() -> None:
    machine = quad_gh200()

    def visible(value: str) -> list[int]:
        return [gpu.index for gpu in visible_machine(machine, {"CUDA_VISIBLE_DEVICES": value}).gpus]

    assert visible("2,3") == [2, 3]
    assert visible("GPU-00000001") == [1]
    assert visible("") == []
    assert visible("1,7,0") == [1], "as in CUDA, the list ends at the first unknown entry"
    assert visible_machine(machine, {}) is machine
    with refused("mig-instance"):
        visible("MIG-1234")


def test_a_plan_for_a_hidden_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = msgspec.structs.replace(quad_gh200(), hostname=socket.gethostname())
    plan = plan_of(spec_of(), gpus=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch_of(plan, machine).machine.gpus == machine.gpus[:2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with refused("gpu-not-visible", forceable=False):
        launch_of(plan, machine)


def test_a_preview_shows_what_cannot_start(tiny: RunSpec) -> None:
    plan, launch = preview(with_gpus(tiny, 2), quad_gh200())
    assert launch is not None
    assert (launch.plan, launch.forced) == (plan, False)
    _, too_big = preview(with_gpus(find_preset("qwen3-14b").spec, 1), quad_gh200())
    assert too_big is not None
    assert too_big.forced, "it starts only if the user insists"
    impossible, nothing = preview(with_gpus(tiny, 8), quad_gh200())
    assert (impossible.possible, nothing) == (False, None)


def test_a_launch_is_read_back_as_it_was_written(
    tiny: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    launch = prepare(with_gpus(tiny, 2), quad_gh200(), force=True)
    launch = msgspec.structs.replace(launch, changes={"gpus": "2"})
    assert read_launch(prepared_run(launch, tmp_path), 1) == launch


def test_launch_files_of_the_first_version_are_read(tiny: RunSpec, tmp_path: Path) -> None:
    launch = prepare(tiny, quad_gh200(), force=True)
    run = create_run(launch.spec, tmp_path)
    attempt = new_attempt(run)
    parts = msgspec.to_builtins(launch)
    files = {"plan": "plan", "machine": "machine.quad", "ds_config": "ds_config"}
    for part, name in files.items():
        (run.attempt_dir(attempt) / f"{name}.json").write_bytes(
            msgspec.json.encode(parts.pop(part))
        )
    run.launch_path(attempt).write_bytes(msgspec.json.encode(parts | {"v": 1}))
    assert msgspec.structs.replace(read_launch(run, attempt), v=launch.v) == launch
