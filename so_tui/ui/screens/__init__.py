"""The five screens of the application, each imported when it is first shown: the first paint needs one of them only."""

from __future__ import annotations

from collections.abc import Callable

from textual.screen import Screen


def _presets() -> Screen[None]:
    from so_tui.ui.screens.presets import PresetsScreen

    return PresetsScreen()


def _configure() -> Screen[None]:
    from so_tui.ui.screens.configure import ConfigureScreen

    return ConfigureScreen()


def _dashboard() -> Screen[None]:
    from so_tui.ui.screens.dashboard import DashboardScreen

    return DashboardScreen()


def _runs() -> Screen[None]:
    from so_tui.ui.screens.runs import RunsScreen

    return RunsScreen()


def _machine() -> Screen[None]:
    from so_tui.ui.screens.machine import MachineScreen

    return MachineScreen()


MODES: dict[str, str | Callable[[], Screen[None]]] = {
    "presets": _presets,
    "configure": _configure,
    "dashboard": _dashboard,
    "runs": _runs,
    "machine": _machine,
}
"""How to make each of ``page.PAGES``, as ``App.MODES`` takes it."""
