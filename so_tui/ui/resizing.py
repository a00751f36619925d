"""Panels that are made larger and smaller, by keys and by pulling the lines between them. Their sizes are settings of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from so_tui.ui.page import Page
from so_tui.ui.widgets.grip import Grip


@dataclass(frozen=True, slots=True)
class Size:
    """The present size of a panel."""

    name: str
    """Of the setting that keeps it, in the table ``panels``."""
    cells: int
    least: int
    most: int
    towards: int = 1
    """1 where pulling its line down or to the right makes it larger, -1 where that makes it smaller."""
    step: int = 1
    """Cells of a key press."""
    count: int = 1
    """Panels of this size that stand above each other."""

    def grown(self, cells: int) -> int:
        """Return the size with ``cells`` more."""
        return max(self.least, min(max(self.least, self.most), self.cells + cells))

    def pulled(self, cells: int) -> int:
        """Return the size after its line was pulled by ``cells``."""
        return self.grown(round(self.towards * cells / self.count))


class ResizablePage(Page):
    """A page that says what size a panel has; this class changes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "right_curly_bracket",
            "resize(1)",
            "Larger panel",
            key_display="}",
            show=False,
            id="larger",
            tooltip="The panel with the focus; lines between panels can be pulled with the mouse",
        ),
        Binding(
            "left_curly_bracket",
            "resize(-1)",
            "Smaller panel",
            key_display="{",
            show=False,
            id="smaller",
            tooltip="The same",
        ),
        Binding(
            "vertical_line",
            "reset_sizes",
            "Reset sizes",
            key_display="|",
            show=False,
            id="reset-sizes",
            tooltip="Sizes of this screen's panels as the terminal has room",
        ),
    ]
    SIZES: ClassVar[tuple[str, ...]]
    """Settings in the table ``panels`` that are sizes of this page."""

    _grasped: Size | None = None
    """The size when its line was grasped."""

    def size_of(self, panel: Widget | None) -> Size | None:
        """Return the size that a line, or the panel with a widget in it, changes; None if that has none."""
        raise NotImplementedError

    def sizes_changed(self) -> None:
        """Lay the page out anew."""
        raise NotImplementedError

    def action_resize(self, direction: int) -> None:
        """Make the panel with the focus larger, or smaller."""
        if (size := self.size_of(self.focused)) is not None:
            self.app.keep({f"panels.{size.name}": size.grown(direction * size.step)})
            self.sizes_changed()

    def action_reset_sizes(self) -> None:
        """Let sizes follow from the terminal again."""
        self.app.keep({f"panels.{name}": None for name in self.SIZES})
        self.sizes_changed()

    @on(Grip.Pulled)
    def _pulled(self, message: Grip.Pulled) -> None:
        message.stop()
        self._grasped = size = self._grasped or self.size_of(message.grip)
        if size is None:
            return
        changes = {f"panels.{size.name}": size.pulled(message.cells)}
        if not message.done:
            self.app.apply(changes)
        else:
            self._grasped = None
            if message.cells:
                self.app.keep(changes)
        self.sizes_changed()
