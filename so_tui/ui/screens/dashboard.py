"""Dashboard: one run, live or past, on one axis: loss, throughput, the step's anatomy, the NUMA nodes, the GPUs, the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static
from textual.worker import Worker

from so_tui.runs import RunDirectory
from so_tui.ui.follow import RunFollower, Snapshot
from so_tui.ui.screens.dashboard_axis import AxisKeys
from so_tui.ui.screens.dashboard_log import LogSearch
from so_tui.ui.screens.run_actions import RESUMABLE, RunActions
from so_tui.ui.series import Axis
from so_tui.ui.text import plural, rate, significant
from so_tui.ui.view import View, axis_of, extent_of, rows_for
from so_tui.ui.widgets import stats
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.drawing import Mark
from so_tui.ui.widgets.entry import Entry
from so_tui.ui.widgets.log import LogView
from so_tui.ui.widgets.nodes import NodePanel, NodePicture
from so_tui.ui.widgets.rule import Rule
from so_tui.ui.widgets.words import Words

POLL_S = 1.0
MOST_NEWS_ROWS = 3
"""Why a run ended and what to do next is read whole."""
EMPTY = (
    "No run yet. This is where a run is watched: its loss and speed, where the time of a step goes, every NUMA node, GPU and core.\n\n"
    "Press [$accent]1[/] and then [$accent]l[/] to launch a preset, or [$accent]4[/] to choose a run."
)


class DashboardScreen(AxisKeys, LogSearch, RunActions):
    PAGE = "dashboard"
    CSS_PATH = "dashboard.tcss"
    AUTO_FOCUS = "#loss"
    ALLOW_IN_MAXIMIZED_VIEW = "TopLine, #title, #news, #search, KeyLine"
    HELP_TEXT = (
        "Everything shares one axis: steps, or time (x). Raw values are dim, their moving average is bright, evaluations have a colour of "
        "their own; ◆ is a checkpoint, ↻ a resume; gaps are values that are not numbers. A node's dim band reaches from its idlest to its "
        "busiest core. Cells are cores: A runs Adam, m the training process. Leaving this screen does not touch the run."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stop", "Stop", id="stop", tooltip="Save and stop the run (asks; No is the default)"),
        Binding("c", "checkpoint", "Save now", id="checkpoint", tooltip="Save a checkpoint after this step, and go on"),
        Binding("r", "resume", "Resume", id="resume", tooltip="Go on from the last checkpoint of a run that has ended"),
        Binding("x", "axis", "Axis", id="axis", tooltip="Steps or time on the axis of all charts"),
        Binding("z,plus", "zoom(0.5)", "Zoom", key_display="z", id="zoom", tooltip="Look closer (also + and the wheel)"),
        Binding("Z,minus", "zoom(2)", "Zoom out", key_display="Z", show=False, id="zoom-out", tooltip="Also -"),
        Binding("0", "whole", "Whole run", show=False, id="whole"),
        Binding("i", "inspect", "Inspect", id="inspect", tooltip="A cursor on all charts; arrows move it, shift by ten"),
        Binding("left", "point(-1)", "Cursor left", show=False),
        Binding("right", "point(1)", "Cursor right", show=False),
        Binding("shift+left", "point(-10)", "Cursor far left", show=False),
        Binding("shift+right", "point(10)", "Cursor far right", show=False),
        Binding("L", "log_scale", "Log y", show=False, id="log-scale", tooltip="Logarithmic loss"),
        Binding("m", "maximise(False)", "Back", id="restore", tooltip="All panels again"),
        Binding("m", "maximise(True)", "Maximise", id="maximise", tooltip="The panel with the focus, whole; again or esc: back"),
        Binding("slash", "find", "Search", key_display="/", id="find", tooltip="n and N go to the next and previous match"),
        Binding("f", "follow", "Follow log", show=False, id="follow", tooltip="Back to the newest line"),
        Binding(
            "equals_sign",
            "differences",
            "Settings",
            key_display="=",
            show=False,
            id="differences",
            tooltip="What differs from the preset's defaults",
        ),
        Binding("y", "copy", "Copy path", show=False, id="copy", tooltip="Copy the path of the run"),
    ]

    def __init__(self) -> None:
        self._run: RunDirectory | None = None
        self._follower: RunFollower | None = None
        self._worker: Worker[None] | None = None
        self._due = asyncio.Event()
        self._axis: Axis | None = None
        super().__init__()

    def body(self) -> Iterable[Widget]:
        glyphs = self.so.glyphs
        yield Static(Content.from_markup(EMPTY), id="empty")
        yield Words(id="title")
        yield Words(id="news")
        with VerticalScroll(id="panels", can_focus=False):
            with Horizontal(id="charts"):
                yield Chart("loss", glyphs=glyphs, id="loss")
                yield Chart("throughput", zero=True, glyphs=glyphs, id="throughput")
                yield Chart("gradient norm", glyphs=glyphs, id="norm")
            yield Words(id="anatomy")
            yield Rule("NUMA nodes", id="nodes-rule")
            yield NodePanel(glyphs=glyphs, id="nodes")
            yield Words(id="gpus")
            yield Rule("log", id="log-rule")
            yield LogView(id="log")
        yield Entry(placeholder="search the log: enter and n go back through the matches, esc ends", compact=True, id="search")

    def on_mount(self) -> None:
        self.query_one("#panels").display = False
        self.set_interval(POLL_S, self._tick)
        if self.so.opened is not None:
            self.follow(self.so.opened)
        else:
            self.watch(self.app, "runs", self._take_newest)

    def _take_newest(self) -> None:
        if self._run is None and self.so.runs:
            self.follow(self.so.runs[0].run)

    @property
    def chosen_run(self) -> RunDirectory | None:
        return self._run

    def follow(self, run: RunDirectory) -> None:
        """Show another run."""
        known = self._run is not None and run.path == self._run.path
        if known or not self.query("#panels"):  # a new screen takes the opened run when it is mounted
            return
        self._run = run
        self._follower = RunFollower(run)
        self._worker = None
        self.snapshot = None
        self._axis = None
        self.view = View(unit=self.view.unit)
        self.query_one(LogView).clear()
        self.query_one("#empty").display = False
        self.query_one("#panels").display = True
        self._tick()

    # Following.

    def on_screen_resume(self) -> None:
        self._tick()

    def _tick(self) -> None:
        """Have the run polled, unless this screen is not shown."""
        if self._follower is None or not self.is_current:
            return
        self._due.set()
        if self._worker is None or self._worker.is_finished:
            self._worker = self._poll(self._follower)

    @work(group="follow", name="follow the run", exclusive=True, exit_on_error=False)
    async def _poll(self, follower: RunFollower) -> None:
        """Poll in a thread when it is time, and not before the last poll came back (a slow file system), until another run is followed.

        One worker for all polls: starting one, and what it tells of its states, costs as much as a poll.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            zoomed = self.view.window is not None and self._axis is not None
            window = self._axis.in_steps() if zoomed and self._axis is not None else None
            snapshot = await asyncio.to_thread(follower.poll, window)
            if follower is self._follower:
                self._take(snapshot)

    def _take(self, snapshot: Snapshot) -> None:
        before, self.snapshot = self.snapshot, snapshot
        self._show(snapshot)
        if before is None or (before.live, before.deleted) != (snapshot.live, snapshot.deleted):
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("stop", "checkpoint", "resume"):
            snapshot = self.snapshot
            if snapshot is None or snapshot.state is None or snapshot.deleted:
                return False
            return snapshot.state.state in RESUMABLE if action == "resume" else snapshot.live
        if action == "maximise":
            return parameters == (self.maximized is None,)
        return True

    def watch_maximized(self) -> None:
        self.refresh_bindings()
        self._show_again()

    # Drawing.

    def _show(self, snapshot: Snapshot) -> None:
        now = time.time()
        whole_width = self.size.width - 2
        self._say("#title", stats.title_line(snapshot, now, whole_width))
        news = stats.news_line(snapshot)
        news_lines = [] if news is None else news.wrap(whole_width)[:MOST_NEWS_ROWS]
        self.query_one("#news").display = bool(news_lines)
        self._say("#news", Content("\n").join(news_lines))
        width = self.query_one("#panels").scrollable_content_region.width or whole_width
        anatomy = stats.anatomy_lines(snapshot, width)
        self._say("#anatomy", anatomy)
        gpus = stats.gpu_lines(snapshot.gpus, width)
        self.query_one("#gpus").display = bool(snapshot.gpus)
        self._say("#gpus", gpus)
        log = self.query_one(LogView)
        log.extend((line.text for line in snapshot.log_lines), snapshot.log_partial)
        self._share_rows(snapshot, anatomy.plain.count("\n") + 1, gpus.plain.count("\n") + 1 if snapshot.gpus else 0, len(news_lines))
        self.show_log_rule()
        self._draw_charts(snapshot)

    def _say(self, selector: str, content: Content) -> None:
        self.query_one(selector, Words).update(content)

    def _share_rows(self, snapshot: Snapshot, anatomy: int, gpus: int, news: int) -> None:
        height = self.size.height - 3
        crowded = height < 12 + 3 * len(snapshot.nodes)
        self.query_one("#nodes-rule").display = not crowded
        rows = rows_for(height, len(snapshot.nodes), gpus, 1 + news + anatomy + (1 if crowded else 2))
        self.query_one("#charts").styles.height = rows.charts
        log = self.query_one(LogView)
        log.styles.height = None if log.is_maximized else rows.log
        self.query_one(NodePanel).set_plot_height(rows.plot)

    def _draw_charts(self, snapshot: Snapshot) -> None:
        axis = self._axis = axis_of(snapshot, self.view, self._axis)
        extent = extent_of(snapshot, self.view.unit)
        note = self.view.words(extent) if extent else ""
        cursor = self.view.cursor
        marks = [Mark(float(saved.step), saved.time, "◆", "mark") for saved in snapshot.checkpoints]
        marks += [Mark(float(resume.step), resume.time, "↻", "mark") for resume in snapshot.resumes]
        step_axis = axis if snapshot.length else None
        loss, throughput, norm = (self.query_one(selector, Chart) for selector in ("#loss", "#throughput", "#norm"))
        loss.waiting = throughput.waiting = norm.waiting = stats.waiting_words(snapshot)
        lines = [snapshot.line("loss", "raw", axis), snapshot.line("ema", "main", axis)]
        newest = "now" if snapshot.training else "last"
        names = [newest if cursor is None else ".", "mean"]
        if snapshot.evaluations is not None:
            lines.append(snapshot.evaluations)
            names.append("evaluation" if loss.size.width >= 52 else "eval")
        loss.show(lines, names, step_axis, marks=marks, cursor=cursor, note=note)
        latest = snapshot.latest
        wide = throughput.size.width >= 52
        throughput.title = "throughput" if wide else "speed"
        per = "GPU" if snapshot.on_gpus else "rank"
        speed = f"TFLOPS/{per}"
        if latest is not None and cursor is None:
            tokens = rate(latest.useful_tokens_per_s_total)
            mfu = f"   MFU {100 * latest.mfu:.1f} %" if latest.mfu is not None else ""
            speed = f"TFLOPS/{per}   {tokens} tokens/s{mfu}" if wide else f"TFLOPS  {tokens} tok/s"
        names = ["." if snapshot.training or cursor is not None else "last"]
        throughput.show([snapshot.line("model_tflops_per_gpu", "main", axis)], names, step_axis, marks=marks, cursor=cursor, note=speed)
        if norm.display:
            rate_words = "" if latest is None or cursor is not None else f"learning rate {significant(latest.learning_rate)}"
            norm.show(
                [snapshot.line("gradient_norm", "raw", axis), snapshot.line("norm_ema", "main", axis)],
                [".", ""],
                step_axis,
                marks=marks,
                cursor=cursor,
                note=rate_words,
            )
        self.query_one(NodePanel).show(self._pictures(snapshot), axis)
        cores = sum(len(node.cpus) for node in snapshot.nodes)
        when = ", means while it trained" if snapshot.averaged else ""
        words = (
            f"NUMA   {plural(len(snapshot.nodes), 'node')}, {plural(cores, 'core')}{when}   a cell is a core: A Adam, m main, o other"
            if cores
            else "NUMA   waiting for the first sample"
        )

        self.query_one("#nodes-rule", Rule).update(Content.styled(words, "$faint"))

    def _pictures(self, snapshot: Snapshot) -> tuple[NodePicture, ...]:
        ranks = snapshot.binding.ranks if snapshot.binding is not None else ()
        pictures = []
        for node in snapshot.nodes:
            own = set(node.cpus)
            here = [rank for rank in ranks if own.intersection(rank.cpus) and rank.host in (node.host, "")]
            words = " · ".join(f"rank {rank.rank}" + ("" if rank.gpu is None else f" · GPU {rank.gpu}") for rank in here)
            adam = frozenset(cpu for rank in here for cpu in rank.adam_cpus)
            main = frozenset(cpu for rank in here for cpu in rank.main_cpus)
            host = node.host if snapshot.hosts > 1 else ""
            used = {rank.gpu for rank in here}
            gpus = tuple(gpu for gpu in snapshot.gpus if gpu.host == node.host and gpu.sample.index in used)
            pictures.append(NodePicture(node, f"{host} {words}".strip(), adam, main, gpus))
        return tuple(pictures)

    def on_resize(self) -> None:
        self._show_again()

    def _show_again(self) -> None:
        if self.snapshot is not None:
            self._show(replace(self.snapshot, log_lines=()))

    def watch_view(self) -> None:
        self._axis = None
        if self.snapshot is not None:
            self._draw_charts(self.snapshot)
            if self.view.window is not None:
                self._tick()  # a stretch that was zoomed to is read more closely

    def action_log_scale(self) -> None:
        loss = self.query_one("#loss", Chart)
        loss.log_scale = not loss.log_scale
        loss.redraw()

    def action_maximise(self, whole: bool) -> None:
        """Show the panel with the focus alone, or all of them again."""
        if whole:
            focused = self.focused
            self.maximize(focused if focused is not None and focused.allow_maximize else self.query_one("#loss"))
        else:
            self.minimize()
        self.call_after_refresh(self.watch_view)

    def action_leave_field(self) -> None:
        if self.maximized is not None:
            self.minimize()
        elif self.left_search():
            self.query_one("#loss").focus()
        elif self.view.cursor is not None:
            self.view = replace(self.view, cursor=None)
        else:
            self.set_focus(self.query_one("#loss"))
