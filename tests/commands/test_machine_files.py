"""Planning on a login node for a compute node: ``inspect --json`` there, ``--machine`` here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.machine import inspect_machine, load_machine
from so_tui.machine.known import machine_of
from so_tui.plan.planner import make_plan
from so_tui.spec import find_preset
from tests.support import sysroots

HOSTS = sysroots.HOSTS


def described(
    host: sysroots.Host, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> Path:
    root = sysroots.build_sysroot(host.listing(), folder / "root")
    assert main(["inspect", "--sysroot", str(root), "--json", *arguments]) == 0
    file = folder / "machine.json"
    file.write_text(capsys.readouterr().out)
    return file


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_a_machine_file_plans_as_the_machine_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: sysroots.Host
) -> None:
    file = described(host, tmp_path, capsys)
    machine = inspect_machine(tmp_path / "root")
    assert load_machine(file) == machine
    argv = ["run", "tiny", "--gpus", str(len(host.gpus)), "--dry-run", "--json"]
    assert main([*argv, "--machine", str(file)]) == 0
    binding = json.loads(capsys.readouterr().out)["binding"]
    expected = make_plan(replace(find_preset("tiny").spec, gpus=len(host.gpus)), machine)
    assert [(rank["numa_node"], rank["cpus"]) for rank in binding] == [
        (rank.numa_node, list(rank.cpus)) for rank in expected.binding
    ]
    assert main(["doctor", "--machine", str(file)]) == 0


def test_nameless_file_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = described(sysroots.QUAD_GH200, tmp_path, capsys)
    assert main(["run", "tiny", "--gpus", "5", "--machine", str(file), "--dry-run"]) == 3
    assert "this machine file has 4 GPUs" in capsys.readouterr().err
    assert main(["plan", "--machine", str(file)]) == 0
    assert "unknown" not in capsys.readouterr().out


def test_it_can_be_given_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = described(sysroots.QUAD_GH200, tmp_path, capsys, "--hostname", "node042")
    assert load_machine(file).hostname == "node042"
    assert main(["run", "tiny", "--gpus", "5", "--machine", str(file), "--dry-run"]) == 3
    assert "node042 has 4 GPUs" in capsys.readouterr().err
    assert main(["inspect", "--hostname", "here"]) == 2
    assert "--sysroot" in capsys.readouterr().err


def test_other_machine_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = described(sysroots.QUAD_GH200, tmp_path, capsys)
    for given, machine in (("gh200-480", machine_of("gh200-480")), (str(file), load_machine(file))):
        assert main(["inspect", "--machine", given, "--json"]) == 0
        again = tmp_path / "again.json"
        again.write_text(capsys.readouterr().out)
        assert load_machine(again) == machine
    assert main(["--machine", "gh200-480", "inspect"]) == 0
    assert "NVIDIA GH200 480GB" in capsys.readouterr().out
    assert main(["inspect", "--machine", "gh200-480", "--hostname", "here"]) == 2
    assert "--hostname" in capsys.readouterr().err
