"""Everything here works around Textual, so that the rest of the screen is written as if it needed
no help.

Each class and function says what Textual does and what that costs. All were needed with Textual
8.2.8, and no released version makes one of them unnecessary. ``_set_dirty``,
``_update_focus_styles``, ``_check_bindings`` and ``XTermParser`` are private to Textual, which is
why pyproject.toml allows no newer major version.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import TextIO, TypeVar

from rich.cells import cell_len, get_character_cell_size
from rich.segment import Segment
from rich.text import Text
from textual import events
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.dom import DOMNode
from textual.drivers import linux_driver
from textual.drivers._writer_thread import WriterThread
from textual.filter import ANSIToTruecolor, LineFilter
from textual.geometry import Region
from textual.message import Message
from textual.message_pump import MessagePump
from textual.notifications import Notify
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import DataTable

from so_tui.trust.streams import console
from so_tui.trust.text import printable, same_cells

Result = TypeVar("Result")

# Drawing: lines that are kept, checked, and repainted in part.


class CachedLinesMixin(Widget):
    """A widget whose lines are made again only once it was refreshed, resized or styled anew,
    wholly or in part.

    Textual asks every widget on the screen for all of its lines whenever a cell of the screen is
    painted. It caches their content, but looks up their colours, sizes and filters each time, for
    containers as well: on the dashboard that was a sixth of the time of a frame. Unnecessary once
    Textual caches finished lines.
    """

    _kept: tuple[Region, list[Strip]] | None = None
    """Part of the widget that was asked for last, and its lines."""

    def _set_dirty(self, *regions: Region) -> None:
        # Everything that changes a widget's lines comes through here: Textual's own cache of their
        # content depends on it in the same way.
        self._kept = None
        super()._set_dirty(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        kept = self._kept
        if kept is None or kept[0] != crop:
            kept = self._kept = (crop, super().render_lines(crop))
        return kept[1]


class KeptVertical(Vertical, CachedLinesMixin):
    """A container of widgets under each other."""


class KeptScroll(VerticalScroll, CachedLinesMixin):
    """The same, which scrolls."""


class DrawsPrintable(CachedLinesMixin):
    """A widget that makes its lines itself, and not of ``Content``. They are checked once more, and
    copied only where they are unsafe.

    Its colours are those of a theme. A line filter of Textual would check all widgets, but it
    copies each line: the dashboard cost 1.7 times as much with one. Unnecessary once Textual draws
    no control characters.
    """

    def draw_line(self, y: int) -> Strip:
        """Return one line of the content."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        strip = self.draw_line(y)
        if "".join([segment.text for segment in strip]).isprintable():
            return strip
        safe = [
            Segment(same_cells(text, get_character_cell_size), style, control)
            for text, style, control in strip
        ]
        return Strip(safe, strip.cell_length)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the application's filters without the one that translates the terminal's own 16
        colours: there are none here.
        """
        return [
            filter
            for filter in super().get_line_filters()
            if not isinstance(filter, ANSIToTruecolor)
        ]


class DrawnRowsMixin(DrawsPrintable):
    """A widget that draws all of its rows once for each change, and then repaints only the cells
    that differ.

    Textual repaints whole widgets, which costs more than drawing them, and a terminal may be far
    away. Unnecessary once Textual compares what it paints with what is on the screen.
    """

    _strips: Sequence[Strip] = ()
    _drawn: tuple[object, ...] = ()
    """What the strips were drawn for; empty before they are drawn again."""

    def draw_rows(self) -> list[Strip]:
        """Return all rows of the content."""
        raise NotImplementedError

    def row_key(self) -> tuple[object, ...]:
        """Return what the rows depend on besides the data."""
        return self.outer_size, self.has_focus, self.app.theme

    def repaint(self) -> None:
        """Draw other data now, and repaint the cells that changed."""
        if self._drawn != self.row_key():
            self.redraw()
            return
        before, self._strips = self._strips, self.draw_rows()
        width = self._strips[0].cell_length if self._strips else self.size.width
        if regions := _changed_parts(before, self._strips, width):
            self.refresh(*regions)  # without a region, everything would be painted

    def redraw(self, *, layout: bool = False) -> None:
        """Draw and paint everything again."""
        self._drawn = ()
        self.refresh(layout=layout)

    def notify_style_update(self) -> None:
        self._drawn = ()
        super().notify_style_update()

    def draw_line(self, y: int) -> Strip:
        if self._drawn != (key := self.row_key()):
            self._strips, self._drawn = self.draw_rows(), key
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self.rich_style)


def _changed_parts(before: Sequence[Strip], after: Sequence[Strip], width: int) -> list[Region]:
    """Return of each row that differs the part from its first to its last cell that does;
    everything where the number of rows differs.
    """
    if len(before) != len(after):
        return [Region(0, 0, width, max(len(before), len(after)))]
    regions = []
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is not new and old != new:
            start = _same_cells(old, new)
            end = max(start + 1, width - _same_cells(old, new, -1))
            regions.append(Region(start, row, end - start, 1))
    return regions


def _same_cells(old: Strip, new: Strip, step: int = 1) -> int:
    """Return how many cells two rows have in common at their beginning, or with ``step`` -1 at
    their end.
    """
    same = 0
    for was, now in zip(list(old)[::step], list(new)[::step], strict=False):
        if was != now:
            if was.style == now.style:
                texts = was.text[::step], now.text[::step]
                same += cell_len(commonprefix(texts))  # noqa: RUF071 - it is by characters
            break
        same += now.cell_length
    return same


# Styles.


class StylesFocus(Screen[Result]):
    """A screen that styles anew, where the focus goes, what rules with ``:focus-within`` are about.

    Textual styles the whole panel, or both panels: in a form of five hundred widgets that takes
    longer than all the rest of a key press. Unnecessary once Textual finds the nodes that such
    rules are about.
    """

    def _update_focus_styles(
        self, focused: Widget | None = None, blurred: Widget | None = None
    ) -> None:
        paths = [
            widget.ancestors_with_self[-2::-1] if widget is not None else []
            for widget in (focused, blurred)
        ]  # from the screen on
        shared = sum(
            1 for one, other in zip(*paths, strict=False) if one is other
        )  # have the focus within them as before
        changed = {
            node
            for path in paths
            for top in path[shared : shared + 1]
            for node in top.walk_children(with_self=True)
        }
        self.app.stylesheet.update_nodes(
            [node for node in changed if node._has_focus_within], animate=True
        )


# The terminal: what is pasted is text, and a terminal that is gone holds nobody up.

_PASTE, _PASTED = "\x1b[200~", "\x1b[201~"


class _Parser(XTermParser):
    """Reads what a terminal sends, and takes a paste for text alone. Textual takes escape sequences
    in it for keys, so that a pasted log could delete a run.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pastes = False
        self._held = ""
        """The end of what was read, which may be the beginning of the end of the paste."""
        self._before = ""
        """The end of what was passed on, which may be the beginning of a paste's."""

    def feed(self, data: str) -> Iterable[Message]:
        passed = self._without_escapes(data)
        # Nothing would stand for the end of all input.
        return super().feed(passed) if passed or not data else ()

    def _without_escapes(self, data: str) -> str:
        passed = ""
        data, self._held = self._held + data, ""
        while data:
            if not self._pastes:
                begun, found, _ = (self._before + data).partition(_PASTE)
                through = len(begun + found) - len(self._before)
                passed, data = passed + data[:through], data[through:]
                self._before = "" if found else (begun + found)[1 - len(_PASTE) :]
                self._pastes = bool(found)
                continue
            text, found, after = data.partition(_PASTED)
            if not found:
                cut = [size for size in range(1, len(_PASTED)) if text.endswith(_PASTED[:size])]
                kept = len(text) - max(cut, default=0)
                text, self._held = text[:kept], text[kept:]
            passed, data = passed + text.replace("\x1b", "") + found, after
            self._pastes = not found
        return passed


class _Writer(WriterThread):
    """Takes what is drawn even when the terminal is gone. Textual's thread ends with the first
    write that fails, and a screen that goes on drawing then waits for it for ever.
    """

    _ending = False

    def run(self) -> None:
        try:
            super().run()
        except OSError:
            while not (self._ending and self._queue.empty()):
                self._queue.get()

    def stop(self) -> None:
        self._ending = True
        super().stop()


_NAMES = vars(linux_driver)
for _theirs, _ours in ((XTermParser, _Parser), (WriterThread, _Writer)):
    assert _NAMES[_theirs.__name__] is _theirs, f"Textual's driver has another {_theirs.__name__}"
    _NAMES[_theirs.__name__] = _ours


# The application: styles, keys in their order, printable text.

_TERMINAL_POLL_S = 5.0
LONGEST_WAIT_S = 2.0
"""For a widget that is busy: then the next key acts, even if that one has not acted yet."""


async def _caught_up(pump: MessagePump) -> None:
    """Wait until a widget has handled the messages that it has now."""
    done = asyncio.Event()
    if pump.call_later(done.set):
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), LONGEST_WAIT_S)


class FixedApp(App[Result]):
    """An application that draws printable text, styles each widget once, lets keys act one after
    the other, and ends with its terminal.

    ``Content`` of so_tui.ui.text spells out unsafe characters in what its widgets show.
    """

    _settled_screen: Screen[object] | None = None
    """The screen that has opened, and has given the focus to its first widget."""

    def __init__(self) -> None:
        super().__init__()
        self.error_console = console(stderr=True)  # its last words are printable, too

    def on_mount(self) -> None:
        self.set_interval(_TERMINAL_POLL_S, self._leave_a_lost_terminal)

    def _leave_a_lost_terminal(self) -> None:
        """End if the terminal is gone and no SIGHUP said so (``nohup``, some shells): Textual would
        read it for ever.
        """
        if not self.is_headless and _terminal_lost(sys.__stdin__):
            self.exit()

    def on_notify(self, event: Notify) -> None:
        """Remove earlier notes before another is shown: Textual piles them up, over what they
        cover. Warnings and errors stay until their time is over.
        """
        for note in list(self._notifications):
            if note.severity == "information" == event.notification.severity:
                self._unnotify(note)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy a text as it is shown: pasted into a terminal, a control character would act
        there.
        """
        super().copy_to_clipboard(printable(text))
        if "TMUX" in os.environ and not self.is_headless:
            self.run_worker(self._copy_in_tmux(printable(text)), group="copy", exit_on_error=False)

    async def _copy_in_tmux(self, text: str) -> None:
        """Copy a text into tmux's buffer: by default, tmux ignores what programs send to the
        clipboard.
        """
        line = ("tmux", "load-buffer", "-w", "-")
        quiet = asyncio.subprocess.DEVNULL
        try:
            tmux = await asyncio.create_subprocess_exec(
                *line, stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet
            )
            await tmux.communicate(text.encode())
            failed = tmux.returncode != 0
        except OSError:
            failed = True
        if failed:
            self.notify(
                f"Select it here with the mouse: {text}",
                title="tmux has not taken it",
                severity="warning",
                markup=False,
                timeout=30,
            )

    def update_styles(self, node: DOMNode, animate: bool = True) -> None:
        """Style widgets once they are mounted.

        Textual does so as well each time that one gets a class while it is made, a few times for
        each field of a form.
        """
        if node.parent is not None or not isinstance(node, Widget):
            super().update_styles(node, animate)

    def get_key_display(self, binding: Binding) -> str:
        """Return a key as keyboards name it: F5."""
        shown = super().get_key_display(binding)
        return shown.upper() if shown[1:].isdecimal() else shown

    async def on_event(self, event: events.Event) -> None:
        """Let each key find what those before it have done: the screen that they opened, the field
        that they went to.

        Many arrive at once over a slow connection, or while the machine is busy. Textual sends a
        key to the widget with the focus, from where an unused one comes back through all widgets
        around it before it is a command. Letters that were typed after a ``/`` have then gone to
        the screen, too: they would be lost, or be commands themselves. Unnecessary once Textual
        handles one key at a time.
        """
        if isinstance(event, events.Key) and not event.is_forwarded:
            await self._take(event)
        else:
            await super().on_event(event)

    async def _take(self, event: events.Key) -> None:
        """Give a key to the field that takes it, or carry out what it is bound to now."""
        if self.screen is not self._settled_screen:
            await _caught_up(self.screen)
            self._settled_screen = self.screen
        focused = self.focused
        minimizes = event.key == "escape" and self.screen.maximized is not None
        if minimizes or (
            focused is not None and focused.check_consume_key(event.key, event.character)
        ):
            await super().on_event(event)
            return
        self.app_focus = True
        around: list[DOMNode] = []  # the field that is typed into, and what it is in
        if focused is not None and focused.check_consume_key("a", "a"):
            around = focused.ancestors_with_self[:-1]
        for field in around[:1]:
            await _caught_up(field)  # with the letters that were typed before
        if event.key == "escape":
            self.screen.clear_selection()
        # What Textual does once a key has come back from all widgets around the one with the focus.
        if not await self._check_bindings(event.key, priority=True):
            await self._check_bindings(event.key)
        for widget in around:
            await _caught_up(widget)  # with what the key made the field say: that it was submitted


# Widgets.


class FittedTable(DataTable[Text]):
    """A table whose columns are as wide as what is in them from the first drawing on.

    Textual measures columns when it is idle, and goes on showing rows that were drawn before that,
    as wide as the titles. Unnecessary once it draws them again.
    """

    def fill(
        self,
        titles: Sequence[str],
        rows: Sequence[tuple[str, Sequence[Text]]],
        widths: Mapping[str, int] | None = None,
    ) -> None:
        """Show other columns and rows.

        Args:
            titles: Title of each column.
            rows: Key and cells of each row.
            widths: Least cells of columns, by title; what is in them is never cut.
        """
        self.clear(columns=True)
        for index, title in enumerate(titles):
            fitting = max([cell_len(title), *(cells[index].cell_len for _, cells in rows)])
            self.add_column(title, width=max(fitting, (widths or {}).get(title, 0)))
        for key, cells in rows:
            self.add_row(*cells, key=key)


# Memory and terminal.

_THRESHOLDS = (10_000, 20, 20)
"""A frame makes hundreds of objects, nearly all of which are freed without the collector. With
Python's own 700 it took 7 % of the time.
"""


def settle() -> None:
    """Keep the garbage collector from what exists by now, which lives as long as the application.

    Looking through all of it every eight seconds took 14 % of the time of a dashboard.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    give_back()


def give_back() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps what reading a long
    run took for a moment.
    """
    import ctypes  # takes a mebibyte, and short runs do without

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _terminal_lost(terminal: TextIO | None) -> bool:
    """Return whether nobody holds the other end of a terminal any more: its window was closed, or
    its connection lost.
    """
    if terminal is None or terminal.closed:
        return True
    watch = select.poll()
    watch.register(terminal.fileno(), 0)  # POLLHUP and POLLERR are always reported
    return bool(watch.poll(0))
