"""Machines that are known by name: what they are, and that plans for them say that nothing was
measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.machine import load_machine
from so_tui.machine.known import MACHINES, machine_of, named_machine
from so_tui.plan.notes import Note
from so_tui.plan.planner import recommend
from tests.support.machines import machine_json
from tests.support.planning import spec_of
from tests.support.problems import refusal


@pytest.mark.parametrize("name", MACHINES)
def test_named_machine_is_a_file_that_can_be_planned_for(name: str, tmp_path: Path) -> None:
    machine = named_machine(name)
    file = tmp_path / "machine.json"
    file.write_bytes(machine_json(machine))
    assert load_machine(file) == machine
    plan = recommend(spec_of("qwen3-4b-random"), machine)
    assert plan.fits
    assert plan.step_s is not None  # its speed is published
    assert any(isinstance(fact, Note) and "not measured" in fact.text for fact in plan.warnings)


@pytest.mark.parametrize("name", MACHINES)
def test_hardware_is_as_described(name: str) -> None:
    machine, described = named_machine(name), MACHINES[name]
    cores = described.nodes * described.cores
    assert len(machine.gpus) == described.nodes * described.gpus_per_node
    assert len(machine.cpu_nodes) == described.nodes
    assert len(machine.online_cpus) == cores * described.threads
    assert len(machine.smt_siblings) == (cores if described.threads > 1 else 0)
    assert {gpu.numa_node for gpu in machine.gpus} == {node.id for node in machine.cpu_nodes}
    for gpu in machine.gpus:
        if gpu.memory_node is not None:
            kind = "cpu" if gpu.vendor == "amd" else "gpu-memory"
            assert machine.node(gpu.memory_node).kind == kind
        assert set(gpu.cpus) == set(machine.node(gpu.numa_node or 0).cpus)


def test_name_comes_before_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gh200-480").write_bytes(machine_json(named_machine("gh200-2")))
    (tmp_path / "mine").write_bytes(machine_json(named_machine("gh200-2")))
    assert machine_of("gh200-480").hostname == "gh200-480"
    assert machine_of("./gh200-480").hostname == machine_of("mine").hostname == "gh200-2"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("gh200-48", "unknown-machine"),
        ("./none", "unreadable"),
        ("none.json", "unreadable"),
        ("~nobody-here/m.json", "invalid-path"),
        ("n" * 300, "invalid-path"),
    ],
)
def test_what_is_neither_is_an_error_with_the_names(
    given: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = refusal(lambda: machine_of(given))
    assert (problem.code, problem.field) == (code, "--machine")
    assert ("gh200-480" in problem.remedy) == (code == "unknown-machine")


def test_command_lists_and_writes_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["machines"]) == list(MACHINES)
    assert main(["machines", "gb200-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(machine_json(named_machine("gb200-4")))
    assert main(["plan", "qwen3-14b", "--machine", "gh200-480", "--json"]) == 0
    assert main(["machines", "gb200"]) == 2
