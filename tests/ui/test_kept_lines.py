"""Widgets keep their drawn lines until something about them changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.app import App, ComposeResult
from textual.widgets import Static

from so_tui.ui.textual_fixes import CachedLinesMixin, KeptVertical


class Box(Static, CachedLinesMixin):
    DEFAULT_CSS = "Box { height: 3; color: $accent; &.-marked { color: $error; } }"


class Boxes(App[None]):
    CSS = "#outer { width: 20; height: 10; background: $surface; }"

    def compose(self) -> ComposeResult:
        with KeptVertical(id="outer"):
            yield Box("one")


CHANGES: dict[str, Callable[[Boxes], object]] = {
    "text": lambda app: app.query_one(Box).update("two"),
    "class": lambda app: app.query_one(Box).add_class("-marked"),
    "colour of the container": lambda app: setattr(
        app.query_one("#outer").styles, "background", "red"
    ),
    "size": lambda app: setattr(app.query_one("#outer").styles, "width", 30),
    "theme": lambda app: setattr(app, "theme", "textual-light"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_lines_are_kept_until_they_change(change: Callable[[Boxes], object]) -> None:
    app = Boxes()
    async with app.run_test(size=(60, 20)) as pilot:
        await pilot.pause()
        outer, box = app.query_one("#outer", KeptVertical), app.query_one(Box)

        def lines() -> list[object]:
            strips = [
                *outer.render_lines(outer.size.region),
                *box.render_lines(box.size.region),
            ]
            return [(text, str(style)) for strip in strips for text, style, _ in strip]

        assert box.render_lines(box.size.region) is box.render_lines(box.size.region)
        before = lines()
        change(app)
        await pilot.pause()
        after = lines()
        assert after != before
        outer.refresh()
        box.refresh()
        assert lines() == after, "nothing of it is out of date"
