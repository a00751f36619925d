"""The settings that are changed in the application: a line each, with the values that it can take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.style import Style
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from so_tui.folders import settings_file
from so_tui.settings.file import all_settings, choices, value_of
from so_tui.settings.types import Settings
from so_tui.ui.dialogs.basic import CloseButton
from so_tui.ui.text import Content, shorten_path
from so_tui.ui.themes import THEMES

SHOWN = (
    "screen.theme",
    "screen.glyphs",
    "screen.units",
    "screen.layout",
    "keys.style",
    "alerts.bell",
    "alerts.notify",
    "alerts.title",
)
LATER = ("screen.glyphs", "screen.layout")
"""Settings that take effect when so-tui is opened the next time."""
MORE = (
    "That file has more: other keys, when to alert, a command to run. `so-tui settings` lists it."
)
_LABEL = 16
_BACK = "back"
"""Marks the cells whose click goes to the value before."""


@dataclass
class _Line:
    """A setting with its values; one of them is chosen."""

    key: str
    values: tuple[Any, ...]
    value: Any
    description: str

    def step(self, by: int) -> None:
        at = self.values.index(self.value) if self.value in self.values else -1
        self.value = self.values[(at + by) % len(self.values)]

    def content(self) -> Content:
        shown = ("yes" if self.value else "no") if isinstance(self.value, bool) else str(self.value)
        back = Content.styled("◂ ", Style(bold=True) + Style.from_meta({_BACK: True}))
        return Content.assemble(f"{self.key:<{_LABEL}} ", back, (f"{shown} ▸", "bold"))

    def about(self) -> Content:
        return Content.styled(
            self.description + (", from the next start on" if self.key in LATER else ""), "$faint"
        )


class _SettingList(OptionList):
    """Settings, a line each. A click on the arrow to the left goes back; anywhere else it goes forward, as enter does."""

    async def _on_click(self, event: events.Click) -> None:
        meta = event.style.meta
        if meta.get(_BACK) and "option" in meta:
            event.prevent_default()
            self.highlighted = meta["option"]
            await self.run_action("screen.step(-1)")


class SettingsDialog(ModalScreen[dict[str, Any] | None]):
    """Change settings; the result is what was changed, by key. The theme is shown at once."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,comma", "close", "Keep and close"),
        Binding("right,space", "step(1)", "Next value"),
        Binding("left", "step(-1)", "Previous value"),
    ]

    def __init__(self, settings: Settings, themes: Iterable[str]) -> None:
        own = tuple(theme.name for theme in THEMES)
        described = {setting.key: setting for setting in all_settings()}
        self._before = settings
        self._lines = []
        for key in SHOWN:
            setting = described[key]
            values = choices(setting.kind) or (True, False)
            if key == "screen.theme":
                values = (*own, *(name for name in sorted(themes) if name not in own))
            self._lines.append(
                _Line(key, values, value_of(settings, key), setting.description.partition(":")[0])
            )
        super().__init__()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide"):
            yield Static("Settings", classes="dialog-title")
            yield _SettingList(
                *(Option(line.content()) for line in self._lines), classes="settings"
            )
            yield Static(id="about", classes="dialog-answer")
            for line in (
                f"left, right, enter or a click change; esc keeps them in {shorten_path(str(settings_file()), 60)}",
                MORE,
            ):
                yield Static(Content.styled(line, "$faint"), classes="dialog-line")
            with Horizontal(classes="dialog-buttons"):
                yield CloseButton("Keep and close  esc", action="screen.close")

    @on(OptionList.OptionHighlighted)
    def _moved(self, event: OptionList.OptionHighlighted) -> None:
        self.query_one("#about", Static).update(self._lines[event.option_index].about())

    def action_step(self, by: int) -> None:
        options = self.query_one(OptionList)
        if (at := options.highlighted) is not None:
            line = self._lines[at]
            line.step(by)
            options.replace_option_prompt_at_index(at, line.content())
            if line.key == "screen.theme":
                self.app.theme = line.value

    @on(OptionList.OptionSelected)
    def _chosen(self) -> None:
        self.action_step(1)

    def action_close(self) -> None:
        changes = {
            line.key: line.value
            for line in self._lines
            if line.value != value_of(self._before, line.key)
        }
        self.dismiss(changes or None)
