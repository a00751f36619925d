"""Machine files that anybody may have written: what is wrong with them ends in one problem with a
code, in bounded time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from so_tui.machine import load_machine, machine_json
from so_tui.spec import InputError
from tests.support.machines import superchips
from tests.support.yardstick import seconds_of_plain_python, slowness


def problem_code(path: Path) -> str:
    begun = time.process_time()
    with pytest.raises(InputError) as caught:
        load_machine(path)
    assert time.process_time() - begun < 2 * slowness(seconds_of_plain_python())
    (problem,) = caught.value.problems
    return problem.code


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[" * 200_000, "too-deep"),
        (b'{"zz":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too-deep"),
        (b'{"schema":' + b"9" * 5000 + b"}", "not-a-machine"),
        (b'{"hostname":"\xff"}', "not-text"),
        (b"\0", "not-json"),
        (b"", "not-json"),
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


def test_memory_of_a_gpu_on_a_node_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    valid: dict[str, Any] = msgspec.json.decode(machine_json(superchips(1)))
    gpus = [{**gpu, "memory_node": 77} for gpu in valid["gpus"]]
    (tmp_path / "machine.json").write_bytes(msgspec.json.encode({**valid, "gpus": gpus}))
    assert problem_code(tmp_path / "machine.json") == "not-a-machine"


def test_a_machine_of_impossible_size_is_a_problem(tmp_path: Path) -> None:
    valid: dict[str, Any] = msgspec.json.decode(machine_json(superchips(1)))
    path = tmp_path / "machine.json"
    changes: list[dict[str, Any]] = [
        {"gpus": valid["gpus"] * 1000},
        {"numa_nodes": valid["numa_nodes"] * 5000},
        {"host_memory_bytes": 2**60},
        {"online_cpus": [10**9]},
        {"allowed_cpus": [-1]},
        {"online_cpus": list(range(60_000)) * 4},
    ]
    path.write_bytes(msgspec.json.encode(valid))
    assert load_machine(path) == superchips(1)
    for change in changes:
        path.write_bytes(msgspec.json.encode({**valid, **change}))
        assert problem_code(path) == "out-of-range"
