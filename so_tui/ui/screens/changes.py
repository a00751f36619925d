"""What was changed in Configure: its title, the list of what differs from the preset, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.cells import cell_len

from so_tui.ui.form import GROUPS, label
from so_tui.ui.text import Content, plural

if TYPE_CHECKING:
    from so_tui.ui.drafts import Drafts
    from so_tui.ui.shared_app import SharedApp


def title(drafts: Drafts, width: int) -> Content:
    """Return the model, its preset, how many fields were changed, and what was recommended for which machine, in one line.

    Where those have no room, some are counted; = lists them all.
    """
    assert drafts.base is not None
    changed = plural(len(drafts.changes), "change") if drafts.changes else "no changes"
    line = Content.assemble(
        (drafts.base.label, "bold"), (f"   preset {drafts.base.name}, {changed}", "$faint")
    )
    shown = [path for _, paths in GROUPS for path in paths]  # in this order
    others = [path for path in drafts.recommended if path not in shown]
    recommended = [
        label(path) for path in (*shown, *others) if drafts.preset_value(path) is not None
    ]
    if not recommended:
        return line
    count = len(recommended)
    lists = [
        ", ".join(recommended),
        *(
            f"{', '.join(recommended[:named])} and {count - named} more"
            for named in range(count - 1, 0, -1)
        ),
    ]
    for text in (
        *(f"   ★ recommended for {drafts.recommended_for}: {names}" for names in lists),
        f"   ★ {count} recommended",
    ):
        if line.cell_length + cell_len(text) <= width:
            return line + Content.styled(text, "$faint")
    return line


def show_differences(app: SharedApp, drafts: Drafts) -> None:
    """Show every field that differs from the preset."""
    from so_tui.ui.dialogs.basic import Notice

    changed = drafts.changes
    lines = [
        f"{path}: {drafts.base_values.get(path, '') or 'empty'} → {text or 'empty'}{'' if path in changed else '   recommended'}"
        for path, text in sorted(drafts.edits.items())
    ]
    heading = f"What differs from preset {drafts.base.name}" if drafts.base else "No preset chosen"
    app.push_screen(Notice(heading, lines or ["No field differs from the preset."], bad=False))


def ask_to_undo(app: SharedApp, drafts: Drafts, then: Callable[[], object]) -> None:
    """Ask to undo the user's changes, or to give up what was recommended where there are none; call ``then`` once that is done."""
    if drafts.base is None or not (drafts.edits or drafts.changes):
        return
    from so_tui.ui.dialogs.basic import Question

    preset, changed = drafts.base.name, drafts.changes
    recommended = ", ".join(map(label, drafts.recommended))

    def answered(yes: bool | None) -> None:
        if not yes or drafts.base is None:
            return
        if changed:
            drafts.undo()
        else:
            drafts.forget(preset)
        then()

    if changed:
        kept = f" What was recommended stays: {recommended}." if recommended else ""
        lines, undo = [f"{plural(len(changed), 'change')} will be lost.{kept}"], "Undo all changes"
    else:
        lines, undo = (
            [f"What was recommended for {drafts.recommended_for} is given up: {recommended}."],
            "Use the preset as it is",
        )
    app.push_screen(Question(f"Back to preset {preset}?", lines, yes=undo), answered)
