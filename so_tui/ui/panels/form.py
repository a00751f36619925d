"""The fields of Configure: their values and marks, moving between them, finding one by its name, what the one with the focus is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from textual import events, getters, on
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import Input, Static

from so_tui.spec import field_index
from so_tui.ui.form import GROUPS, SLURM, advanced_paths
from so_tui.ui.text import Content
from so_tui.ui.widgets.field import FieldRow
from so_tui.ui.widgets.find_field import FindField


class Fields(VerticalScroll, can_focus=False):
    """The rows. The selected one stays in view when the description below takes another number of lines."""

    def on_resize(self) -> None:
        for row in self.children:
            if isinstance(row, FieldRow) and row.has_focus_within:
                row.scroll_visible(animate=False)


class FormPanel(Vertical):
    """Rows under their headings; the last lines describe the field with the focus."""

    fields = getters.child_by_id("form", Fields)
    find = getters.child_by_id("find", FindField)
    about = getters.child_by_id("about", Static)
    _refused = ""
    """What was not done because a field is wrong, until the next plan."""

    def compose(self) -> ComposeResult:
        yield Fields(id="form")
        yield FindField("a field's name, or what it is for", id="find")
        yield Static(id="about")

    async def show_values(
        self, shown_value: Callable[[str], tuple[str, str]], *, slurm: bool
    ) -> bool:
        """Show every field's value, and make the fields if there are none yet. Return whether they were made.

        Args:
            shown_value: Returns the key that a row shows, and its text.
            slurm: Whether jobs can be submitted from here; otherwise there are no fields for that.
        """
        for row in self.all_rows:
            row.show_value(*shown_value(row.path))
        if self.all_rows:
            return False
        widgets: list[Widget] = []
        for title, paths in (*GROUPS, ("Advanced", advanced_paths())):
            if title == SLURM and not slurm:
                continue
            widgets.append(Static(title, classes="group"))
            widgets += [
                FieldRow(path, field_index().get(path), *shown_value(path)) for path in paths
            ]
        await self.fields.mount_all(widgets)
        self.query_one("#field-slurm-partition").disabled = (
            not slurm and not shown_value("slurm.partition")[1]
        )
        return True

    def set_values(self, values: Mapping[str, str]) -> None:
        """Show values that were entered elsewhere."""
        for row in self.all_rows:
            if row.path in values:
                row.show_value(row.path, values[row.path])

    def mark(
        self,
        was: Callable[[str], str | None],
        preset: Callable[[str], str | None],
        problems: Mapping[str, str],
        note: Callable[[str], str],
    ) -> None:
        """Mark the fields that were changed or are wrong, and say of all what is to be said.

        Args:
            was: Returns what a changed field said when it was opened.
            preset: Returns what the preset says of a field that has what was recommended instead.
            problems: What is wrong, by field.
            note: Returns what the plan says of a field.
        """
        self._refused = ""
        for row in self.all_rows:
            row.show_status(
                was=was(row.path),
                preset=preset(row.path),
                problem=problems.get(row.path, ""),
                note=note(row.path),
            )
        self.show_about()

    def entered(self) -> tuple[str, str] | None:
        """Return path and text of the field with the focus; None if no field has it."""
        row = self._selected
        return row.entered() if row is not None else None

    def go_to_wrong(self, refused: str) -> bool:
        """Give the keyboard to the first field that is wrong, and say what was ``refused`` with it. Return whether there is one."""
        wrong = next((row for row in self.all_rows if row.problem), None)
        if wrong is not None:
            self._refused = refused
            wrong.scroll_visible()
            wrong.focus_control()
            self.show_about()
        return wrong is not None

    def go_to(self, path: str) -> None:
        """Give the keyboard to a field that can be reached, and bring it into view."""
        for row in self.rows:
            if row.path == path:
                row.focus_control()
                self.call_after_refresh(row.scroll_visible, animate=False)

    @property
    def all_rows(self) -> list[FieldRow]:
        """The fields, in their order."""
        return [child for child in self.fields.children if isinstance(child, FieldRow)]

    @property
    def rows(self) -> list[FieldRow]:
        """The fields that can be reached now."""
        return [row for row in self.all_rows if row.display and not row.disabled]

    @property
    def _selected(self) -> FieldRow | None:
        """The field with the focus."""
        focused = self.screen.focused
        return (
            next((node for node in focused.ancestors_with_self if isinstance(node, FieldRow)), None)
            if focused is not None
            else None
        )

    def move(self, distance: int) -> None:
        """Give the keyboard to another field and keep it in view; without one, to the first or the last."""
        rows = self.rows
        if not rows:
            return
        at = rows.index(self._selected) if self._selected in rows else None
        index = (
            (0 if distance > 0 else len(rows) - 1)
            if at is None
            else min(len(rows) - 1, max(0, at + distance))
        )
        rows[index].focus_control()
        rows[index].scroll_visible(animate=False)

    def open_find(self) -> None:
        """Ask for a field."""
        self.find.open()

    def close_find(self) -> bool:
        """Show every field again; return whether some were hidden."""
        if not self.find.close():
            return False
        self._filter("")
        return True

    @on(Input.Changed, "#find")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._filter(self.find.needle)

    @on(Input.Submitted, "#find")
    def _submitted(self, event: Input.Submitted) -> None:
        """Go to the field that was found, among all of them again: one that is called so before one that is described so."""
        event.stop()
        needle = self.find.needle
        found = sorted(
            self.rows,
            key=lambda row: (
                needle not in (row.name_shown, row.path),
                needle not in row.name_shown,
            ),
        )
        self.close_find()
        if found:
            self.go_to(found[0].path)

    def _filter(self, needle: str) -> None:
        heading: Static | None = None
        with self.app.batch_update():
            for child in self.fields.children:
                if isinstance(child, FieldRow):
                    child.display = child.matches(needle)
                    if heading is not None and child.display:
                        heading.display = True
                elif isinstance(child, Static):
                    heading = child
                    heading.display = not needle

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self.show_about()

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        self.show_about()

    def show_about(self) -> None:
        """Describe the field with the focus, or say what is wrong with it."""
        row = self._selected
        if row is None:
            self.about.update(
                Content.styled("up and down move between fields, / finds one", "$faint")
            )
        elif row.problem:
            refused = f"{self._refused}: " if self._refused else ""
            self.about.update(
                Content.assemble((f"✗ {refused}{row.path}  ", "bold $error"), row.problem)
            )
        else:
            self.about.update(Content.assemble((f"{row.path}  ", "bold"), (row.about, "$faint")))
