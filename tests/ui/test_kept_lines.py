from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.app import App, ComposeResult
from textual.widgets import Static

from so_tui.ui.textual_fixes import CachedLinesMixin, KeptVertical


class Box(Static, CachedLinesMixin):
    """Some text in some colours."""

    DEFAULT_CSS = """
    Box { height: 3; color: $accent; }
    Box.-marked { color: $error; }
    """


class Boxes(App[None]):
    CSS = "#outer { width: 20; height: 10; background: $surface; }"

    def compose(self) -> ComposeResult:
        with KeptVertical(id="outer"):
            yield Box("one")


def lines(app: Boxes) -> list[list[tuple[str, str]]]:
    """Return texts and styles of the lines of both widgets."""
    strips = [
        strip
        for widget in (app.query_one("#outer", KeptVertical), app.query_one(Box))
        for strip in widget.render_lines(widget.size.region)
    ]
    return [[(segment.text, str(segment.style)) for segment in strip] for strip in strips]


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
        box = app.query_one(Box)
        kept = box.render_lines(box.size.region)
        assert box.render_lines(box.size.region) is kept
        before = lines(app)
        change(app)
        await pilot.pause()
        after = lines(app)
        assert after != before
        for widget in (app.query_one("#outer", KeptVertical), box):
            widget.refresh()
        assert lines(app) == after, "nothing of it is out of date"
