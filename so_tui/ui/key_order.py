"""Keys act one after the other, however many arrive at once: over a slow connection, or while the machine is busy.

Textual sends a key to the widget with the focus, from where an unused one comes back through all widgets around it before it is a command.
Letters that were typed after a ``/`` have then gone to the screen, too: they would be lost, or be commands themselves.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeVar

from textual import events
from textual.binding import Binding
from textual.message_pump import MessagePump
from textual.screen import Screen

from so_tui.ui.printable import PrintableApp

Result = TypeVar("Result")
LONGEST_WAIT_S = 2.0
"""For a widget that is busy: then the next key acts, even if that one has not acted yet."""


async def _caught_up(pump: MessagePump) -> None:
    """Wait until a widget has handled the messages that it has now."""
    done = asyncio.Event()
    if pump.call_later(done.set):
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), LONGEST_WAIT_S)


class KeysInOrder(PrintableApp[Result]):
    """An application in which each key finds what those before it have done: the screen that they opened, the field that they went to."""

    _settled_screen: Screen[object] | None = None
    """The screen that has opened, and has given the focus to its first widget."""

    def get_key_display(self, binding: Binding) -> str:
        """Return a key as keyboards name it: F5."""
        shown = super().get_key_display(binding)
        return shown.upper() if shown[1:].isdecimal() else shown

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and not event.is_forwarded:
            await self._take(event)
        else:
            await super().on_event(event)

    async def _take(self, event: events.Key) -> None:
        """Give a key to the field that takes it, or carry out what it is bound to now."""
        if self.screen is not self._settled_screen:
            await _caught_up(self.screen)
            self._settled_screen = self.screen
        focused = self.focused
        minimizes = event.key == "escape" and self.screen.maximized is not None
        if minimizes or (
            focused is not None and focused.check_consume_key(event.key, event.character)
        ):
            await super().on_event(event)
            return
        self.app_focus = True
        typing = focused is not None and focused.check_consume_key("a", "a")
        around = (
            [node for node in focused.ancestors_with_self if node is not self]
            if focused is not None and typing
            else []
        )
        for field in around[:1]:
            await _caught_up(field)  # with the letters that were typed before
        if event.key == "escape":
            self.screen.clear_selection()
        # What Textual does once a key has come back from all widgets around the one with the focus.
        if not await self._check_bindings(event.key, priority=True):
            await self._check_bindings(event.key)
        for widget in around:
            await _caught_up(widget)  # with what the key made the field say: that it was submitted
