"""The screen as a process: what the first paint costs above that of an empty application and does
not import, and a terminal that vanishes.
"""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from so_tui.runs import create_run
from so_tui.ui.app import PACKAGES
from tests.support.launching import tiny
from tests.support.python_path import ROOT
from tests.support.waiting import LIMIT_S
from tests.support.yardstick import seconds_of_plain_python, slowness

SCRIPT = Path(__file__).with_name("first_paint.py")
BUDGET_S = 0.10
"""Process time above an empty application with as many tabs: a busy machine counts little."""


def in_a_pty(*command: str, **environment: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command in a pty of 120x36, and return it with the other end of that."""
    # A screen that compiled its modules at every start would be measured with a compiler in it.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**inherited, "TERM": "xterm-256color", **environment},
        start_new_session=True,
    )
    os.close(terminal)
    return process, controller


def first_paint(*arguments: str) -> tuple[float, list[str]]:
    """Return the process time at the first paint, and what of so-tui was imported by then."""
    process, controller = in_a_pty(str(SCRIPT), *arguments)
    written = b""
    with process, suppress(OSError):  # how the end of a pty shows itself on Linux
        while block := os.read(controller, 65536):
            written += block
    os.close(controller)
    found = re.search(rb"first paint ([0-9.]+)", written)
    assert found, written.decode(errors="replace")[-2000:]
    imported = re.search(r"imported (.*)\r", written.decode(errors="replace"))
    return float(found[1]), imported[1].split() if imported else []


@pytest.mark.parametrize("command", [(), ("chat", "./model")])
def test_a_screen_that_lost_its_terminal_ends(command: tuple[str, ...], tmp_path: Path) -> None:
    """Without SIGHUP it would read nothing for ever."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from so_tui.cli import"
    code = f"{ignoring} main; import os; os.chdir(os.environ['HOME']); raise SystemExit(main())"
    screen, controller = in_a_pty("-c", code, *command, HOME=str(tmp_path))
    painted, deadline = 0, time.monotonic() + LIMIT_S
    while painted < 2_000 and time.monotonic() < deadline:
        if select.select([controller], [], [], 0.5)[0]:
            painted += len(os.read(controller, 65536))
    os.close(controller)
    try:
        assert screen.wait(timeout=LIMIT_S) >= 0
    finally:
        screen.kill()


def test_first_paint_costs_little_more_than_an_empty_application(runs_dir: Path) -> None:
    # Noise only ever adds: the least of several is what the program costs. More rounds only where
    # the first are over.
    empty = ours = math.inf
    for attempt in range(15):
        empty = min(empty, first_paint("empty")[0])
        ours = min(ours, first_paint("real", str(runs_dir))[0])
        if attempt and ours - empty <= 0.8 * BUDGET_S:
            break
    assert ours - empty <= BUDGET_S * slowness(min(seconds_of_plain_python() for _ in range(8)))


def test_first_paint_waits_for_no_heavy_module(runs_dir: Path) -> None:
    _, imported = first_paint("real", str(runs_dir))
    assert "so_tui.ui.shared_app" in imported
    assert not [name for name in imported if name.startswith(HEAVY)]


def test_packages_that_import_their_own_modules_are_known() -> None:
    """Two threads that import such a package and one of its modules may both fail, now and then."""
    eager = set()
    for init in (ROOT / "so_tui").rglob("__init__.py"):
        name = ".".join(init.parent.relative_to(ROOT).parts)
        own = re.compile(rf"^from {re.escape(name)}[. ]", re.MULTILINE)
        if own.search(init.read_text()):
            eager.add(name)
    assert eager == set(PACKAGES)


CHECKED = """
import sys
from pathlib import Path
import so_tui.ui.app, so_tui.ui.presets.screen
print([name for name in sys.modules if name.startswith(HEAVY)])
import asyncio
from textual.worker import Worker
from so_tui.runs.directory import RunDirectory
from so_tui.ui.app import PACKAGES, SoTuiApp

missing = []
start = Worker._start

def checked(worker, app, done_callback=None):
    missing.append((worker.name, sorted(set(PACKAGES) - set(sys.modules))))
    start(worker, app, done_callback)

Worker._start = checked

async def main():
    app = SoTuiApp(runs_dir=Path(sys.argv[2]), open_run=RunDirectory(Path(sys.argv[1])))
    async with app.run_test() as pilot, asyncio.timeout(60):
        while not app.runs:
            await asyncio.sleep(0.02)
        await pilot.pause()
        print([name for name in OTHERS if name in sys.modules], app.machine)
        await pilot.press("1")
        while app.machine is None:
            await asyncio.sleep(0.02)

asyncio.run(main())
print(bool(missing), [name for name, packages in missing if packages])
"""
HEAVY = (*(f"so_tui.{name}" for name in ("spec", "machine", "plan", "runs", "launch")), "psutil")
OTHERS = ("pynvml", "importlib.metadata", "so_tui.plan.planner", "so_tui.plan.fit", "superoffload")


def test_a_screen_imports_only_its_needs(tmp_path: Path) -> None:
    """The first paint imports no planner and no inspection; a run, nothing of other screens."""
    run = create_run(tiny(), tmp_path)
    code = f"HEAVY, OTHERS = {HEAVY}, {OTHERS}\n{CHECKED}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[]", "[] None", "True []"]
