"""The bottom line: the keys in force. It is one widget; Textual's Footer, one per key, would cost
more than the rest of the first paint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import toml
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.keys import REPLACED_KEYS, key_to_character
from textual.message import Message
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Input

from so_tui.ui.text import Content, faint
from so_tui.ui.textual_fixes import CachedLinesMixin

_KEYS = toml.decode(
    Path(__file__).with_name("keys.toml").read_bytes(), type=dict[str, list[dict[str, Any]]]
)


def keys(*names: str) -> list[BindingType]:
    """Return the bindings of these tables of ``keys.toml``, in their order."""
    return [Binding(**key) for name in names for key in _KEYS[name]]


# Frames around panels: rounded lines with the panel's title on the left of the upper one, and its
# key figure on the right.
#
# Small terminals have none (``-narrow``, ``-short``): there a panel has its title line only.


SIDE = 1
"""Cells of a frame at the left and at the right."""
BOTTOM = 1
"""Rows of a frame below what it surrounds. The upper line is the panel's title line, which stands
there without a frame too.
"""


def framed(widget: Widget) -> bool:
    """Return whether the panels of a widget's screen have frames."""
    screen = widget.screen
    return not (screen.has_class("-narrow") or screen.has_class("-short"))


# The field that ``/`` opens: for the text that a table is filtered by, or that a log is searched
# for.


class FindField(Input):
    """Hidden until it is opened. Posts ``Input.Changed`` while something is typed,
    ``Input.Submitted`` on enter.
    """

    BINDINGS = keys("find")

    DEFAULT_CSS = """
    FindField {
        display: none;
        /* Not a margin, which would narrow the widgets beside it, too. */
        &.-textual-compact { padding: 0 1; }
    }
    """

    def __init__(self, placeholder: str, *, id: str | None = None) -> None:
        super().__init__(placeholder=placeholder, compact=True, id=id)

    @property
    def needle(self) -> str:
        """The text to look for, in small letters."""
        return self.value.strip().lower()

    def open(self) -> None:
        """Show the field and give it the keyboard."""
        self.display = True
        self.screen.set_focus(self)

    def close(self) -> bool:
        """Empty and hide the field; return whether it was open."""
        was_open = bool(self.display)
        self.value = ""
        self.display = False
        return was_open


# Lines between panels that are pulled with the mouse.


class Grip(CachedLinesMixin):
    """A line that says how far it is pulled; the screen, which owns the sizes of panels,
    answers.
    """

    ALLOW_SELECT = False
    upright = False
    _from: int | None = None
    """Where it was grasped; None while it is not."""

    @dataclass
    class Pulled(Message):
        """The line was pulled by ``cells``, down or to the right, since it was grasped; ``done``
        once it is let go.
        """

        grip: Grip
        cells: int
        done: bool

    def _at(self, event: events.MouseEvent) -> int:
        return int(event.screen_x if self.upright else event.screen_y)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._from = self._at(event)
        self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._from is not None:
            self.post_message(self.Pulled(self, self._at(event) - self._from, done=False))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._from is not None:
            self.release_mouse()
            self.post_message(self.Pulled(self, self._at(event) - self._from, done=True))
            self._from = None


class Divider(Grip):
    """A line from top to bottom."""

    upright = True
    DEFAULT_CSS = """
    Divider { width: 1; height: 100%; color: $background; &:hover { color: $accent; } }
    """

    def render_line(self, y: int) -> Strip:
        return Strip([Segment("│", self.rich_style)], 1)


GAP = 2
_KEY = "key"
"""Marks the cells that stand for a key."""


class KeyLine(CachedLinesMixin):
    """Keys in force, as many as fit; each can be clicked. The palette, which has them all, is
    always there.
    """

    DEFAULT_CSS = """
    KeyLine { dock: bottom; height: 1; padding: 0 1; background: $footer-background; }
    """

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.refresh())

    def render(self) -> Content:
        right = _item("^p", "commands", "ctrl+p")
        items = [
            (binding, _item(self._shown(binding), binding.description, binding.key))
            for binding in self._bindings_to_show()
        ]
        last = getattr(self.screen, "last_actions", ())
        items.sort(key=lambda item: item[0].action in last)
        fitting = _fitting(items, self.size.width - right.cell_length - GAP)
        line = Content(" " * GAP).join(item for _, item in fitting)
        gap = max(0, self.size.width - line.cell_length - right.cell_length)
        return line + " " * gap + right

    @property
    def _typing(self) -> bool:
        return isinstance(self.screen.focused, Input)

    def _bindings_to_show(self) -> Iterator[Binding]:
        """Yield each action once; in a text field only keys that type nothing, and the way out of
        it.
        """
        seen: set[str] = set()
        for active in self.screen.active_bindings.values():
            binding = active.binding
            of_use = binding.show
            if self._typing:
                character = key_to_character(REPLACED_KEYS.get(binding.key, binding.key))
                types = character is not None and character.isprintable()
                of_use = (of_use and not types) or binding.key == "escape"
            if of_use and active.enabled and binding.description and binding.action not in seen:
                seen.add(binding.action)
                yield binding

    def _shown(self, binding: Binding) -> str:
        if binding.key == "enter":
            return "enter"
        if self._typing:  # a display for several keys would name some that type text
            binding = replace(binding, key_display=None)
        return self.app.get_key_display(binding)

    def on_click(self, event: events.Click) -> None:
        if key := event.style.meta.get(_KEY):
            self.app.simulate_key(key)


Item = tuple[Binding, Content]


def _fitting(items: Sequence[Item], room: int) -> list[Item]:
    """Return the items that fit into ``room`` cells, in their order; ``quit`` has room first."""
    fitted = []
    for pair in sorted(items, key=lambda pair: pair[0].action != "quit"):
        if pair[1].cell_length <= room:
            fitted.append(pair)
            room -= pair[1].cell_length + GAP
    return sorted(fitted, key=items.index)


def _item(shown: str, description: str, key: str) -> Content:
    """Return a key as it is shown and what it does; a click on them presses it."""
    item = Content.assemble(
        (shown, "bold $footer-key-foreground"),
        (f" {description}", "$footer-description-foreground"),
    )
    return Content("") + item.stylize(Style.from_meta({_KEY: key}))


# The title line of a panel: the upper line of its frame, or a thin line where panels have none.


class Rule(Grip):
    """``╭─ log ────── following ─╮``, or ``── log   following ──────``. Its colour is that of the
    lines.
    """

    DEFAULT_CSS = """
    Rule { height: 1; color: $rule; }
    """

    def __init__(self, title: str | Content = "", *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._shown: tuple[Content, tuple[Content, ...]] = _faint(title), ()

    def update(self, title: str | Content, *figures: str | Content) -> None:
        """Show another title, and at the right the first of these figures that fits."""
        shown = _faint(title), tuple(map(_faint, figures))
        if shown != self._shown:
            self._shown = shown
            self.refresh()

    def notify_style_update(self) -> None:
        self.refresh()  # whether panels have frames depends on the screen's classes
        super().notify_style_update()

    @property
    def _has_frame(self) -> bool:
        """Whether the other three sides stand below it."""
        siblings = self.parent.children if self.parent is not None else ()
        below = siblings[siblings.index(self) + 1 :][:1] if siblings else ()
        return any(widget.has_class("frame") for widget in below)

    def render(self) -> Content:
        title, figures = self._shown
        in_frame = framed(self) and self._has_frame
        left, right = ("╭", "╮") if in_frame else ("─", "─")
        if not title.plain:
            return Content(left + "─" * (self.size.width - 2) + right)
        # A figure that does not fit is left out: cut, it would be another one.
        room = self.size.width - title.cell_length - 6
        fitting = (figure for figure in figures if figure.plain and figure.cell_length + 3 <= room)
        figure = next(fitting, None)
        if figure is None:
            return Content.assemble(f"{left}─ ", title, f" {'─' * max(0, room + 1)}{right}")
        line = "─" * (room - figure.cell_length - 2)
        between, end = (f" {line} ", f" ─{right}") if in_frame else ("   ", f" {line}{right}")
        return Content.assemble(f"{left}─ ", title, between, figure, end)


TITLE_AT = 3
"""Cells of a title line before its title."""


TITLE_END = 3
"""Cells of a title line that its end takes."""


def columns_title(first: str, labels: Iterable[tuple[int, str]], before: int, width: int) -> str:
    """Return a title that names columns, for a title line of ``width`` cells: ``first``, then each
    with the cell of a row at which it begins; rows begin at cell ``before`` of the line. A name
    that has no room is cut after its first word, or left out.
    """
    title, room = first, width - TITLE_AT - TITLE_END
    for at, label in labels:
        start = at + before - TITLE_AT
        if start + len(label) > room:
            label = label.partition(" ")[0]
        if len(title) < start <= room - len(label):
            title = f"{title} ".ljust(start - 1, "─") + f" {label}"
    return title


def _faint(text: str | Content) -> Content:
    return faint(text) if isinstance(text, str) else text
