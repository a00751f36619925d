"""Style what changed. Textual styles more, which in a form of five hundred widgets takes longer than all the rest of a key press."""

from __future__ import annotations

from typing import TypeVar

from textual.app import App
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widget import Widget

Result = TypeVar("Result")


class StylesMounted(App[Result]):
    """An application that styles widgets once they are mounted.

    Textual does so as well each time that one gets a class while it is made, a few times for each field of the form.
    """

    def update_styles(self, node: DOMNode, animate: bool = True) -> None:
        if node.parent is not None or not isinstance(node, Widget):
            super().update_styles(node, animate)


class StylesFocus(Screen[Result]):
    """A screen that styles anew, where the focus goes, what rules with ``:focus-within`` are about.

    Textual styles the whole panel, or both panels.
    """

    def _update_focus_styles(
        self, focused: Widget | None = None, blurred: Widget | None = None
    ) -> None:
        paths = [
            widget.ancestors_with_self[-2::-1] if widget is not None else []
            for widget in (focused, blurred)
        ]  # from the screen on
        shared = sum(
            1 for one, other in zip(*paths, strict=False) if one is other
        )  # have the focus within them as before
        changed = {
            node
            for path in paths
            for top in path[shared : shared + 1]
            for node in top.walk_children(with_self=True)
        }
        self.app.stylesheet.update_nodes(
            [node for node in changed if node._has_focus_within], animate=True
        )
