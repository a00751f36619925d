"""Helpers end with their command, keep within limits, and say what is wrong in one message."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from so_tui.launch.helper import ToolError, call_tool
from so_tui.settings_file import change_settings
from tests.support.problems import rejected
from tests.support.python_path import python_path
from tests.support.rank_processes import gone

LIMIT_S = 60.0
EXTENDED = "import pkgutil; __path__ = pkgutil.extend_path(__path__, __name__)\n"
"""Keeps the trainer's own modules importable next to those of a test."""
SERVED = """
import sys
from so_tui_trainer.step_limits import limited
from so_tui_trainer.tools.channel import serve
class Panic(BaseException): pass
def deeper(value): return deeper([value])
def work(request):
    with limited("row 7 of rows.jsonl"):
        {}
    yield {{"done": True}}
sys.exit(serve(work))
"""
FAULTS = {
    "memory": "raise MemoryError",
    "deep": "deeper(0)",
    "overflow": "'a' * 10 ** 100",
    "panic": "raise Panic('index out of bounds')",
    "grows": "kept = [bytearray(1 << 28) for _ in range(64)]",
    "loops": "exec('while True: pass')",
    "regex": "import re; re.match('(a*)*b', 'a' * 100)",
    "talks": "yield {'text': 'x' * (65 << 20)}",
    "mapped": "import mmap, tempfile\n"
    "        file = tempfile.TemporaryFile()\n"
    "        file.truncate(1 << 20)\n"
    "        held = mmap.mmap(file.fileno(), 1 << 20)\n"
    "        file.truncate(0)\n"
    "        held[4096]",
    "dies": "import os; os.kill(os.getpid(), 11)",
}
BUSY = """
import re, subprocess, sys, os
busy = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN)\\nwhile True: pass"]
child = subprocess.Popen(busy)
print('{"pids": [%d, %d]}' % (os.getpid(), child.pid), flush=True)
if "regex" in __file__: re.match("(a*)*b", "a" * 100)
while True: pass
"""
COMMAND = """
import signal, sys, threading, time
from so_tui import cli
from so_tui.launch.helper import ToolProcess

def begin():
    process = ToolProcess(sys.argv[1])
    held.append(process)
    print(next(process.answers())["pids"], flush=True)

def wait(_):
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()  # the one that started the helper has ended
    while True:  # a signal just before a long sleep would wait for its end
        time.sleep(0.1)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a test that nohup started ignores
held = []
cli._call = wait
cli.main(["runs"])
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "so_tui_trainer" / "tools"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text(EXTENDED)
    for name, fault in FAULTS.items():
        (folder / f"{name}.py").write_text(SERVED.format(fault))
    for name in ("busy", "busy_regex"):
        (folder / f"{name}.py").write_text(BUSY)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("tool", ["busy", "busy_regex"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_helper_ends_with_its_command(tool: str, number: signal.Signals) -> None:
    """Whichever thread started it, whatever it does, and with what it started."""
    command = [sys.executable, "-c", COMMAND, tool]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().strip("[]\n").split(",")]
        process.send_signal(number)
        try:
            assert process.wait(LIMIT_S) == -number
        finally:
            process.kill()
    assert gone(pids)


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("memory", "helper-out-of-memory"),
        ("deep", "helper-too-deep"),
        ("overflow", "helper-failed"),
        ("panic", "helper-failed"),
    ],
)
def test_an_error_of_a_helper_is_one_message(tool: str, code: str) -> None:
    with pytest.raises(ToolError) as caught:
        call_tool(tool, {})
    problem = caught.value.problem
    assert (problem.code, problem.field) == (code, "row 7 of rows.jsonl")
    assert problem.remedy
    assert "File" not in str(caught.value)


@pytest.mark.usefixtures("tools")
def test_a_helper_that_a_signal_ended_says_at_what() -> None:
    with pytest.raises(ToolError, match=r"SIGSEGV.*row 7 of rows\.jsonl"):
        call_tool("dies", {})


@pytest.mark.usefixtures("tools")
def test_a_mapped_file_that_is_cut_short_is_one_problem() -> None:
    with rejected("helper-file-cut", field="row 7 of rows.jsonl"):
        call_tool("mapped", {})


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("tool", ["loops", "regex"])
def test_a_row_has_a_limit_of_cpu_time(tool: str) -> None:
    change_settings({"helpers.row_s": 1})
    with rejected("helper-cpu-limit", field="helpers.row_s") as caught:
        call_tool(tool, {})
    assert "row 7 of rows.jsonl" in str(caught.value)


@pytest.mark.usefixtures("tools")
def test_a_helper_has_a_limit_of_memory() -> None:
    change_settings({"helpers.memory_gb": 1})
    with rejected("helper-memory-limit", field="helpers.memory_gb") as caught:
        call_tool("grows", {})
    assert "row 7 of rows.jsonl" in str(caught.value)


@pytest.mark.usefixtures("tools")
def test_a_helper_has_a_limit_of_output() -> None:
    with rejected("helper-output-limit"):
        call_tool("talks", {})


@pytest.mark.usefixtures("tools")
def test_descriptors_of_ended_helpers_are_closed() -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with pytest.raises(ToolError):
            call_tool("memory", {})
    assert len([*Path("/proc/self/fd").iterdir()]) == before
