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
    """A screen that styles anew what has gained or lost the focus within it.

    Textual begins further up, with a panel around both.
    """

    def _update_focus_styles(self, focused: Widget | None = None, blurred: Widget | None = None) -> None:
        if focused is None or blurred is None:
            super()._update_focus_styles(focused, blurred)
            return
        paths = [widget.ancestors_with_self[::-1] for widget in (focused, blurred)]
        if not any(node._has_focus_within for path in paths for node in path):
            return
        shared = sum(1 for one, other in zip(*paths, strict=False) if one is other)
        changed = {node for path in paths for top in path[shared : shared + 1] for node in top.walk_children(with_self=True)}
        self.app.stylesheet.update_nodes(changed, animate=True)
