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

from so_tui.machine import load_machine
from tests.support.machines import machine_json, superchips
from tests.support.problems import refusal
from tests.support.yardstick import seconds_of_plain_python, slowness

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
        (b"\0", "not-json"),
        (b"", "not-json"),
        (b"# not json", "not-json"),
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
        ({"numa_nodes": VALID["numa_nodes"] * 5000}, "out-of-range"),
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
