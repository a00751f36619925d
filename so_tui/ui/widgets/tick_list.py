"""A list of things to tick: whether one is ticked is seen without colour, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Generic, TypeVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import OptionList

from so_tui.ui.text import Content

Item = TypeVar("Item")


class TickList(OptionList, Generic[Item]):
    """Ticked items keep the order in which they were ticked, also those that are not listed now."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "tick", "Tick"),
        Binding("enter", "take", "Take what is ticked"),
        Binding("a", "tick_all(True)", "Tick all"),
        Binding("n", "tick_all(False)", "Tick none"),
    ]
    DEFAULT_CSS = """
    TickList {
        height: auto; max-height: 14; border: none; background: $surface; padding: 0; margin: 1 0;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    """

    class Changed(Message):
        """Something was ticked, or not any more."""

    class Taken(Message):
        """What is ticked now is what was wanted."""

    def __init__(self, ticked: Iterable[Item], *, id: str | None = None) -> None:
        self.ticked = list(ticked)
        self._listed: list[tuple[Item, Content]] = []
        super().__init__(id=id, compact=True)

    def list_items(self, items: Sequence[tuple[Item, Content]]) -> None:
        """List these items, each with its text."""
        self._listed = list(items)
        self.clear_options()
        self.add_options([self._line(item, text) for item, text in self._listed])
        if self._listed:
            self.highlighted = 0

    def _line(self, item: Item, text: Content) -> Content:
        return Content.assemble(
            (
                "✓ " if item in self.ticked else "· ",
                "$success" if item in self.ticked else "$faint",
            ),
            text,
        )

    def _tick(self, items: Sequence[Item], ticked: bool) -> None:
        self.ticked = [item for item in self.ticked if ticked or item not in items]
        self.ticked += [item for item in items if ticked and item not in self.ticked]
        for index, (item, text) in enumerate(self._listed):
            if item in items:
                self.replace_option_prompt_at_index(index, self._line(item, text))
        self.post_message(self.Changed())

    def action_tick(self) -> None:
        if self.highlighted is not None:
            item = self._listed[self.highlighted][0]
            self._tick([item], item not in self.ticked)

    def action_select(self) -> None:  # what a click does
        self.action_tick()

    def action_take(self) -> None:
        self.post_message(self.Taken())

    def action_tick_all(self, ticked: bool) -> None:
        self._tick([item for item, _ in self._listed], ticked)
