"""Planning on a login node for a compute node: ``inspect --json`` there, ``--machine`` here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.machine import inspect_machine, load_machine
from so_tui.machine.known import machine_of
from so_tui.plan.planner import make_plan
from so_tui.spec import find_preset
from tests.support import sysroots
from tests.support.commands import Call

HOSTS = sysroots.HOSTS


def described(host: sysroots.Host, folder: Path, call: Call, *arguments: str) -> Path:
    root = sysroots.build_sysroot(host.listing(), folder / "root")
    file = folder / "machine.json"
    file.write_text(call("inspect --json --sysroot", root, *arguments).out)
    return file


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_a_machine_file_plans_as_the_machine_does(
    tmp_path: Path, call: Call, host: sysroots.Host
) -> None:
    file = described(host, tmp_path, call)
    machine = inspect_machine(tmp_path / "root")
    assert load_machine(file) == machine
    code, out, _ = call(f"run tiny --gpus {len(host.gpus)} --dry-run --json --machine", file)
    assert code == 0
    expected = make_plan(replace(find_preset("tiny").spec, gpus=len(host.gpus)), machine)
    assert [(rank["numa_node"], rank["cpus"]) for rank in json.loads(out)["binding"]] == [
        (rank.numa_node, list(rank.cpus)) for rank in expected.binding
    ]
    assert call("doctor --machine", file).code == 0


@pytest.mark.parametrize("name", ["", "node042"])
def test_a_machine_file_is_called_as_its_host(name: str, tmp_path: Path, call: Call) -> None:
    file = described(sysroots.QUAD_GH200, tmp_path, call, *(["--hostname", name] if name else []))
    assert load_machine(file).hostname == (name or "unknown")
    code, _, err = call("run tiny --gpus 5 --dry-run --machine", file)
    assert (code, f"{name or 'this machine file'} has 4 GPUs" in err) == (3, True)
    assert "unknown" not in call("plan --machine", file).out


def test_other_machine_is_inspected(tmp_path: Path, call: Call) -> None:
    file = described(sysroots.QUAD_GH200, tmp_path, call)
    again = tmp_path / "again.json"
    for given, machine in (("gh200-480", machine_of("gh200-480")), (file, load_machine(file))):
        again.write_text(call("inspect --json --machine", given).out)
        assert load_machine(again) == machine
    assert "NVIDIA GH200 480GB" in call("--machine gh200-480 inspect").out
