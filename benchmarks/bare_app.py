"""A bare Textual application that draws as much as the dashboard of a live run, and does nothing
else: the measure of ``dashboard_cost``.

With each tick it draws what the dashboard draws: six charts of the same size, 288 cores, and the
lines of figures (a title, a step, two nodes with their cores, four GPUs, four lines of the log).
Each widget that changes is drawn and refreshed as a whole, as Textual has it, in one style. Rows of
the dashboard that do not change (its top line, tabs, headings and keys) are left empty. It reads
nothing, formats nothing, and has no axes, marks, legends or focus.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.containers import Grid
from textual.strip import Strip
from textual.widget import Widget

STYLE = Style.parse("cyan")
DOTS = np.array([[1, 8], [2, 16], [4, 32], [64, 128]])
LEVELS = " ▁▂▃▄▅▆▇█"
CORES = 288
FIRST = 2000
"""Values of a chart at first; one more with each tick."""


class Drawn(Widget):
    """Rows that are shown as they are."""

    rows: tuple[Strip, ...] = ()

    def render_line(self, y: int) -> Strip:
        return self.rows[y] if y < len(self.rows) else Strip.blank(self.size.width)

    def show(self, rows: list[str]) -> None:
        """Show other rows."""
        self.rows = tuple(
            Strip([Segment(row, STYLE)]).adjust_cell_length(self.size.width) for row in rows
        )
        self.refresh()


class BareApp(App[None]):
    """Draws with each tick; ``begun`` is called once it is mounted."""

    CSS = """
    Screen { padding: 4 1 1 1; }
    Grid { grid-size: 3; height: 1fr; }
    Grid Drawn { margin-right: 2; height: 100%; }
    #title, #step { height: 1; }
    #nodes { height: 2; }
    #gpus, #log { height: 4; }
    """

    def __init__(self, tick_s: float, begun: Callable[[], None]) -> None:
        super().__init__()
        self.count = FIRST
        self._tick_s, self._begun = tick_s, begun
        self._noise = np.random.default_rng(0)
        self._curve = (
            8 * np.exp(-np.arange(20_000) / 5000) + 1.5 + 0.15 * self._noise.standard_normal(20_000)
        )

    def compose(self) -> ComposeResult:
        yield Drawn(id="title")
        with Grid():
            for _ in range(6):
                yield Drawn(classes="chart")
        for name in ("step", "nodes", "gpus", "log"):
            yield Drawn(id=name)

    def on_mount(self) -> None:
        self.set_interval(self._tick_s, self._tick)
        self._begun()

    def _tick(self) -> None:
        self.count += 1
        for chart in self.query(".chart").results(Drawn):
            chart.show(self._plot(*chart.size))
        loads = [LEVELS[int(8 * self._noise.random())] for _ in range(CORES)]
        cores = ["".join(loads[at : at + CORES // 2]) for at in range(0, CORES, CORES // 2)]
        self.query_one("#nodes", Drawn).show(cores)
        for name, rows in (("title", 1), ("step", 1), ("gpus", 4), ("log", 4)):
            self.query_one(f"#{name}", Drawn).show([self._line(row) for row in range(rows)])

    def _line(self, row: int) -> str:
        return f"{row} {self.count} " * 20

    def _plot(self, width: int, height: int) -> list[str]:
        """Return the first values as a braille curve, from the least to the greatest of each
        column.
        """
        values = self._curve[: self.count]
        low, high = values.min(), values.max()
        column = np.arange(self.count) * (2 * width - 1) // self.count
        dot = ((high - values) * ((4 * height - 1) / (high - low))).astype(int)
        top, bottom = np.full(2 * width, 4 * height), np.full(2 * width, -1)
        np.minimum.at(top, column, dot)
        np.maximum.at(bottom, column, dot)
        row = np.arange(4 * height)[:, None]
        lit = (row >= top) & (row <= bottom)
        cells = (lit.reshape(height, 4, width, 2) * DOTS[None, :, None, :]).sum(
            axis=(1, 3)
        ) + 0x2800
        return ["".join(map(chr, line)) for line in cells.tolist()]
