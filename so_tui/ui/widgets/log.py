"""The run's log: follows its end until the reader scrolls up, and can be searched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar
from textual.strip import Strip

from so_tui.ui.printable import DrawsPrintable

MOST_LINES = 20_000


def thumb_top(rows: int, lines: int) -> int:
    """Return where the thumb of a scroll bar begins while ``lines`` are followed through ``rows``, in eighths of a cell."""
    return int((rows - max(1.0, rows * rows / max(1, lines))) * 8)


class LogView(ScrollView, DrawsPrintable, can_focus=True):
    """The newest MOST_LINES lines, newest last. Long lines scroll where the log is maximised and are cut elsewhere."""

    ALLOW_MAXIMIZE = True
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "log--line",
        "log--match",
        "log--found",
        "log--partial",
        "log--bad",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("end", "follow", "Follow", show=False),
        Binding(
            "n",
            "next_match(1)",
            "Next match",
            show=False,
            id="next-match",
            tooltip="Next line with the searched text",
        ),
        Binding(
            "N",
            "next_match(-1)",
            "Previous match",
            show=False,
            id="previous-match",
            tooltip="Line before with the searched text",
        ),
    ]
    DEFAULT_CSS = """
    LogView {
        height: 1fr; background: $background;
        .log--line { color: $foreground; }
        .log--partial { color: $faint; }
        .log--bad { color: $error; }
        .log--match { background: $block-cursor-blurred-background; color: $foreground; }
        .log--found { background: $block-cursor-background; color: $block-cursor-foreground; }
    }
    """

    following = reactive(True)
    needle = reactive("")

    class Moved(Message):
        """Following began or ended, or the search changed."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.lines: list[str] = []
        self.partial = ""
        self._widest = 0
        self._found = -1
        self._styles: dict[str, Style] = {}

    def notify_style_update(self) -> None:
        self._styles = {}
        super().notify_style_update()

    def clear(self) -> None:
        """Forget every line, for another run, which is followed from its end."""
        self.lines, self.partial, self._found, self._widest = [], "", -1, 0
        self.following = True
        self._resize_content()

    def extend(self, new: Iterable[str], partial: str) -> None:
        """Add lines; ``partial`` is the unfinished last one (a progress bar), replaced each time."""
        added = [line.expandtabs(4) for line in new]
        if not added and partial == self.partial:
            return
        self.lines += added
        self.partial = partial
        if len(self.lines) > MOST_LINES:
            gone = len(self.lines) - MOST_LINES
            del self.lines[:gone]
            self._found = max(-1, self._found - gone)
        self._widest = max(self._widest, max(map(len, [*added, partial]), default=0))
        self._resize_content()

    def _resize_content(self) -> None:
        size = Size(self._widest if self.is_maximized else 0, len(self.lines) + bool(self.partial))
        bars = size.height > self.size.height, size.width > self.size.width
        if self.size and bars == (self.show_vertical_scrollbar, self.show_horizontal_scrollbar):
            # More lines behind the same scrollbars: nothing else on the screen moves, so it need not be laid out again.
            before = self.virtual_size.height
            self.set_reactive(ScrollView.virtual_size, size)
            if bars[0]:
                self._move_thumb(before, size.height)
            if bars[1]:
                self.horizontal_scrollbar.window_virtual_size = size.width
        else:
            self.virtual_size = size
        if self.following:
            # Forced: before the scroll bar is shown, which comes with the next layout, Textual would not scroll.
            self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True, force=True)
        self.refresh()

    def _move_thumb(self, before: int, after: int) -> None:
        """Update the scroll bar, and repaint it only where it changes visibly, which is rare in a long log."""
        scrollbar = self.vertical_scrollbar
        if not self.following:
            scrollbar.window_virtual_size = after
            return
        scrollbar.set_reactive(ScrollBar.window_virtual_size, after)
        scrollbar.set_reactive(ScrollBar.position, float(self.max_scroll_y))
        if thumb_top(self.size.height, before) != thumb_top(self.size.height, after):
            scrollbar.refresh()

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

    def watch_following(self) -> None:
        self.post_message(self.Moved())

    def watch_needle(self) -> None:
        self._found = -1
        self.refresh()
        self.post_message(self.Moved())

    @property
    def matches(self) -> int:
        """Number of lines that contain the searched text."""
        wanted = self.needle.lower()
        return sum(wanted in line.lower() for line in self.lines) if wanted else 0

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
        wanted = self.needle.lower()
        if not wanted or not self.lines:
            return
        count = len(self.lines)
        start = self._found if self._found >= 0 else (-1 if direction > 0 else count)
        for distance in range(1, count + 1):
            index = (start + direction * distance) % count
            if wanted in self.lines[index].lower():
                self.go_to(index)
                return

    def draw_line(self, y: int) -> Strip:
        scroll_x, scroll_y = self.scroll_offset
        index = scroll_y + y
        width = self.size.width - self.scrollbar_size_vertical
        if not self._styles:
            self._styles = {
                name: self.get_component_rich_style(name) for name in self.COMPONENT_CLASSES
            } | {"base": self.rich_style}
        base = self._styles["base"]
        if index < len(self.lines):
            text = self.lines[index]
            low = text.lower()
            style = self._styles[
                "log--bad" if "error" in low or "traceback" in low else "log--line"
            ]
            strip = Strip(self._marked(text, low, index, style))
        elif index == len(self.lines) and self.partial:
            strip = Strip([Segment(self.partial, self._styles["log--partial"])])
        else:
            return Strip.blank(width, base)
        if self.is_maximized:
            return strip.crop(scroll_x, scroll_x + width).extend_cell_length(width, base)
        if strip.cell_length > width:
            strip = Strip([*strip.crop(0, width - 1), Segment("…", self._styles["log--partial"])])
        return strip.adjust_cell_length(width, base)

    def _marked(self, text: str, low: str, index: int, style: Style) -> list[Segment]:
        """Return the line with every occurrence of the searched text marked."""
        wanted = self.needle.lower()
        segments: list[Segment] = []
        at = 0
        mark = self._styles["log--found" if index == self._found else "log--match"]
        while wanted and (found := low.find(wanted, at)) >= 0:
            segments += [
                Segment(text[at:found], style),
                Segment(text[found : found + len(wanted)], mark),
            ]
            at = found + len(wanted)
        segments.append(Segment(text[at:], style))
        return segments
