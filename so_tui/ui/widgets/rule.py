"""A thin line with a heading in it, which separates the parts of a screen instead of boxes."""

from __future__ import annotations

from so_tui.ui.text import Content
from so_tui.ui.widgets.grip import Grip


class Rule(Grip):
    """``── log (following) ──────``."""

    DEFAULT_CSS = """
    Rule { height: 1; }
    """

    def __init__(self, text: str | Content = "", *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._text = _heading(text)

    def update(self, text: str | Content) -> None:
        """Show another heading."""
        heading = _heading(text)
        if heading != self._text:
            self._text = heading
            self.refresh()

    def render(self) -> Content:
        room = self.size.width - self._text.cell_length - 4
        if not self._text.plain:
            return Content.styled("─" * self.size.width, "$rule")
        return Content.assemble(("── ", "$rule"), self._text, (" " + "─" * max(0, room), "$rule"))


def _heading(text: str | Content) -> Content:
    return Content(text) if isinstance(text, str) else text
