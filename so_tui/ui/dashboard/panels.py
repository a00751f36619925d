"""The run's log: follows its end until the reader scrolls up, and can be searched."""

from __future__ import annotations

import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice

from rich.segment import Segment
from rich.style import Style
from textual import events, getters, on
from textual.app import ComposeResult
from textual.geometry import Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from so_tui.launch.supervisor.samples import IDLE_NICE, misplaced, share_on_nodes
from so_tui.launch.supervisor.slowness import LEAST_OWN_SHARE
from so_tui.machine.host import cpu_ranges
from so_tui.plan.plan import RankBinding
from so_tui.runs.records import Cpus, RankBindingReport, RankPlacement, StepRecord
from so_tui.trust.text import brief_message
from so_tui.ui import run_status
from so_tui.ui.chart_metrics import STEP_METRICS
from so_tui.ui.charts.drawing import RoleStyles
from so_tui.ui.lines import StyledLines
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, faint, in_rows, shorten
from so_tui.ui.textual_fixes import DrawsPrintable, KeptVertical
from so_tui.ui.widgets import BOTTOM, SIDE, Rule, columns_title, framed, keys
from so_tui.units import duration, percent, plural, rate, significant, thousands

# The dashboard's details at the right of a wide terminal: everything that was recorded of one
# step.


ENTRY = 32
"""Cells of a name and its value."""
VALUE = 14
"""Cells of them for the value."""


class StepDetails(KeptVertical):
    """The step at the cursor, else the newest one."""

    heading = getters.child_by_id("details-rule", Rule)
    lines = getters.query_one("#details", StyledLines)

    def compose(self) -> ComposeResult:
        yield Rule("step", id="details-rule")
        with KeptVertical(classes="frame"):
            yield StyledLines(id="details")

    def show(self, snapshot: Snapshot, width: int) -> None:
        """Show one step of ``snapshot`` in lines of ``width`` cells."""
        inspected = snapshot.hosts.inspected
        record = snapshot.latest if inspected is None else inspected.step
        if record is None:
            missing = "none yet" if inspected is None else "nothing was recorded here"
            self.heading.update("step", missing)
            self.lines.update(Content(""))
            return
        clock = time.strftime("%H:%M:%S", time.localtime(record.time))
        which = "the newest" if inspected is None else "at the cursor"
        self.heading.update(f"step {thousands(record.step)}", f"{clock}, {which}")
        self.lines.update(in_rows(_detail_lines(record, width)))

    @property
    def rows(self) -> int:
        """Rows that the panel takes."""
        return 1 + self.lines.rows + (BOTTOM if framed(self) else 0)


def _detail_lines(record: StepRecord, width: int) -> list[Content]:
    """Return all numbers of a step that a chart can show, as many beside each other as fit into
    ``width`` cells.
    """
    entries = []
    for metric in STEP_METRICS:
        value = getattr(record, metric.fields[0]) if len(metric.fields) == 1 else None
        if value is not None:
            per, unit = metric.shown_in
            whole = isinstance(value, int) and per == 1
            text = f"{thousands(value) if whole else metric.format_value(value / per)} {unit}"
            if unit == "s":
                text = duration(value)
            name = f"{shorten(metric.title, ENTRY - VALUE - 1):<{ENTRY - VALUE}}"
            entries.append(Content.assemble((name, "$faint"), f"{text:<{VALUE}}"))
    rows = -(-len(entries) // max(1, width // ENTRY))
    return [Content("").join(entries[row::rows]) for row in range(rows)]


# The dashboard's header: the run with its progress, and below it what the reader must know right
# now.


MOST_NEWS_ROWS = 3
"""Enough to read in full why a run ended and what to do next."""


class RunHeader(KeptVertical):
    """One row for the run, and up to MOST_NEWS_ROWS for news, which are hidden while there is
    none.
    """

    title = getters.child_by_id("title", StyledLines)
    news = getters.child_by_id("news", StyledLines)

    def compose(self) -> ComposeResult:
        yield StyledLines(id="title")
        yield StyledLines(id="news")

    def show(self, snapshot: Snapshot, now: float, width: int) -> None:
        """Show the run's state in lines of ``width`` cells."""
        self.title.update(run_status.title_line(snapshot, now, width))
        news = Content.assemble(*run_status.news(snapshot))
        self.news.display = bool(news)
        self.news.update(in_rows(news.wrap(width)[:MOST_NEWS_ROWS]))

    @property
    def shown_rows(self) -> int:
        """Rows that the header takes."""
        return 1 + self.news.shown_rows


# Steps as rows of the log: the trainer prints a line for each, whose figures stand in columns here.


_STEP_LINE = re.compile(r"\bstep ([0-9,]{1,20})/[0-9,]+  (loss )?")
"""How the trainer begins what it prints of a step; the loss is first where that is the step itself.
The log is free text: where a line is missing, the one before it is gone to.
"""
COLUMNS = (
    ("time", 8),
    ("step", 9),
    ("loss", 9),
    ("norm", 8),
    ("tok/s", 7),
    ("TFLOPS", 7),
    ("s", 8),
)
"""Names and cells of the columns; those at the right are left out first."""
MOST_STEPS = 2_000
"""Most records of steps that are kept for their rows."""


def _step_of(line: str, *, own: bool = False) -> int | None:
    """Return the step that a line of the log is about, or only where it is the step's ``own``."""
    found = _STEP_LINE.search(line)
    return int(found[1].replace(",", "") or 0) if found and (found[2] or not own) else None


def _columns_in(width: int) -> int:
    """Return how many columns of steps fit into ``width`` cells."""
    ends = accumulate(cells + 1 for _, cells in COLUMNS)
    return sum(end - 1 <= width for end in ends)


def _step_row(record: StepRecord, width: int) -> str:
    """Return the figures of a step in columns, as many as fit."""
    norm = record.gradient_norm
    texts = (
        time.strftime("%H:%M:%S", time.localtime(record.time)),
        thousands(record.step),
        f"{record.loss:.4f}",
        "" if norm is None else significant(norm),
        rate(record.useful_tokens_per_s_total),
        significant(record.model_tflops_per_gpu),
        duration(record.step_s),
    )
    columns = zip(texts, COLUMNS, strict=True)
    return " ".join(f"{text:>{cells}}" for text, (_, cells) in islice(columns, _columns_in(width)))


MOST_LINES = 20_000


class LogView(ScrollView, DrawsPrintable, can_focus=True):
    """The newest MOST_LINES lines, newest last. Long lines scroll where the log is maximised and
    are cut elsewhere.
    """

    ALLOW_MAXIMIZE = True
    ROLES = {
        "line": "$foreground",
        "match": "$foreground on $block-cursor-blurred-background",
        "found": "$block-cursor-foreground on $block-cursor-background",
        "partial": "$faint",
        "bad": "$error",
    }
    BINDINGS = keys("log")
    DEFAULT_CSS = "LogView { height: 1fr; background: $background; }"

    following = reactive(True)
    needle = reactive("")
    """The text whose lines are marked; empty ends the search."""

    def __init__(self) -> None:
        super().__init__(id="log")
        self.lines: list[str] = []
        self.steps: dict[int, StepRecord] = {}
        """Records by step, for the rows of steps."""
        self.partial = ""
        self._found = -1
        self._role_styles = RoleStyles(self.ROLES)

    def clear(self) -> None:
        """Forget every line, for another run, which is followed from its end."""
        self.lines, self.steps, self.partial, self._found = [], {}, "", -1
        self.following = True
        self._resize_content()

    def extend(self, new: Iterable[str], partial: str) -> None:
        """Add lines; ``partial`` is the unfinished last one (a progress bar), replaced each
        time.
        """
        added = [line.expandtabs(4) for line in new]
        if not added and partial == self.partial:
            return
        self.lines += added
        self.partial = partial
        if len(self.lines) > MOST_LINES:
            gone = len(self.lines) - MOST_LINES
            del self.lines[:gone]
            self._found = max(-1, self._found - gone)
        self._resize_content()

    def know(self, records: Sequence[StepRecord]) -> None:
        """Show the figures of these steps in columns."""
        if not records or self.steps.get(records[-1].step) is records[-1]:
            return
        if len(self.steps) > MOST_STEPS:
            self.steps.clear()
        self.steps.update((record.step, record) for record in records)
        self.refresh()

    def _resize_content(self) -> None:
        shown = [*self.lines, self.partial] if self.is_maximized else [""]
        size = Size(max(map(len, shown)), len(self.lines) + bool(self.partial))
        bars = size.height > self.size.height, size.width > self.size.width
        if self.size and bars == (self.show_vertical_scrollbar, self.show_horizontal_scrollbar):
            # More lines behind the same scrollbars: nothing else on the screen moves, so it need
            # not be laid out again.
            self.set_reactive(ScrollView.virtual_size, size)
            self.vertical_scrollbar.window_virtual_size = size.height
            self.horizontal_scrollbar.window_virtual_size = size.width
        else:
            self.virtual_size = size
        if self.following:
            # Forced: before the scroll bar is shown, which comes with the next layout, Textual
            # would not scroll.
            self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True, force=True)
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self.size.height:
            self.following = round(new_value) >= self.max_scroll_y

    def on_resize(self) -> None:
        self._resize_content()
        self._stay_at_end()

    def watch_show_vertical_scrollbar(self) -> None:
        self.vertical_scrollbar.position = (
            self.scroll_y
        )  # Textual keeps it up to date only while the scroll bar is shown

    def watch_show_horizontal_scrollbar(self) -> None:
        self._stay_at_end()  # a row less to show, or one more

    def _stay_at_end(self) -> None:
        if self.following:
            self.call_after_refresh(self.scroll_end, animate=False, immediate=True, x_axis=False)

    def watch_needle(self) -> None:
        self._found = -1
        self.refresh()

    @property
    def matches(self) -> list[int]:
        """Indices of the lines that contain the searched text."""
        wanted = self.needle.lower()
        return [at for at, line in enumerate(self.lines) if wanted and wanted in line.lower()]

    def action_follow(self) -> None:
        self.following = True
        self.scroll_end(animate=False)

    def go_to(self, index: int) -> None:
        """Mark a line and scroll to it."""
        self._found = index
        self.following = False
        self.scroll_to(y=max(0, index - self.size.height // 2), animate=False, immediate=True)
        self.refresh()

    def action_next_match(self, direction: int) -> None:
        """Scroll to the next line with the searched text, from the newest backwards at first."""
        if matches := self.matches:
            before = bisect_left(matches, self._found) - 1
            following = bisect_right(matches, self._found)
            self.go_to(matches[(following if direction > 0 else before) % len(matches)])

    def draw_line(self, y: int) -> Strip:
        scroll_x, scroll_y = self.scroll_offset
        index = scroll_y + y
        width = self.size.width - self.scrollbar_size_vertical
        styles = self._role_styles.get(self)
        base = styles["base"]
        if index < len(self.lines):
            text = self.lines[index]
            if not self.needle and (record := self.steps.get(_step_of(text, own=True) or 0)):
                text = _step_row(record, width)
            low = text.lower()
            role = "bad" if "error" in low or "traceback" in low else "line"
            strip = Strip(self._marked(text, index, styles[role]))
        elif index == len(self.lines) and self.partial:
            strip = Strip([Segment(self.partial, styles["partial"])])
        else:
            return Strip.blank(width, base)
        if self.is_maximized:
            return strip.crop(scroll_x, scroll_x + width).extend_cell_length(width, base)
        if strip.cell_length > width:
            strip = Strip([*strip.crop(0, width - 1), Segment("…", styles["partial"])])
        return strip.adjust_cell_length(width, base)

    def _marked(self, text: str, index: int, style: Style) -> list[Segment]:
        """Return the line with every occurrence of the searched text marked."""
        if not self.needle:
            return [Segment(text, style)]
        mark = self._role_styles.get(self)["found" if index == self._found else "match"]
        parts = re.split(f"({re.escape(self.needle)})", text, flags=re.IGNORECASE)
        return [Segment(part, mark if at % 2 else style) for at, part in enumerate(parts) if part]


# The dashboard's log: its heading, which names the search, and the lines themselves.


class LogPanel(KeptVertical):
    """Follows the end of the log until the reader scrolls up, and goes through the lines that
    contain a text.
    """

    heading = getters.child_by_id("log-rule", Rule)
    lines = getters.query_one("#log", LogView)

    def __init__(self) -> None:
        self._step: float | None = None
        """The step that is shown instead of the end."""
        self._followed = True
        """Whether the end was followed before."""
        super().__init__()

    def compose(self) -> ComposeResult:
        yield Rule("log", id="log-rule")
        with KeptVertical(classes="frame"):
            yield LogView()

    def on_mount(self) -> None:
        for name in ("following", "needle"):
            self.watch(self.lines, name, self._show_heading, init=False)

    def show(self, snapshot: Snapshot) -> None:
        """Add the lines that are new in ``snapshot``."""
        several_hosts = snapshot.hosts.count > 1
        lines = (
            f"{line.host}: {line.text}" if several_hosts else line.text
            for line in snapshot.log_lines
        )
        inspected = snapshot.hosts.inspected
        self.lines.know(snapshot.recent if inspected is None else inspected.around)
        self.lines.extend(lines, snapshot.log_partial)
        self._show_heading()

    def set_rows(self, rows: int) -> None:
        """Show ``rows`` lines, unless the log is maximised."""
        self.lines.styles.height = None if self.lines.is_maximized else rows

    def show_step(self, step: float | None) -> None:
        """Scroll to the line of the last step that was logged up to ``step``; None scrolls back to
        the end if it left it.
        """
        if step == self._step:
            return
        followed = self.lines.following if self._step is None else self._followed
        self._step, self._followed = step, followed
        if step is None:
            if followed:
                self.follow_end()
            return
        reached = (
            index
            for index, line in reversed(list(enumerate(self.lines.lines)))
            if (found := _step_of(line)) is not None and found <= step
        )
        self.lines.go_to(next(reached, 0))

    @on(events.Click, "#log-rule")
    def follow_end(self) -> None:
        """Scroll to the newest line and stay there."""
        self.lines.action_follow()

    def _show_heading(self) -> None:
        log = self.lines
        text = "following" if log.following else "paused, f or a click here follows"
        if not log.needle:
            title = "log"
            if log.steps:
                ends = accumulate(cells + 1 for _, cells in COLUMNS)
                names = zip(ends, COLUMNS, strict=True)
                labels = [(end - 1 - len(name), name) for end, (name, _) in names][1:]
                fitting = labels[: max(0, _columns_in(log.size.width) - 1)]
                title = columns_title(
                    "log", fitting, SIDE if framed(self) else 0, self.heading.size.width
                )
            self.heading.update(title, text)
            return
        found = f"{plural(len(log.matches), 'line')} with “{log.needle}”"
        through = f"{found}, n and N go through them"
        self.heading.update("log", f"{text}   {through}", through, found, text)


# The dashboard's view of where each rank really is: its cores, its memory, and what is wrong with
# either.


FEW_ROWS = 30
"""Rows of a terminal below which only problems are shown."""
MOST_ROWS = 8
LONGEST_LIST = 40
"""Characters of a list of cores."""


class PlacementPanel(StyledLines):
    """A line for each misplaced rank, and one for all others."""

    _shown: tuple[object, ...] = ()
    """What the lines say."""

    def show(self, snapshot: Snapshot, width: int, height: int) -> None:
        """Show the newest placement in lines of ``width`` cells, in a terminal of ``height``
        rows.
        """
        planned = snapshot.plan and snapshot.plan.binding
        shown = snapshot.hosts.placement, snapshot.hosts.ranks, planned, width, height
        if shown == self._shown:  # placement is sampled much more rarely than everything else
            return
        self._shown = shown
        lines = _placement_lines(snapshot, height)[:MOST_ROWS]
        self.display = bool(lines)
        self.update(in_rows(line.truncate(width, ellipsis=True) for line in lines))


def _placement_lines(snapshot: Snapshot, height: int) -> list[Content]:
    """Return the lines about the placement of ranks, those with problems first."""
    placed = {place.rank: place for place in snapshot.hosts.placement}
    reports = {report.rank: report for report in snapshot.hosts.ranks}
    planned = snapshot.plan.binding if snapshot.plan is not None else ()
    # Ranks of other hosts are not in the plan: they should be where they were bound.
    ranks: dict[int, _Bound] = {**reports, **{rank.rank: rank for rank in planned}}
    wrong: list[Content] = []
    right: list[RankPlacement] = []
    shares: list[float] = []
    for number, rank in ranks.items():
        name, place = _rank_name(number, rank.gpu), placed.get(number)
        if problems := list(_problems(place, rank, reports.get(number))):
            wrong.append(Content.assemble((f"✗ {name}  ", "$error"), "; ".join(problems)))
        elif place is not None:
            right.append(place)
            shares += [share] if (share := share_on_nodes(place, _nodes(rank))) is not None else []
    if not right or height < FEW_ROWS:
        return wrong
    memory = ""
    if shares:
        least = percent(min(shares))
        most = "all" if least == percent(1.0) else f"at least {least}"
        memory = f", {most} of their memory on their nodes"
    good = faint(f"✓ {plural(len(right), 'rank')} on the planned cores{memory}")
    if nice := max(place.nice for place in right):
        priority = f", nice {nice}" if nice < IDLE_NICE else ", idle priority"
        good = Content.assemble(good, (priority, "$warning"))
    return [*wrong[: MOST_ROWS - 1], good]


def _rank_name(rank: int, gpu: int | None) -> str:
    """Return ``rank 0 · GPU 0``, or ``rank 0``."""
    return f"rank {rank}" if gpu is None else f"rank {rank} · GPU {gpu}"


_Bound = RankBindingReport | RankBinding
"""Where a rank should be."""


def _nodes(rank: _Bound) -> Cpus:
    """Return the NUMA nodes of a rank's memory: none where any node will do, or only another host's
    plan knows.
    """
    return rank.memory_policy.nodes if isinstance(rank, RankBinding) else ()


def _problems(
    place: RankPlacement | None, planned: _Bound, report: RankBindingReport | None
) -> Iterator[str]:
    if report is not None and report.problem:
        yield f"could not be bound: {brief_message(report.problem)}"
    if place is None:
        return
    if misplaced(place, planned.cpus, planned.main_cpus):
        cores = _listed({*place.cpus, *place.adam_cpus})
        yield f"may run on cores {cores}, planned {_listed(planned.cpus)}"
    nodes = _nodes(planned)
    share = share_on_nodes(place, nodes)
    if share is not None and share < LEAST_OWN_SHARE:
        rest = {node for node, size in place.node_bytes.items() if size}.difference(nodes)
        there = f"{percent(share)} of its memory is on node {_listed(nodes)}"
        yield f"{there}, the rest on {_listed(rest)}"


def _listed(numbers: set[int] | Cpus) -> str:
    return shorten(cpu_ranges(numbers), LONGEST_LIST) or "none"
