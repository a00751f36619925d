"""What the dashboard of a live run costs: CPU time and bytes to the terminal, beside those of a bare Textual application.

``python -m tests.support.dashboard_cost [SECONDS]``, in the root of the repository, measures both in a pty of 160x45 and prints a line
each. The run has four charts, four nodes with 288 cores and four GPUs, and moves with each tick: a step, a sample of every core, a line in
the log. The bare application draws three charts and 144 cores anew with each tick, with nothing else: no reading, no text, no history of
nodes.

Both tick five times as fast as the dashboard does for users. With a tick a second most of the time goes into filling the processor's
caches, which other programs empty meanwhile: on one shared host the same code then cost 1.4 and 3.1 times the bare application within
minutes.
"""

from __future__ import annotations

import fcntl
import math
import os
import pty
import random
import re
import select
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

SIZE = (160, 45)
TICK_S = 0.2
WARMUP_S = 4.0


class Cost(NamedTuple):
    cpu_percent: float
    """Of one core."""
    bytes_per_s: float


def measure(kind: str, seconds: float, feed: Callable[[], object] = lambda: None, *arguments: str) -> Cost:
    """Run this script as ``kind`` in a pty, feeding it with each tick meanwhile."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    terminal_is = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
    environment = {**os.environ, **terminal_is, "PYTHONPATH": checkout_path()}
    hearing, telling = os.pipe()
    command = [sys.executable, "-m", "tests.support.dashboard_cost", kind, str(seconds), str(telling), *arguments]
    found = None
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, pass_fds=[telling], env=environment, start_new_session=True
    ) as run:
        os.close(terminal)
        os.close(telling)
        total, sent, due, began, heard = 0, 0, time.monotonic(), 0.0, ""
        last, sources = b"", [controller, hearing]
        while True:  # until all that it said is heard: it may end, and its terminal with it, right after its last word
            if time.monotonic() >= due:
                due += TICK_S
                feed()
            ready, _, _ = select.select(sources, [], [], 0.05)
            if controller in ready:
                try:
                    block = os.read(controller, 65536)
                    total, last = total + len(block), block
                except OSError:  # how the end of a pty shows itself on Linux
                    sources.remove(controller)
            if hearing in ready:
                said = os.read(hearing, 65536).decode()
                heard += said
                if "begin" in said:
                    sent, began = total, time.monotonic()
                if match := re.search(r"cpu ([0-9.]+)", said):
                    found = Cost(float(match[1]), (total - sent) / (time.monotonic() - began))
                if found or not said:
                    break
        run.kill()
    os.close(controller)
    os.close(hearing)
    assert found is not None, f"{kind} measured nothing: {heard} {last[-2000:]!r}"
    return found


def dashboard(seconds: float) -> Cost:
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

        return measure("ours", seconds, feed, str(run.path))


def bare(seconds: float) -> Cost:
    """The bare application."""
    return measure("bare", seconds)


def _timed(app: App[None], seconds: float, telling: int) -> None:
    """Tell on a pipe when measuring begins, and after ``seconds`` the share of a core since then."""
    spent = []

    def begin() -> None:
        spent.append((time.process_time(), time.monotonic()))
        os.write(telling, b"begin ")

    def end() -> None:
        cpu, wall = time.process_time() - spent[0][0], time.monotonic() - spent[0][1]
        os.write(telling, f"cpu {100 * cpu / wall:.3f} ".encode())
        app.exit()

    app.set_timer(WARMUP_S, begin)
    app.set_timer(WARMUP_S + seconds, end)


def _run_ours(seconds: float, telling: int, path: str) -> None:
    from so_tui.runs import RunDirectory
    from so_tui.ui import app
    from so_tui.ui.screens import dashboard as screen

    app.RUNS_POLL_S *= TICK_S / screen.POLL_S
    screen.POLL_S = TICK_S
    setattr(app.SoTuiApp, "on_ready", lambda app: _timed(app, seconds, telling))  # noqa: B010 - a subclass would look for its styles beside this file
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
        CSS = "Grid { grid-size: 2; }"

        def compose(self) -> ComposeResult:
            with Grid():
                for _ in range(4):
                    yield Drawn()

        def on_mount(self) -> None:
            self.count = 2000
            self.set_interval(TICK_S, self.tick)
            _timed(self, seconds, telling)

        def tick(self) -> None:
            self.count += 1
            *charts, cores = self.query(Drawn)
            for chart in charts:
                plot(chart, self.count)
            levels = " ▁▂▃▄▅▆▇█"
            loads = [levels[int(8 * noise.random())] for _ in range(144)]
            cores.rows = tuple(Strip([Segment("".join(loads[at : at + 72]), style)]).adjust_cell_length(cores.size.width) for at in (0, 72))
            cores.refresh()

    Bare().run()


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        _run_ours(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1:2] == ["bare"]:
        _run_bare(float(sys.argv[2]), int(sys.argv[3]))
    else:
        span = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
        reference, real = bare(span), dashboard(span)
        for name, cost in (("bare", reference), ("dashboard", real)):
            print(f"{name:<10} {cost.cpu_percent:5.2f} % of a core   {cost.bytes_per_s / 1000:6.1f} kB/s")
        cpu, sent = real.cpu_percent / reference.cpu_percent, real.bytes_per_s / reference.bytes_per_s
        print(f"ratio      {cpu:5.2f}               {sent:6.2f}")
