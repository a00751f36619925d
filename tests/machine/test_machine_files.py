"""Machines that are known by name, for which plans say that nothing was measured, and machine files
that anybody may have written: what is wrong with them ends in one problem with a code, in bounded
time.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.cli import main
from so_tui.machine import load_machine
from so_tui.machine.known import MACHINES, machine_of, named_machine
from so_tui.plan.notes import Note
from so_tui.plan.planner import recommend
from so_tui.spec import Problem
from tests.support.machines import machine_json, superchips
from tests.support.planning import spec_of
from tests.support.problems import refusal
from tests.support.yardstick import seconds_of_plain_python, slowness


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


VALID: dict[str, Any] = msgspec.json.decode(machine_json(superchips(1)))


def problem_of(path: Path) -> Problem:
    begun = time.process_time()
    problem = refusal(lambda: load_machine(path))
    assert time.process_time() - begun < 2 * slowness(seconds_of_plain_python())
    assert (problem.field, problem.value) == ("--machine", str(path))
    return problem


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"zz":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"schema":' + b"9" * 5000 + b"}",
        b'{"hostname":"\xff"}',
        b"",
        b"\xff\xfe",
        b"{}",
    ],
)
def test_a_hostile_document_is_one_problem(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_bytes(content)
    assert problem_of(tmp_path / "machine.json").code == "not-a-machine"


def test_a_pipe_and_a_device_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (17 << 20))
    assert problem_of(tmp_path / "pipe").code == "not-a-file"
    assert problem_of(Path("/dev/zero")).code == "not-a-file"
    assert problem_of(tmp_path / "large").code == "too-large"
    assert problem_of(tmp_path / "absent").code == "unreadable"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gpus": VALID["gpus"] * 1000}, "$.gpus"),
        ({"host_memory_bytes": 2**60}, "$.host_memory_bytes"),
        ({"online_cpus": [10**9]}, "$.online_cpus"),
        ({"allowed_cpus": [-1]}, "$.allowed_cpus"),
        ({"online_cpus": list(range(60_000)) * 4}, "$.online_cpus"),
        ({"gpus": [{**gpu, "memory_node": 77} for gpu in VALID["gpus"]]}, "node 77"),
        ({"numa_nodes": [VALID["numa_nodes"][0] | {"memory_total_bytes": -1}]}, "$.numa_nodes"),
        ({"schema": 2}, "$.schema"),
    ],
)
def test_bad_machine_is_a_problem(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(VALID))
    assert load_machine(path) == superchips(1)
    path.write_bytes(msgspec.json.encode(VALID | change))
    problem = problem_of(path)
    assert problem.code == "not-a-machine"
    assert named in str(problem.message)
    path.write_bytes(msgspec.json.encode(VALID | {"numa_nodes": [], "gpus": []}))
    assert problem_of(path).code == "no-cpu-node"
