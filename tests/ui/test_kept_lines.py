"""Widgets keep their drawn lines until something about them changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.app import App, ComposeResult
from textual.widgets import Static

from so_tui.ui.textual_fixes import CachedLinesMixin, KeptVertical


class Box(Static, CachedLinesMixin):
    pass


class Boxes(App[None]):
    CSS = """
    #outer { width: 20; height: 10; background: $surface; }
    Box { height: 3; color: $accent; &.-marked { color: $error; } }
    """

    def compose(self) -> ComposeResult:
        with KeptVertical(id="outer"):
            yield Box("one")


CHANGES: dict[str, Callable[[Boxes], object]] = {
    "text": lambda app: app.query_one(Box).update("two"),
    "class": lambda app: app.query_one(Box).add_class("-marked"),
    "colour of the container": lambda app: app.query_one("#outer").set_styles(background="red"),
    "size": lambda app: app.query_one("#outer").set_styles(width=30),
    "theme": lambda app: setattr(app, "theme", "textual-light"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_lines_are_kept_until_they_change(change: Callable[[Boxes], object]) -> None:
    app = Boxes()
    async with app.run_test(size=(60, 20)) as pilot:
        await pilot.pause()
        widgets = app.query_one("#outer", KeptVertical), app.query_one(Box)

        def lines() -> list[object]:
            drawn = [strip for each in widgets for strip in each.render_lines(each.size.region)]
            return [(text, str(style)) for strip in drawn for text, style, _ in strip]

        region = widgets[1].size.region
        assert widgets[1].render_lines(region) is widgets[1].render_lines(region)
        before = lines()
        change(app)
        await pilot.pause()
        after = lines()
        assert after != before
        for widget in widgets:
            widget.refresh()
        assert lines() == after, "nothing of it is out of date"
