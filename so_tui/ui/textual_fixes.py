"""Keys act one after the other, however many arrive at once: over a slow connection, or while the machine is busy.

Textual sends a key to the widget with the focus, from where an unused one comes back through all widgets around it before it is a command.
Letters that were typed after a ``/`` have then gone to the screen, too: they would be lost, or be commands themselves.
"""

from __future__ import annotations

import asyncio
import gc
import select
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO, TypeVar

from rich.cells import get_character_cell_size
from rich.segment import Segment
from textual import events
from textual.app import App
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.dom import DOMNode
from textual.filter import ANSIToTruecolor, LineFilter
from textual.geometry import Region
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from so_tui.trust.streams import console
from so_tui.trust.text import printable, same_cells

# Keep the finished lines of widgets that do not change.
#
# Textual asks every widget on the screen for all of its lines whenever a cell of the screen is
# painted. It caches their content, but looks up their colours, sizes and filters each time, for
# containers as well: on the dashboard that was a sixth of the time of a frame.


class KeepsLines(Widget):
    """A widget whose lines are made again only once it was refreshed, resized or styled anew, wholly or in part."""

    _kept: tuple[Region, list[Strip]] | None = None
    """Part of the widget that was asked for last, and its lines."""

    def _set_dirty(self, *regions: Region) -> None:
        # Everything that changes a widget's lines comes through here: Textual's own cache of their content depends on it in the same way.
        self._kept = None
        super()._set_dirty(*regions)

    def render_lines(self, crop: Region) -> list[Strip]:
        kept = self._kept
        if kept is None or kept[0] != crop:
            kept = self._kept = (crop, super().render_lines(crop))
        return kept[1]


class KeptVertical(Vertical, KeepsLines):
    """A container of widgets under each other."""


class KeptScroll(VerticalScroll, KeepsLines):
    """The same, which scrolls."""


# Memory: what lives as long as the application, and what was freed and is kept by the C library
# for later.


_THRESHOLDS = (10_000, 20, 20)
"""A frame makes hundreds of objects, nearly all of which are freed without the collector. With Python's own 700 it took 7 % of the time."""


def settle() -> None:
    """Keep the garbage collector from what exists by now, which lives as long as the application.

    Looking through all of it every eight seconds took 14 % of the time of a dashboard.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    give_back()


def give_back() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps what reading a long run took for a moment."""
    import ctypes  # takes a mebibyte, and short runs do without

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


# Style what changed. Textual styles more, which in a form of five hundred widgets takes longer
# than all the rest of a key press.


Result = TypeVar("Result")


class StylesMounted(App[Result]):
    """An application that styles widgets once they are mounted.

    Textual does so as well each time that one gets a class while it is made, a few times for each field of the form.
    """

    def update_styles(self, node: DOMNode, animate: bool = True) -> None:
        if node.parent is not None or not isinstance(node, Widget):
            super().update_styles(node, animate)


class StylesFocus(Screen[Result]):
    """A screen that styles anew, where the focus goes, what rules with ``:focus-within`` are about.

    Textual styles the whole panel, or both panels.
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


# Let only printable characters reach the terminal and the clipboard, whatever text from elsewhere
# contains.


class DrawsPrintable(KeepsLines):
    """A widget that makes its lines itself, and not of ``Content``. They are checked once more, and copied only where they are unsafe.

    Its colours are those of a theme. A line filter of Textual would check all widgets, but it copies each line: the dashboard cost 1.7
    times as much with one.
    """

    def draw_line(self, y: int) -> Strip:
        """Return one line of the content."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        strip = self.draw_line(y)
        return strip if _is_printable(strip) else Strip(_replaced(strip), strip.cell_length)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the application's filters without the one that translates the terminal's own 16 colours: there are none here."""
        return [
            filter
            for filter in super().get_line_filters()
            if not isinstance(filter, ANSIToTruecolor)
        ]


def _is_printable(segments: Iterable[Segment]) -> bool:
    return "".join([segment.text for segment in segments]).isprintable()


def _replaced(segments: Iterable[Segment]) -> list[Segment]:
    return [
        Segment(same_cells(text, get_character_cell_size), style, control)
        for text, style, control in segments
    ]


class PrintableApp(StylesMounted[Result]):
    """An application whose lines, clipboard and last words hold only printable text.

    ``Content`` of so_tui.ui.text spells out unsafe characters in what its widgets show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error_console = console(stderr=True)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy a text as it is shown: pasted into a terminal, a control character would act there."""
        super().copy_to_clipboard(printable(text))


LONGEST_WAIT_S = 2.0
"""For a widget that is busy: then the next key acts, even if that one has not acted yet."""


async def _caught_up(pump: MessagePump) -> None:
    """Wait until a widget has handled the messages that it has now."""
    done = asyncio.Event()
    if pump.call_later(done.set):
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), LONGEST_WAIT_S)


class KeysInOrder(PrintableApp[Result]):
    """An application in which each key finds what those before it have done: the screen that they opened, the field that they went to."""

    _settled_screen: Screen[object] | None = None
    """The screen that has opened, and has given the focus to its first widget."""

    def get_key_display(self, binding: Binding) -> str:
        """Return a key as keyboards name it: F5."""
        shown = super().get_key_display(binding)
        return shown.upper() if shown[1:].isdecimal() else shown

    async def on_event(self, event: events.Event) -> None:
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
        typing = focused is not None and focused.check_consume_key("a", "a")
        around = (
            [node for node in focused.ancestors_with_self if node is not self]
            if focused is not None and typing
            else []
        )
        for field in around[:1]:
            await _caught_up(field)  # with the letters that were typed before
        if event.key == "escape":
            self.screen.clear_selection()
        # What Textual does once a key has come back from all widgets around the one with the focus.
        if not await self._check_bindings(event.key, priority=True):
            await self._check_bindings(event.key)
        for widget in around:
            await _caught_up(widget)  # with what the key made the field say: that it was submitted


# Whether the terminal of the screen is still there.


def terminal_lost(terminal: TextIO | None) -> bool:
    """Return whether nobody holds the other end of a terminal any more: its window was closed, or its connection lost."""
    if terminal is None or terminal.closed:
        return True
    watch = select.poll()
    watch.register(terminal.fileno(), 0)  # POLLHUP and POLLERR are always reported
    return bool(watch.poll(0))
