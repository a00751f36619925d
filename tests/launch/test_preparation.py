"""From a spec and a machine object to the launch, without starting anything."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.launch.command import Placeholder
from so_tui.launch.launch import launch_of, prepare, preview, read_launch, visible_machine
from so_tui.launch.show import shown_launch
from so_tui.machine import Machine
from so_tui.spec import Refused, RunSpec, find_preset, with_values
from tests.support.plans import cpu_machine, launch_with, plan_of, quad_gh200, spec_of
from tests.support.problems import refused
from tests.support.supervising import prepared_run

QUAD, CPU = quad_gh200(), cpu_machine()
TINY, BIG = find_preset("tiny").spec, find_preset("qwen3-14b").spec


def with_gpus(gpus: int | tuple[int, ...], spec: RunSpec = TINY) -> RunSpec:
    return replace(spec, gpus=gpus)


@pytest.mark.parametrize(
    ("gpus", "machine", "options"),
    [
        (2, QUAD, {"--include": "localhost:0,1", "--bind_core_list": "0-143"}),
        ((3, 1), QUAD, {"--include": "localhost:1,3", "--bind_core_list": "72-143,216-287"}),
        (2, CPU, {"--num_gpus": "2", "--include": None}),
    ],
)
def test_launcher_gets_devices_and_cores(
    gpus: int | tuple[int, ...], machine: Machine, options: dict[str, str | None]
) -> None:
    """And never reads a hostfile of the site."""
    argv = prepare(with_gpus(gpus), machine).argv
    assert argv[:3] == (sys.executable, "-m", "deepspeed.launcher.runner")
    assert "--bind_cores_to_rank" in argv
    for name, value in {**options, "--hostfile": "/dev/null"}.items():
        assert (argv[argv.index(name) + 1] if name in argv else None) == value


def test_dry_run_json_has_the_shape_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its schema does not say; tests/commands/test_schemas.py holds the rest."""
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    launch = prepare(replace(with_gpus(2), nodes=2), QUAD)
    document = json.loads(msgspec.json.encode(shown_launch(launch)))
    assert document["placeholders"].keys() == {placeholder.value for placeholder in Placeholder}
    rank = document["binding"][1]
    assert rank["cpus"] == rank["deepspeed"]["cpus"] == list(range(72, 144))
    assert document["env"]["KMP_AFFINITY"] is None
    assert document["plan"]["gpus"] == 4


def test_without_numactl_the_launcher_does_not_bind() -> None:
    given = {
        Placeholder.RUN: "/runs/a",
        Placeholder.RUN_ID: "",
        Placeholder.ATTEMPT: "2",
        Placeholder.RENDEZVOUS: "file:///tmp/meeting/store",
    }
    resolved = launch_with(plan_of(spec_of())).resolved(given)
    command = resolved.argv
    assert "--bind_cores_to_rank" not in command
    assert command[-6:] == ("--module", "so_tui_trainer", "--run", "/runs/a", "--attempt", "2")
    values = {variable.name: variable.value for variable in resolved.environment}
    assert values["SO_TUI_RENDEZVOUS"] == "file:///tmp/meeting/store"
    assert not set(Placeholder) & {*command, *values.values()}


DEEPSPEED = {"offload.mode": "superoffload", "offload.engine": "deepspeed"}


@pytest.mark.parametrize(
    ("spec", "changes", "machine", "code", "forceable"),
    [
        (TINY, {"gpus": "8"}, QUAD, "too-few-gpus", False),
        (TINY, {"offload.mode": "gpu"}, CPU, "mode-needs-gpu", False),
        (TINY, DEEPSPEED, CPU, "engine-needs-gpu", False),
        (BIG, {"gpus": "1"}, QUAD, "shortage", True),
    ],
)
def test_what_cannot_run_here_is_refused(
    spec: RunSpec, changes: dict[str, str], machine: Machine, code: str, forceable: bool
) -> None:
    spec = with_values(spec, changes)
    with pytest.raises(Refused) as caught:
        prepare(spec, machine, force=not forceable)
    assert (caught.value.codes[0], caught.value.forceable) == (code, forceable)
    if forceable:
        assert not prepare(spec, machine, force=True).plan.fits


def test_only_visible_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (
        ("2,3", [2, 3]),
        ("GPU-00000001", [1]),
        ("", []),
        ("1,7,0", [1]),  # as in CUDA, the list ends at the first unknown entry
    ):
        machine = visible_machine(QUAD, {"CUDA_VISIBLE_DEVICES": value})
        assert [gpu.index for gpu in machine.gpus] == wanted
    assert visible_machine(QUAD, {}) is QUAD
    with refused("mig-instance"):
        visible_machine(QUAD, {"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    here, plan = replace(QUAD, hostname=socket.gethostname()), plan_of(spec_of(), gpus=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch_of(plan, here).machine.gpus == here.gpus[:2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with refused("gpu-not-visible", forceable=False):
        launch_of(plan, here)


def test_a_preview_shows_what_cannot_start() -> None:
    plan, launch = preview(with_gpus(2), QUAD)
    assert launch is not None
    assert (launch.plan, launch.forced) == (plan, False)
    _, too_big = preview(with_gpus(1, BIG), QUAD)
    assert too_big is not None
    assert too_big.forced, "it starts only if the user insists"
    impossible, nothing = preview(with_gpus(8), QUAD)
    assert (impossible.possible, nothing) == (False, None)


def test_launch_is_read_back_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile file is a damaged one, and a pipe is not waited for."""
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    launch = replace(prepare(with_gpus(2), QUAD, force=True), changes={"gpus": "2"})
    run = prepared_run(launch, tmp_path)
    assert read_launch(run, 1) == launch
    for content in (b"[" * 100_000, b'{"argv":["\xff"],"v":1}', b'{"argv":' + b"9" * 5000 + b"}"):
        run.launch_path(1).write_bytes(content)
        with pytest.raises(msgspec.DecodeError):
            read_launch(run, 1)
    run.launch_path(1).unlink()
    os.mkfifo(run.launch_path(1))
    with pytest.raises(OSError, match="wrong-kind"):
        read_launch(run, 1)
