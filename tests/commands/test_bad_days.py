"""Commands in a process or on a machine with which something is wrong; the input is right."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from so_tui.cli import _problem_of
from so_tui.launch.helper import ToolProcess
from so_tui.trust.streams import console
from so_tui_trainer.tools import channel
from tests.support.problems import rejected

_SO_TUI = shlex.join([sys.executable, "-P", "-m", "so_tui"])


def _shell(line: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell in which ``so-tui`` is this one."""
    line = line.replace("so-tui", _SO_TUI)
    environment = {**os.environ, **changes}
    return subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("so-tui <&-", 2, "needs a terminal"),
        ("so-tui chat latest <&- >&-", 2, "needs a terminal"),
        ("so-tui plan tiny <&- >&- 2>&-", 0, ""),
        ("so-tui plan nosuch 2>/dev/full", 2, ""),
        ("umask 0777; export XDG_CONFIG_HOME=$PWD; so-tui settings screen.units=decimal", 0, ""),
        ("mkdir gone; cd gone; rmdir ../gone; so-tui runs --runs-dir x", 2, "working folder"),
        ("mkdir gone; cd gone; rmdir ../gone; so-tui presets add .", 2, "working folder"),
    ],
)
def test_a_command_ends_with_a_plain_message(
    line: str, code: int, said: str, tmp_path: Path
) -> None:
    done = _shell(f"cd {tmp_path}; {line}")
    assert (done.returncode, said in done.stderr) == (code, True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "XDG_CONFIG_HOME", "SO_TUI_RUNS_DIR"])
def test_a_folder_that_links_to_itself_is_named(variable: str, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    done = _shell("so-tui settings screen.units=decimal; so-tui doctor", **{variable: str(loop)})
    assert "Traceback" not in done.stderr
    assert ("symbolic links" in done.stderr) == (variable == "XDG_CONFIG_HOME")


@pytest.mark.parametrize(
    ("number", "code", "field"),
    [
        (errno.EMFILE, "system-limit", "ulimit -n"),
        (errno.EAGAIN, "system-limit", "ulimit -u"),
        (errno.ENOMEM, "system-limit", "ulimit -v"),
        (errno.ENOENT, "no-working-folder", "working folder"),
    ],
)
def test_an_error_without_a_name_is_explained(number: int, code: str, field: str) -> None:
    problem = _problem_of(OSError(number, os.strerror(number)))
    assert problem is not None
    assert (problem.code, problem.field) == (code, field)


def test_an_allocation_that_fails_is_no_fault_of_the_input() -> None:
    """Of torch while a model is loaded, and of the loader of libraries under ``ulimit -v``."""
    for words in ("DefaultCPUAllocator: can't allocate", "libtorch.so: failed to map segment from"):
        assert channel._problem(RuntimeError(words)).code == "helper-out-of-memory"


@pytest.fixture
def helper() -> Iterator[ToolProcess]:
    with closing(ToolProcess("data")) as process:
        yield process


def test_text_that_is_not_utf8_never_reaches_a_helper(helper: ToolProcess) -> None:
    with rejected("not-utf8", field="prompts"):
        helper.send({"number": 1, "prompts": [{"text": os.fsdecode(b"gr\xfcn")}]})


def test_a_table_is_never_wider_than_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "99999999")
    assert console().width == 1000
