"""Launch files that anybody may have written, and answers of helpers: what is wrong with them ends
in the documented error.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from so_tui.launch.helper import ToolError, _decoded
from so_tui.launch.launch import read_launch
from so_tui.runs.directory import RunDirectory


@pytest.mark.parametrize("name", ["launch.json", "plan.json"])
@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"argv":["\xff"],"spec":"\xff"}', b'{"argv":' + b"9" * 5000 + b"}"],
)
def test_a_hostile_launch_file_is_a_damaged_one(name: str, content: bytes, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_dir(1).mkdir(parents=True)
    run.launch_path(1).write_bytes(b'{"v":1}')
    (run.attempt_dir(1) / name).write_bytes(content)
    with pytest.raises(msgspec.DecodeError):
        read_launch(run, 1)


def test_a_launch_file_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_dir(1).mkdir(parents=True)
    os.mkfifo(run.launch_path(1))
    with pytest.raises(OSError, match="wrong-kind"):
        read_launch(run, 1)


@pytest.mark.parametrize("answer", ["[" * 100_000, '{"rows":' + "9" * 5000 + "}", "", "7"])
def test_a_hostile_answer_of_a_helper_is_an_error_of_the_helper(answer: str) -> None:
    with pytest.raises(ToolError):
        _decoded("data", answer)
