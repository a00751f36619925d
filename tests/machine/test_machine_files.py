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


def problem_code(path: Path) -> str:
    begun = time.process_time()
    problem = refusal(lambda: load_machine(path))
    assert time.process_time() - begun < 2 * slowness(seconds_of_plain_python())
    assert (problem.field, problem.value) == ("--machine", str(path))
    return problem.code


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[" * 200_000, "too-deep"),
        (b'{"zz":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too-deep"),
        (b'{"schema":' + b"9" * 5000 + b"}", "not-a-machine"),
        (b'{"hostname":"\xff"}', "not-text"),
        (b"", "not-json"),
        (b"\xff\xfe", "not-json"),
        (b"{}", "not-a-machine"),
        (b" " * (17 << 20), "too-large"),
    ],
)
def test_a_hostile_document_is_one_problem(content: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_bytes(content)
    assert problem_code(tmp_path / "machine.json") == code


def test_a_pipe_and_a_device_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert problem_code(tmp_path / "pipe") == "not-a-file"
    assert problem_code(Path("/dev/zero")) == "not-a-file"
    assert problem_code(tmp_path / "absent") == "unreadable"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"gpus": VALID["gpus"] * 1000}, "out-of-range"),
        ({"host_memory_bytes": 2**60}, "out-of-range"),
        ({"online_cpus": [10**9]}, "out-of-range"),
        ({"allowed_cpus": [-1]}, "out-of-range"),
        ({"online_cpus": list(range(60_000)) * 4}, "out-of-range"),
        ({"gpus": [{**gpu, "memory_node": 77} for gpu in VALID["gpus"]]}, "not-a-machine"),
        ({"numa_nodes": [VALID["numa_nodes"][0] | {"memory_total_bytes": -1}]}, "not-a-machine"),
        ({"schema": 2}, "unsupported-schema"),
        ({"numa_nodes": [], "gpus": []}, "no-cpu-node"),
    ],
)
def test_bad_machine_is_a_problem(change: dict[str, Any], code: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(VALID))
    assert load_machine(path) == superchips(1)
    path.write_bytes(msgspec.json.encode(VALID | change))
    assert problem_code(path) == code
