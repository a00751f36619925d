"""Keep the finished lines of widgets that do not change.

Textual asks every widget on the screen for all of its lines whenever a cell of the screen is painted. It caches their content, but looks up
their colours, sizes and filters each time, for containers as well: on the dashboard that was a sixth of the time of a frame.
"""

from __future__ import annotations

from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


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
