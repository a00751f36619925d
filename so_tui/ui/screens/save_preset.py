"""Save settings as a preset of the user, or delete one: ask for a name, and before another is replaced or lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from so_tui.ui.messages import Failed

if TYPE_CHECKING:
    from so_tui.spec import RunSpec
    from so_tui.ui.shared_app import SharedApp


def ask_to_save(app: SharedApp, spec: RunSpec, base: str, saved: Callable[[str], None]) -> None:
    """Ask for a name and save ``spec`` under it, as what differs from the preset ``base``; call ``saved`` with the name then."""
    from so_tui.spec import check_user_name
    from so_tui.ui.dialogs.basic import AskText

    def named(name: str | None) -> None:
        if name:
            _save_unless_taken(app, spec, name, base, saved)

    def read(name: str) -> str:
        check_user_name(name, app.catalog.presets if app.catalog is not None else {})
        return name

    app.push_screen(
        AskText(
            "Save as preset",
            "A short name: small letters, digits, - . _",
            f"{base}-mine",
            yes="Save",
            read=read,
        ),
        named,
    )


def _save_unless_taken(
    app: SharedApp, spec: RunSpec, name: str, base: str, saved: Callable[[str], None]
) -> None:
    taken = app.catalog.presets.get(name) if app.catalog is not None else None
    if taken is None or taken.origin == "built-in" or name == base:
        _save(app, spec, name, base, saved)
        return
    from so_tui.ui.dialogs.basic import Question

    def answered(yes: bool | None) -> None:
        if yes:
            _save(app, spec, name, base, saved)

    app.push_screen(
        Question(f"Replace your preset {name}?", [taken.path], yes="Replace", no="No, keep it"),
        answered,
    )


def _save(
    app: SharedApp, spec: RunSpec, name: str, base: str, saved: Callable[[str], None]
) -> None:
    from so_tui.spec import InputError, save_preset

    try:
        path = save_preset(spec, name, base=base)
    except InputError as error:
        app.post_message(Failed("The preset was not saved", tuple(map(str, error.problems))))
        return
    app.notify(f"Saved as {name} in {path}", markup=False)
    app.reload_presets()
    saved(name)


def is_own(app: SharedApp, name: str) -> bool:
    """Return whether a preset is the user's own."""
    preset = app.catalog.presets.get(name) if app.catalog is not None else None
    return preset is not None and preset.origin == "user"


def ask_to_delete(app: SharedApp, name: str) -> None:
    """Ask whether to delete a preset of the user, and delete it."""
    from so_tui.spec import InputError, delete_preset
    from so_tui.ui.dialogs.basic import Question

    def answered(yes: bool | None) -> None:
        if not yes:
            return
        try:
            delete_preset(name)
        except InputError as error:
            app.post_message(Failed("The preset was not deleted", tuple(map(str, error.problems))))
        else:
            app.reload_presets()

    if app.catalog is not None and is_own(app, name):
        lines = [app.catalog.presets[name].path, "Runs that were started with it stay."]
        app.push_screen(
            Question(f"Delete your preset {name}?", lines, yes="Delete", no="No, keep it"), answered
        )
