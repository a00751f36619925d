"""What the dashboard of a live run costs, beside a bare Textual application that draws as much
(``bare_app``), and an empty one.

``python -m benchmarks.dashboard_cost [SECONDS]``, in the root of the repository, measures all in
ptys of 160x45 and prints a table, with what it takes to open a run of a million records and to show
it;
``... bytes [SECONDS]`` prints how much a terminal is sent with each tick, in several sizes, which
is what matters over ssh. The run has six charts, four nodes with 288 cores and four GPUs, and moves
with each tick, once a second: a step, a sample of every core, a line in the log.

The dashboard draws as many cells as the bare application, but compares before it paints: a terminal
is sent half as much.
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
from concurrent.futures import ThreadPoolExecutor
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
TICK_S = 1.0
FAST_TICK_S = 0.2
"""Where only bytes are counted."""
WARMUP_S = 4.0
QUIET_S = 0.04
"""Seconds without output after which the frame that a key asked for is complete."""
KEYS = (
    b"i",
    *[b"\x1b[D"] * 8,
    b"z",
    b"z",
    *[b"\x1b[C"] * 6,
    b"Z",
    b"x",
    b"x",
    b"L",
    b"L",
    b"0",
    b"\x1b",
)
"""A cursor on all charts and along them, zoom in and out, other axes: pressed one after the
other.
"""


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

    def __init__(
        self,
        kind: str,
        seconds: float,
        tick_s: float,
        arguments: tuple[str, ...],
        state: Path,
        size: Size,
    ) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        terminal_is = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
        environment = {
            **os.environ,
            **terminal_is,
            "PYTHONPATH": checkout_path(),
            "XDG_STATE_HOME": str(state),
        }
        self._hearing, telling = os.pipe()
        command = [
            sys.executable,
            "-m",
            "benchmarks.dashboard_cost",
            kind,
            str(seconds),
            str(tick_s),
            str(telling),
            *arguments,
        ]
        self._run = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            pass_fds=[telling],
            env=environment,
            start_new_session=True,
        )
        os.close(terminal)
        os.close(telling)
        self.said = ""
        self.sent_bytes = 0
        self._last = b""

    def listen(self, limit_s: float) -> bool:
        """Take what is there within a time. Return whether there was anything. Raises
        AssertionError where the program has ended.
        """
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
    kind: str,
    seconds: float,
    *arguments: str,
    size: Size = SIZE,
    tick_s: float = TICK_S,
    feed: Callable[[], object] = lambda: None,
    keys: tuple[bytes, ...] = (),
) -> Cost:
    """Run this script as ``kind`` in a pty, feeding it with each tick, then press keys."""
    with tempfile.TemporaryDirectory() as state:
        settings = Path(state, "so-tui", "charts.json")
        settings.parent.mkdir()
        if size == SIZE:
            settings.write_text(json.dumps({"grid": [2, 3]}))
        terminal = _Terminal(kind, seconds, tick_s, arguments, Path(state), size)
        try:
            due, begun, sent = time.monotonic(), 0.0, 0
            while "end" not in terminal.said:
                if time.monotonic() >= due:
                    due += tick_s
                    feed()
                if not begun and "begin" in terminal.said:
                    begun, sent = time.monotonic(), terminal.sent_bytes
                terminal.listen(0.05)
            took_s = time.monotonic() - begun
            _, cpu, memory, ticks, _ = terminal.said.split()
            sent = terminal.sent_bytes - sent
            return Cost(
                float(cpu),
                sent / took_s,
                int(memory),
                int(ticks),
                took_s,
                tuple(map(terminal.key_cost_s, keys)),
            )
        finally:
            terminal.close()


def dashboard(
    seconds: float, size: Size = SIZE, tick_s: float = TICK_S, keys: tuple[bytes, ...] = KEYS
) -> Cost:
    """The dashboard of a run that is written meanwhile."""
    from msgspec.structs import replace

    from so_tui.runs import MetricsWriter, SampleWriter, read_state, write_state
    from tests.support import make_run

    with tempfile.TemporaryDirectory() as folder:
        machine = make_run.quad_machine()
        plan = make_run.plan_for(machine, "qwen3-14b", 4, 5000)
        run = make_run.write_run(Path(folder), machine=machine, seconds_of_samples=900)
        metrics, samples = MetricsWriter(run, 1), SampleWriter(run, machine.hostname)
        chance, step = random.Random(1), 1240

        def feed() -> None:
            nonlocal step
            step += 1
            now = time.time()
            metrics.append(make_run.step_record(chance, 1, now, step, 5000, range(0)))
            samples.append(make_run.sample(chance, 1, now, machine, plan))
            with run.log_path(1, machine.hostname).open("a") as log:
                log.write(
                    f"rank 0  step {step}/5000  loss {1.42 + math.exp(-step / 260):.4f}  3.10 s\n"
                )
            write_state(run, replace(read_state(run), step=step, heartbeat=step))

        return measure(
            "ours", seconds, str(run.path), size=size, tick_s=tick_s, feed=feed, keys=keys
        )


def million(seconds: float) -> Cost:
    """The dashboard of a run of a million records, with nothing new."""
    from msgspec.structs import replace

    from so_tui.runs import read_state, write_state
    from tests.support import make_run
    from tests.support.long_run import write_long_run

    with tempfile.TemporaryDirectory() as folder:
        run = make_run.write_run(
            Path(folder), machine=make_run.quad_machine(), seconds_of_samples=900
        )
        for path in run.metrics_dir.iterdir():
            path.unlink()
        last = write_long_run(run, 1_000_000)
        write_state(run, replace(read_state(run), step=last, total_steps=2 * last))
        return measure("ours", seconds, str(run.path))


def bare(seconds: float, size: Size = SIZE, tick_s: float = TICK_S) -> Cost:
    """The bare application."""
    return measure("bare", seconds, size=size, tick_s=tick_s)


def side_by_side(seconds: float) -> tuple[Cost, Cost]:
    """The bare application and the dashboard at the same time: a shared machine is a third slower
    in one minute than in the next.
    """
    with ThreadPoolExecutor(1) as beside:
        reference = beside.submit(bare, seconds)
        ours = dashboard(seconds)
        return reference.result(), ours


def empty() -> Cost:
    """An application with nothing in it."""
    return measure("empty", 1.0)


def _timed(
    app: App[None], seconds: float, telling: int, ticks: Callable[[], int] = lambda: 0
) -> None:
    """Tell on a pipe when measuring begins, and after ``seconds`` the share of a core since then,
    the memory in bytes, and the ticks.
    """
    spent: list[tuple[float, float, int]] = []

    def begin() -> None:
        spent.append((time.process_time(), time.monotonic(), ticks()))
        os.write(telling, b"begin ")

    def end() -> None:
        cpu, wall, ticked = (
            time.process_time() - spent[0][0],
            time.monotonic() - spent[0][1],
            ticks() - spent[0][2],
        )
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        os.write(
            telling,
            f"{100 * cpu / wall:.3f} {pages * os.sysconf('SC_PAGE_SIZE')} {ticked} end".encode(),
        )

    app.set_timer(WARMUP_S, begin)
    app.set_timer(WARMUP_S + seconds, end)


def _run_ours(seconds: float, tick_s: float, telling: int, path: str) -> None:
    from so_tui.runs import RunDirectory
    from so_tui.ui import app
    from so_tui.ui.dashboard import screen

    app.RUNS_POLL_S *= tick_s / screen.POLL_S
    screen.POLL_S = tick_s
    drawn = []
    show = screen.DashboardScreen._show

    def counted(self: screen.DashboardScreen, snapshot: Snapshot) -> None:
        drawn.append(snapshot.length)
        show(self, snapshot)

    setattr(screen.DashboardScreen, "_show", counted)  # noqa: B010 - mypy forbids to assign to a method
    setattr(app.SoTuiApp, "on_ready", lambda app: _timed(app, seconds, telling, lambda: len(drawn)))  # noqa: B010 - a subclass would look for its styles beside this file
    app.SoTuiApp(open_run=RunDirectory(Path(path)), runs_dir=Path(path).parent).run()


def _run_bare(seconds: float, tick_s: float, telling: int) -> None:
    from benchmarks.bare_app import BareApp

    app = BareApp(tick_s, lambda: _timed(app, seconds, telling, lambda: app.count))
    app.run()


def _run_empty(seconds: float, telling: int) -> None:
    from textual.app import App

    class Empty(App[None]):
        def on_mount(self) -> None:
            _timed(self, seconds, telling)

    Empty().run()


def opening_s(records: int) -> float:
    """Return the CPU seconds until all of a run of so many records is known: the least of three, as
    noise only adds.
    """
    from so_tui.runs import RunDirectory
    from so_tui.runs.metrics import MetricsReader
    from so_tui.ui.charts.series import FollowedSteps
    from tests.support.long_run import read_on, write_long_run

    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder, "run"))
        run.path.mkdir()
        last = write_long_run(run, records)
        least_s = math.inf
        for _ in range(3):
            begun = time.process_time()
            reader = MetricsReader(run)
            steps = FollowedSteps(reader)
            while read_on(reader, steps, 50, limit_s=10.0):
                continue
            least_s = min(least_s, time.process_time() - begun)
            assert steps.series.last_step == last
        return least_s


def table(nothing: Cost, reference: Cost, real: Cost, million_s: float, long: Cost) -> str:
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
        ("a million records", "", "", f"{million_s:.2f}", "s until complete"),
        (
            "  MiB then",
            f"{nothing.memory_bytes / mib:.1f}",
            "",
            f"{long.memory_bytes / mib:.1f}",
            f"{(long.memory_bytes - nothing.memory_bytes) / mib:+.1f} MiB",
        ),
    ]
    return "\n".join(
        f"{name:<18}{first:>9}{second:>9}{third:>11}   {note}"
        for name, first, second, third, note in rows
    )


def bytes_table(seconds: float) -> str:
    """Return how many bytes a terminal is sent with each tick, in each size."""
    lines = [f"{'bytes a tick':<14}{'cells':>8}{'bare':>9}{'dashboard':>11}"]
    for size in SIZES:
        sent = [
            cost.bytes_per_tick
            for cost in (
                bare(seconds, size, FAST_TICK_S),
                dashboard(seconds, size, FAST_TICK_S, ()),
            )
        ]
        lines.append(
            f"{f'{size[0]}x{size[1]}':<14}{size[0] * size[1]:>8}{sent[0]:>9.0f}{sent[1]:>11.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    match arguments:
        case ["ours", seconds, tick_s, telling, path]:
            _run_ours(float(seconds), float(tick_s), int(telling), path)
        case ["bare", seconds, tick_s, telling]:
            _run_bare(float(seconds), float(tick_s), int(telling))
        case ["empty", seconds, _, telling]:
            _run_empty(float(seconds), int(telling))
        case ["bytes", *span]:
            print(bytes_table(float(span[0]) if span else 10.0))
        case _:
            length_s = float(arguments[0]) if arguments else 20.0
            opened_s = opening_s(1_000_000)
            print(table(empty(), *side_by_side(length_s), opened_s, million(length_s)))
