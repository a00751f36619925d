"""A thin line with a heading in it, which separates the parts of a screen instead of boxes."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget


class Rule(Widget):
    """``── log (following) ──────``."""

    DEFAULT_CSS = """
    Rule { height: 1; }
    """

    def __init__(self, text: str | Content = "", *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._text = Content.from_text(text)

    def update(self, text: str | Content) -> None:
        """Show another heading."""
        text = Content.from_text(text)
        if text != self._text:
            self._text = text
            self.refresh()

    def render(self) -> Content:
        room = self.size.width - self._text.cell_length - 4
        if not self._text.plain:
            return Content.styled("─" * self.size.width, "$rule")
        return Content.assemble(("── ", "$rule"), self._text, (" " + "─" * max(0, room), "$rule"))
