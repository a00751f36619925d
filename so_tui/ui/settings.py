"""The part of the application that owns the user's settings: it applies them, keeps changes, and adds vim's keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from textual import work
from textual.binding import Binding, BindingType
from textual.reactive import var
from textual.theme import Theme
from textual.widgets import DataTable

from so_tui import units
from so_tui.settings import Settings
from so_tui.ui import messages
from so_tui.ui.text import GlyphName, chosen_glyphs, environment_at_start
from so_tui.ui.textual_fixes import KeysInOrder
from so_tui.ui.themes import DARK, THEMES, fallback_variables

if TYPE_CHECKING:
    from so_tui.settings import Loaded
    from so_tui.spec.errors import Problem


# Writes of what the user changes on the screen: in threads, since a file system may be slow, and
# in the order of the changes.


Value = TypeVar("Value")


class OrderedWrites(Generic[Value]):
    """Values that are written in the order in which they were added. The threads of several writes begin, and go on, in any order."""

    def __init__(self, write: Callable[[Value], object]) -> None:
        self._write = write
        self._added: SimpleQueue[Value] = SimpleQueue()
        self._writing = threading.Lock()

    def add(self, value: Value) -> None:
        """Add a value. Somebody has to call ``write_added`` afterwards, in a thread."""
        self._added.put(value)

    def write_added(self) -> None:
        """Write what was added, unless another thread has done so. Raises what writing raises; later values are left to their own calls."""
        with self._writing:
            while True:
                try:
                    value = self._added.get_nowait()
                except Empty:
                    return
                self._write(value)


Result = TypeVar("Result")
VIM_KEYS = {
    "j": "down",
    "k": "up",
    "g": "home",
    "G": "end",
    "ctrl+d": "pagedown",
    "ctrl+u": "pageup",
}
"""What each key of vim does, as the key that every widget knows. Where a screen has a command of its own on a key, that one wins."""
COMPACT = (
    [(0, "-narrow"), (1 << 20, "-medium"), (1 << 20, "-wide")],
    [(0, "-short"), (1 << 20, "-tall"), (1 << 20, "-very-tall")],
)


def _write(changes: dict[str, Any]) -> None:
    """Write changes of settings, by dotted key. Raises InputError."""
    from so_tui.settings import change_settings

    change_settings(changes)


class SettingsApp(KeysInOrder[Result]):
    """An application with settings that its user changes in it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "comma",
            "settings",
            "Settings",
            key_display=",",
            show=False,
            id="settings",
            tooltip="Theme, keys, units and alerts, kept",
        ),
        *(Binding(key, f"vim('{moves}')", show=False) for key, moves in VIM_KEYS.items()),
    ]

    settings: var[Settings] = var(Settings())

    def __init__(self, loaded: Loaded | None = None) -> None:
        self._found_themes: dict[str, Theme | None] = {}
        self._changes = OrderedWrites(_write)
        super().__init__()
        self._settings_problems: tuple[Problem, ...] = loaded.problems if loaded is not None else ()
        for theme in THEMES:
            self.register_theme(theme)
        self.set_reactive(
            SettingsApp.settings, loaded.settings if loaded is not None else Settings()
        )
        screen = self.settings.screen
        units.show_memory_in(screen.units)
        self.theme = screen.theme if screen.theme in self.available_themes else DARK.name
        if screen.layout == "compact":
            self.HORIZONTAL_BREAKPOINTS, self.VERTICAL_BREAKPOINTS = (
                COMPACT  # Textual reads them from the instance
            )
        self.set_keymap(self.settings.keys.bindings)

    def get_theme(self, theme_name: str) -> Theme | None:
        """Return a theme by its name. Textual copies all themes for a look-up, and looks up sixty in a frame."""
        if theme_name not in self._found_themes:
            self._found_themes[theme_name] = super().get_theme(theme_name)
        return self._found_themes[theme_name]

    def register_theme(self, theme: Theme) -> None:
        self._found_themes.clear()
        super().register_theme(theme)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return fallback_variables(self.current_theme.to_color_system().generate())

    def glyphs_at_start(self) -> GlyphName:
        """Return the characters to draw with: by the environment, else the settings, else what locale and terminal can show."""
        return chosen_glyphs(environment_at_start(), preferred=self.settings.screen.glyphs)

    def report_settings(self) -> None:
        """Say what is wrong in the settings file, and keep the theme from now on, however it is changed."""
        for problem in self._settings_problems:
            self.notify(
                str(problem), title="Settings", severity="warning", timeout=20, markup=False
            )
        theme = self.settings.screen.theme
        if theme not in self.available_themes:
            text = f"There is no theme {theme}: {DARK.name} is used. Press , to choose another."
            self.notify(text, title="Settings", severity="warning", timeout=20, markup=False)
        self.theme_changed_signal.subscribe(self, lambda changed: self._theme_changed(changed.name))

    def _theme_changed(self, name: str) -> None:
        if name != self.settings.screen.theme:
            self.keep({"screen.theme": name})

    def keep(self, changes: Mapping[str, Any]) -> None:
        """Apply changes of settings, by dotted key, and write them to the user's file."""
        self.apply(changes)
        self._changes.add(dict(changes))
        self._write_settings()

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Apply changes of settings, by dotted key, until the application is left."""
        from msgspec.structs import replace

        settings = self.settings
        for key, value in changes.items():
            table, _, name = key.partition(".")
            settings = replace(
                settings, **{table: replace(getattr(settings, table), **{name: value})}
            )
        self.settings = settings

    def watch_settings(self, settings: Settings) -> None:
        units.show_memory_in(settings.screen.units)
        if settings.screen.theme in self.available_themes and self.theme != settings.screen.theme:
            self.theme = settings.screen.theme
        self.set_keymap(settings.keys.bindings)
        self.refresh(layout=True)

    @work(thread=True, group="settings", name="keep settings", exit_on_error=False)
    def _write_settings(self) -> None:
        from so_tui.spec.errors import InputError

        try:
            self._changes.write_added()
        except InputError as error:
            self.post_message(
                messages.Failed(
                    "The settings hold only until so-tui is left", tuple(map(str, error.problems))
                )
            )

    # Commands.

    def action_settings(self) -> None:
        from so_tui.ui.dialogs import SettingsDialog

        self.push_screen(
            SettingsDialog(self.settings, self.available_themes),
            lambda changes: self.keep(changes) if changes else None,
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "vim":
            return self.settings.keys.style == "vim"
        return super().check_action(action, parameters)

    def action_vim(self, moves: str) -> None:
        """Move as another key does."""
        whole = moves in ("home", "end") and isinstance(
            self.focused, DataTable
        )  # there, home and end move along the row
        self.simulate_key(f"ctrl+{moves}" if whole else moves)
