"""What the dashboard of a live run costs, beside what a bare Textual application does that draws as much.

``python -m tests.support.dashboard_cost [SECONDS]``, in the root of the repository, measures both in a pty of 160x45, and an empty
application, and prints a table; ``... bytes [SECONDS]`` prints how much of both a terminal is sent with each tick, in several sizes, which
is what matters over ssh. The run has six charts, four nodes with 288 cores and four GPUs, and moves with each tick: a step, a sample
of every core, a line in the log. The bare application draws six charts and 288 cores anew with each tick, with nothing else: no reading, no
text, no history of nodes.

Both tick five times as fast as the dashboard does for users. With a tick a second most of the time goes into filling the processor's
caches, which other programs empty meanwhile: on one shared host the same code then cost 1.4 and 3.1 times the bare application within
minutes.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import random
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.python_path import checkout_path

if TYPE_CHECKING:
    from textual.app import App

    from so_tui.ui.snapshot import Snapshot

Size = tuple[int, int]
SIZE: Size = (160, 45)
SIZES: tuple[Size, ...] = ((80, 24), (120, 36), (160, 45), (200, 50))
"""Of the table of bytes."""
TICK_S = 0.2
WARMUP_S = 4.0
QUIET_S = 0.04
"""Seconds without output after which the frame that a key asked for is complete."""
KEYS = (b"i", *[b"\x1b[D"] * 8, b"z", b"z", *[b"\x1b[C"] * 6, b"Z", b"x", b"x", b"L", b"L", b"0", b"\x1b")
"""A cursor on all charts and along them, zoom in and out, other axes: pressed one after the other."""


class Cost(NamedTuple):
    """What a program in a pty takes."""

    cpu_percent: float
    """Of one core."""
    bytes_per_s: float
    memory_bytes: int
    ticks: int
    """Times that it drew something new."""
    seconds: float
    keys_s: tuple[float, ...] = ()
    """CPU seconds from each key to its frame."""

    @property
    def bytes_per_tick(self) -> float:
        return self.bytes_per_s * self.seconds / max(1, self.ticks)

    @property
    def key_p95_s(self) -> float:
        """What 95 % of the keys take at most."""
        return statistics.quantiles(self.keys_s, n=20)[-1] if self.keys_s else math.nan


class _Terminal:
    """A program in a pty, and what is heard of it."""

    def __init__(self, kind: str, seconds: float, arguments: tuple[str, ...], state: Path, size: Size) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        terminal_is = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
        environment = {**os.environ, **terminal_is, "PYTHONPATH": checkout_path(), "XDG_STATE_HOME": str(state)}
        self._hearing, telling = os.pipe()
        command = [sys.executable, "-m", "tests.support.dashboard_cost", kind, str(seconds), str(telling), *arguments]
        self._run = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, pass_fds=[telling], env=environment, start_new_session=True
        )
        os.close(terminal)
        os.close(telling)
        self.said = ""
        self.sent_bytes = 0
        self._last = b""

    def listen(self, limit_s: float) -> bool:
        """Take what is there within a time. Return whether there was anything. Raises AssertionError where the program has ended."""
        ready, _, _ = select.select([self._controller, self._hearing], [], [], limit_s)
        if self._hearing in ready:
            said = os.read(self._hearing, 65536).decode()
            assert said, f"it ended: {self.said} {self._last[-2000:]!r}"
            self.said += said
        if self._controller in ready:
            self._last = os.read(self._controller, 65536)
            self.sent_bytes += len(self._last)
        return bool(ready)

    def key_cost_s(self, key: bytes) -> float:
        """Press a key, and return the CPU seconds until the program is quiet again."""
        before = self._cpu_s()
        os.write(self._controller, key)
        self.listen(1.0)
        while self.listen(QUIET_S):
            continue
        return self._cpu_s() - before

    def _cpu_s(self) -> float:
        tasks = Path(f"/proc/{self._run.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        self._run.kill()
        self._run.wait()
        os.close(self._controller)
        os.close(self._hearing)


def measure(
    kind: str, seconds: float, size: Size, feed: Callable[[], object] = lambda: None, *arguments: str, keys: tuple[bytes, ...] = ()
) -> Cost:
    """Run this script as ``kind`` in a pty, feeding it with each tick, then press keys."""
    with tempfile.TemporaryDirectory() as state:
        settings = Path(state, "so-tui", "charts.json")
        settings.parent.mkdir()
        if size == SIZE:
            settings.write_text(json.dumps({"grid": [2, 3]}))
        terminal = _Terminal(kind, seconds, arguments, Path(state), size)
        try:
            due, begun, sent = time.monotonic(), 0.0, 0
            while "end" not in terminal.said:
                if time.monotonic() >= due:
                    due += TICK_S
                    feed()
                if not begun and "begin" in terminal.said:
                    begun, sent = time.monotonic(), terminal.sent_bytes
                terminal.listen(0.05)
            took_s = time.monotonic() - begun
            _, cpu, memory, ticks, _ = terminal.said.split()
            sent = terminal.sent_bytes - sent
            return Cost(float(cpu), sent / took_s, int(memory), int(ticks), took_s, tuple(map(terminal.key_cost_s, keys)))
        finally:
            terminal.close()


def dashboard(seconds: float, size: Size = SIZE, keys: tuple[bytes, ...] = KEYS) -> Cost:
    """The dashboard of a run that is written meanwhile."""
    from msgspec.structs import replace

    from so_tui.runs import MetricsWriter, SampleWriter, read_state, write_state
    from tests.support import make_run

    with tempfile.TemporaryDirectory() as folder:
        machine = make_run.quad_machine()
        plan = make_run.plan_for(machine, "qwen3-14b", 4, 5000)
        run = make_run.write_run(Path(folder), machine=machine)
        metrics, samples = MetricsWriter(run, 1), SampleWriter(run, machine.hostname)
        chance, step = random.Random(1), 1240

        def feed() -> None:
            nonlocal step
            step += 1
            now = time.time()
            metrics.append(make_run.step_record(chance, 1, now, step, 5000, range(0)))
            samples.append(make_run.sample(chance, 1, now, machine, plan))
            with run.log_path(1, machine.hostname).open("a") as log:
                log.write(f"rank 0  step {step}/5000  loss {1.42 + math.exp(-step / 260):.4f}  3.10 s\n")
            write_state(run, replace(read_state(run), step=step, heartbeat=step))

        return measure("ours", seconds, size, feed, str(run.path), keys=keys)


def bare(seconds: float, size: Size = SIZE) -> Cost:
    """The bare application."""
    return measure("bare", seconds, size)


def empty() -> Cost:
    """An application with nothing in it."""
    return measure("empty", 1.0, SIZE)


def _timed(app: App[None], seconds: float, telling: int, ticks: Callable[[], int] = lambda: 0) -> None:
    """Tell on a pipe when measuring begins, and after ``seconds`` the share of a core since then, the memory in bytes, and the ticks."""
    spent: list[tuple[float, float, int]] = []

    def begin() -> None:
        spent.append((time.process_time(), time.monotonic(), ticks()))
        os.write(telling, b"begin ")

    def end() -> None:
        cpu, wall, ticked = time.process_time() - spent[0][0], time.monotonic() - spent[0][1], ticks() - spent[0][2]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        os.write(telling, f"{100 * cpu / wall:.3f} {pages * os.sysconf('SC_PAGE_SIZE')} {ticked} end".encode())

    app.set_timer(WARMUP_S, begin)
    app.set_timer(WARMUP_S + seconds, end)


def _run_ours(seconds: float, telling: int, path: str) -> None:
    from so_tui.runs import RunDirectory
    from so_tui.ui import app
    from so_tui.ui.screens import dashboard as screen

    app.RUNS_POLL_S *= TICK_S / screen.POLL_S
    screen.POLL_S = TICK_S
    drawn = []
    take = screen.DashboardScreen._take

    def counted(self: screen.DashboardScreen, snapshot: Snapshot) -> None:
        drawn.append(snapshot.length)
        take(self, snapshot)

    setattr(screen.DashboardScreen, "_take", counted)  # noqa: B010 - mypy forbids to assign to a method
    setattr(app.SoTuiApp, "on_ready", lambda app: _timed(app, seconds, telling, lambda: len(drawn)))  # noqa: B010 - a subclass would look for its styles beside this file
    app.SoTuiApp(open_run=RunDirectory(Path(path)), runs_dir=Path(path).parent).run()


def _run_bare(seconds: float, telling: int) -> None:
    import numpy as np
    from rich.segment import Segment
    from rich.style import Style
    from textual.app import App, ComposeResult
    from textual.containers import Grid
    from textual.strip import Strip
    from textual.widget import Widget

    style = Style.parse("cyan")
    dots = np.array([[1, 8], [2, 16], [4, 32], [64, 128]])
    noise = np.random.default_rng(0)
    curve = 8 * np.exp(-np.arange(20_000) / 5000) + 1.5 + 0.15 * noise.standard_normal(20_000)

    class Drawn(Widget):
        DEFAULT_CSS = "Drawn { width: 1fr; height: 1fr; }"
        rows: tuple[Strip, ...] = ()

        def render_line(self, y: int) -> Strip:
            return self.rows[y] if y < len(self.rows) else Strip.blank(self.size.width)

    def plot(widget: Drawn, count: int) -> None:
        """The first ``count`` values as a braille curve, from the least to the greatest of each column."""
        width, height = widget.size
        low, high = curve[:count].min(), curve[:count].max()
        column = np.arange(count) * (2 * width - 1) // count
        dot = ((high - curve[:count]) * ((4 * height - 1) / (high - low))).astype(int)
        top, bottom = np.full(2 * width, 4 * height), np.full(2 * width, -1)
        np.minimum.at(top, column, dot)
        np.maximum.at(bottom, column, dot)
        row = np.arange(4 * height)[:, None]
        lit = (row >= top) & (row <= bottom)
        cells = (lit.reshape(height, 4, width, 2) * dots[None, :, None, :]).sum(axis=(1, 3)) + 0x2800
        widget.rows = tuple(Strip([Segment("".join(map(chr, line)), style)], width) for line in cells.tolist())
        widget.refresh()

    class Bare(App[None]):
        CSS = "Grid { grid-size: 3; }"

        def compose(self) -> ComposeResult:
            with Grid():
                for _ in range(7):
                    yield Drawn()

        def on_mount(self) -> None:
            self.count = 2000
            self.set_interval(TICK_S, self.tick)
            _timed(self, seconds, telling, lambda: self.count)

        def tick(self) -> None:
            self.count += 1
            *charts, cores = self.query(Drawn)
            for chart in charts:
                plot(chart, self.count)
            levels = " ▁▂▃▄▅▆▇█"
            loads = [levels[int(8 * noise.random())] for _ in range(288)]
            cores.rows = tuple(
                Strip([Segment("".join(loads[at : at + 72]), style)]).adjust_cell_length(cores.size.width) for at in range(0, 288, 72)
            )
            cores.refresh()

    Bare().run()


def _run_empty(seconds: float, telling: int) -> None:
    from textual.app import App

    class Empty(App[None]):
        def on_mount(self) -> None:
            _timed(self, seconds, telling)

    Empty().run()


def table(nothing: Cost, reference: Cost, real: Cost) -> str:
    """Return what was measured as lines of text."""
    mib = 1 << 20
    rows = [
        ("", "empty", "bare", "dashboard", ""),
        (
            "% of a core",
            *(f"{cost.cpu_percent:.2f}" for cost in (nothing, reference, real)),
            f"{real.cpu_percent / reference.cpu_percent:.2f} x bare",
        ),
        (
            "kB/s",
            *(f"{cost.bytes_per_s / 1000:.1f}" for cost in (nothing, reference, real)),
            f"{real.bytes_per_s / reference.bytes_per_s:.2f} x bare",
        ),
        (
            "MiB",
            *(f"{cost.memory_bytes / mib:.1f}" for cost in (nothing, reference, real)),
            f"{(real.memory_bytes - nothing.memory_bytes) / mib:+.1f} MiB",
        ),
        ("key to frame, ms", "", "", f"{1000 * real.key_p95_s:.1f}", "p95"),
    ]
    return "\n".join(f"{name:<18}{first:>9}{second:>9}{third:>11}   {note}" for name, first, second, third, note in rows)


def bytes_table(seconds: float) -> str:
    """Return how many bytes a terminal is sent with each tick, in each size."""
    lines = [f"{'bytes a tick':<14}{'cells':>8}{'bare':>9}{'dashboard':>11}"]
    for size in SIZES:
        sent = [cost.bytes_per_tick for cost in (bare(seconds, size), dashboard(seconds, size, ()))]
        lines.append(f"{f'{size[0]}x{size[1]}':<14}{size[0] * size[1]:>8}{sent[0]:>9.0f}{sent[1]:>11.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["ours"]:
        _run_ours(float(arguments[1]), int(arguments[2]), arguments[3])
    elif arguments[:1] == ["bare"]:
        _run_bare(float(arguments[1]), int(arguments[2]))
    elif arguments[:1] == ["empty"]:
        _run_empty(float(arguments[1]), int(arguments[2]))
    elif arguments[:1] == ["bytes"]:
        print(bytes_table(float(arguments[1]) if arguments[1:] else 10.0))
    else:
        span = float(arguments[0]) if arguments else 20.0
        print(table(empty(), bare(span), dashboard(span)))
