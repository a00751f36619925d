"""What is edited in Configure: presets with their unsaved edits. Without widgets."""

from __future__ import annotations

from so_tui.spec import RunSpec, with_values
from so_tui.ui.form import (
    LENGTH,
    LENGTH_KEYS,
    edits_between,
    length_of,
    typed_over,
    values_of,
    with_edit,
)


class Drafts:
    """The preset in the form and the edits of every preset. The screen that shows them is the only one to change them."""

    def __init__(self) -> None:
        self.base: RunSpec | None = None
        """The preset in the form, as it is saved."""
        self.base_values: dict[str, str] = {}
        self._edits: dict[str, dict[str, str]] = {}
        self._recommended: dict[str, dict[str, str]] = {}
        """The part of each draft that a recommendation filled in. It need not be saved: choosing the preset again brings it back."""
        self._machines: dict[str, str] = {}
        """The machine that a recommendation is for, in words, by preset."""

    @property
    def edits(self) -> dict[str, str]:
        """The edits of the preset in the form."""
        return self._edits.setdefault(self.base.name, {}) if self.base else {}

    @property
    def values(self) -> dict[str, str]:
        """Every field as text, edited or not."""
        return {**self.base_values, **self.edits}

    @property
    def recommended(self) -> dict[str, str]:
        """What a recommendation filled in for the preset in the form, by field."""
        return self._recommended.get(self.base.name, {}) if self.base else {}

    @property
    def recommended_for(self) -> str:
        """The machine that the recommendation is for, which may not be the one that is planned for now."""
        return self._machines.get(self.base.name, "") if self.base else ""

    @property
    def changes(self) -> dict[str, str]:
        """What the user changed of the preset and its recommendation, by field."""
        return {
            path: self.values.get(path, "") for path in typed_over(self.edits, self.recommended)
        }

    @property
    def spec(self) -> RunSpec | None:
        """The preset with its edits; None while there is none. Raises InputError."""
        return with_values(self.base, self.edits) if self.base else None

    def open(self, base: RunSpec, wanted: RunSpec | None = None, machine: str = "") -> None:
        """Take a preset into the form; ``wanted``, a recommendation for ``machine``, is laid over its edits and replaces an earlier one."""
        name = base.name
        self.base, self.base_values = base, values_of(base)
        if wanted is not None:
            edits = self._edits.get(name, {})
            typed = {
                path: edits[path] for path in typed_over(edits, self.recommended) if path in edits
            }
            self._recommended[name], self._machines[name] = edits_between(base, wanted), machine
            self._edits[name] = typed | self._recommended[name]

    def undo(self) -> None:
        """Go back to the preset with what was recommended for it."""
        if self.base:
            self._edits[self.base.name] = dict(self.recommended)

    def forget(self, preset: str) -> None:
        """Drop the edits of a preset, and what was recommended for it."""
        self._edits.pop(preset, None)
        self._recommended.pop(preset, None)

    def enter(self, path: str, text: str) -> bool:
        """Enter ``text`` into a field, and return whether that changed anything."""
        edits = with_edit(self.edits, self.base_values, path, text)
        if self.base is None or edits == self.edits:
            return False
        self._edits[self.base.name] = edits
        return True

    def unsaved(self) -> dict[str, int]:
        """Return how many fields of each preset the user has changed without saving them."""
        counts = {
            preset: len(typed_over(edits, self._recommended.get(preset, {})))
            for preset, edits in self._edits.items()
        }
        return {preset: count for preset, count in counts.items() if count}

    def shown_value(self, path: str) -> tuple[str, str]:
        """Return the key that a row of the form shows and its text."""
        if path == LENGTH:
            return length_of({**dict.fromkeys(LENGTH_KEYS, "0"), **self._lengths()})
        return path, self.values.get(path, "")

    def _lengths(self) -> dict[str, str]:
        """Return the lengths in force: an edited one hides those of the preset."""
        typed = {path: text for path, text in self.edits.items() if path in LENGTH_KEYS}
        return typed or {path: self.base_values.get(path, "0") for path in LENGTH_KEYS}

    def was(self, path: str) -> str | None:
        """Return what a field said when the preset was opened, if the user has changed it since; else None."""
        changed = self.changes
        opened = {**self.base_values, **self.recommended}
        if path != LENGTH:
            return opened.get(path, "") if path in changed else None
        if not any(key in changed for key in LENGTH_KEYS):
            return None
        key, text = length_of(opened)
        return f"{text} {key.rpartition('.')[2]}"

    def preset_value(self, path: str) -> str | None:
        """Return what the preset says of a field that has what was recommended instead; None for any other."""
        return (
            self.base_values.get(path, "")
            if path in self.recommended and path not in self.changes
            else None
        )
