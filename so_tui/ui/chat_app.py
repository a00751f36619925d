"""``so-tui chat``: the application that has only the screen of a conversation."""

from __future__ import annotations

from so_tui.settings.file import Loaded
from so_tui.spec.generation import LoadModel, Sampling
from so_tui.ui.glyphs import PlainCharacters
from so_tui.ui.screens.chat import ChatScreen
from so_tui.ui.settings_app import SettingsApp


class ChatApp(SettingsApp[None]):
    """Leaves when the conversation is left."""

    TITLE = "so-tui chat"
    CSS_PATH = "app.tcss"

    def __init__(
        self, load: LoadModel, sampling: Sampling, system: str = "", settings: Loaded | None = None
    ) -> None:
        self._chat = ChatScreen(load, sampling, system)
        super().__init__(settings)
        if self.glyphs_at_start() == "ascii":
            self._filters.append(PlainCharacters())

    def on_mount(self) -> None:
        self.report_settings()
        self.push_screen(self._chat, lambda _: self.exit())
