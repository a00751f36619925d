"""Text fields that take keys in the order they were typed."""

from __future__ import annotations

from textual import events
from textual.widgets import Input


class Entry(Input):
    """An Input that handles its own keys directly.

    Textual sends a key that is bound (backspace, arrows) up to the screen and back, while letters go straight into the field: of a burst,
    as a slow connection delivers it, the letters arrive first and are deleted by the backspaces that were typed before them.
    """

    async def _on_key(self, event: events.Key) -> None:
        for binding in (
            () if event.is_printable else self._bindings.key_to_bindings.get(event.key, ())
        ):
            if await self.app.run_action(binding.action, self):
                event.stop()
                event.prevent_default()
                return
