"""The title line of a panel: the upper line of its frame, or a thin line where panels have none."""

from __future__ import annotations

from so_tui.ui.framing import framed
from so_tui.ui.text import Content
from so_tui.ui.widgets.grip import Grip


class Rule(Grip):
    """``╭─ log ────── following ─╮``, or ``── log   following ──────``. Its colour is that of the lines."""

    DEFAULT_CSS = """
    Rule { height: 1; color: $rule; }
    """

    def __init__(
        self, title: str | Content = "", figure: str | Content = "", *, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self._shown: tuple[Content, tuple[Content, ...]] = _faint(title), (_faint(figure),)

    def update(self, title: str | Content, *figures: str | Content) -> None:
        """Show another title, and at the right the first of these figures that fits."""
        shown = _faint(title), tuple(map(_faint, figures))
        if shown != self._shown:
            self._shown = shown
            self.refresh()

    def notify_style_update(self) -> None:
        self.refresh()  # whether panels have frames depends on the screen's classes
        super().notify_style_update()

    def render(self) -> Content:
        title, figures = self._shown
        left, right = ("╭", "╮") if framed(self) else ("─", "─")
        if not title.plain:
            return Content(left + "─" * (self.size.width - 2) + right)
        # A figure that does not fit is left out: cut, it would be another one.
        room = self.size.width - title.cell_length - 6
        figure = next(
            (figure for figure in figures if figure.plain and figure.cell_length + 3 <= room), None
        )
        if figure is None:
            return Content.assemble(f"{left}─ ", title, f" {'─' * max(0, room + 1)}{right}")
        if not framed(self):
            return Content.assemble(
                f"{left}─ ",
                title,
                "   ",
                figure,
                f" {'─' * max(0, room - figure.cell_length - 2)}{right}",
            )
        return Content.assemble(
            f"{left}─ ", title, f" {'─' * (room - figure.cell_length - 2)} ", figure, f" ─{right}"
        )


def _faint(text: str | Content) -> Content:
    return Content.styled(text, "$faint") if isinstance(text, str) else text
