"""The fields of Configure: their values and marks, moving between them, finding one by its name,
what the one with the focus is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual import events, getters, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Checkbox, Input, Label, Select, Static

from so_tui.spec import FieldInfo, field_index
from so_tui.ui.form import (
    GROUPS,
    LENGTH,
    LENGTH_KEYS,
    NUMBERS,
    SLURM,
    Direction,
    advanced_paths,
    hint,
    label,
    next_text,
    text_of,
)
from so_tui.ui.text import Content, faint, whole_words
from so_tui.ui.widgets import FindField, keys

# ``−`` and ``+`` beside the number of the selected field, for the mouse.


class _Stepper(Static):
    """Enters the next value in its direction when it is clicked; the wheel over it steps in both.

    The wheel elsewhere scrolls the form: over the number itself it would change what somebody only
    scrolls past.
    """

    DEFAULT_CSS = """
    _Stepper { width: 3; height: 1; text-align: center; background: $panel; color: $accent; }
    _Stepper:hover { background: $accent; color: $background; }
    """

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        super().__init__("+" if direction > 0 else "−")

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.query_ancestor(FieldRow).action_step(self._direction)

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        event.prevent_default()
        up = isinstance(event, events.MouseScrollUp)
        self.query_ancestor(FieldRow).action_step(1 if up else -1)


# One row of the form: its name, its control, and beside it a hint or a problem.

_LENGTH_FIELD = FieldInfo(
    path=LENGTH,
    type_name="number",
    description="How long the run trains.",
    unit="steps, epochs or tokens",
)
_UNITS = [(path.rpartition(".")[2], path) for path in LENGTH_KEYS]


class _Tick(Checkbox):
    """A box that shows its mark only when it is on, since Textual's differs by colour only, and the
    value as a word, since the mark is small.
    """

    BUTTON_INNER = " "
    """Of a box that begins off: Textual does not watch that value."""

    def watch_value(self) -> None:
        self.BUTTON_INNER, self.label = ("X", "yes") if self.value else (" ", "no")
        super().watch_value()


class _Choice(Select[str], inherit_bindings=False):
    """A choice that opens with enter or space: up and down move between the fields of a form."""

    BINDINGS = keys("choice", "moves")


class _FormEntry(Input):
    """A text field in which up and down move between the fields of a form; it has one line to
    scroll.
    """

    BINDINGS = keys("moves")


class FieldRow(Horizontal):
    """One field. Posts Edited with the dotted path and the text as ``--set`` takes it."""

    BINDINGS = keys("moves", "field")  # here, too: the form around it would scroll

    DEFAULT_CSS = """
    FieldRow {
        height: 1; width: 100%;
        .field-name { width: 20; color: $foreground; }
        .field-control { width: 20; }
        .field-text { width: 2fr; min-width: 20; max-width: 60; }
        .field-note {
            width: 1fr; color: $faint; padding: 0 0 0 2; height: 1; text-wrap: nowrap;
            text-overflow: ellipsis;
        }
        Input.field-control { background: $surface; }
        Input.field-control:focus { background: $block-cursor-blurred-background; }
        Checkbox { background: transparent; padding: 0; border: none; width: 20; height: 1; }
        Select { height: auto; background: transparent; }
        Select > SelectCurrent { background: $surface; }
        Select:focus > SelectCurrent {
            background: $block-cursor-blurred-background; color: $accent;
        }
        &.-selected { height: auto; }
        &.-selected .field-note { height: auto; text-wrap: wrap; }
        _Stepper { display: none; }
        &.-selected _Stepper { display: block; }
        &.-selected .field-stepped { width: 14; }
        .field-number { width: 9; margin-right: 1; }
        &.-selected .field-number { margin-right: 0; }
        .field-unit { width: 10; }
        &.-changed .field-name { text-style: bold; }
        &.-idle .field-name, &.-idle .field-note { color: $faint; text-opacity: 60%; }
        &.-wrong .field-name { color: $error; text-style: bold; }
        &.-wrong .field-note { color: $error; height: 1; text-wrap: nowrap; }
        &.-wrong Input { border-left: outer $error; }
    }
    """

    @dataclass
    class Edited(Message):
        path: str
        text: str

    def __init__(self, info: FieldInfo, key: str, value: str) -> None:
        """``key`` is the path that ``value`` is set under: of the length one of LENGTH_KEYS, else
        the field's own.
        """
        self.info, self.path, self._key, self._value = info, info.path, key, value
        self._told = key, value
        """What it was last given, or has announced."""
        self._pieces: list[str] = []
        """What the note says, the most important first."""
        self.problem = ""
        """What is wrong with the value, in words."""
        self.about = f"{info.description} {info.expected[0].upper()}{info.expected[1:]}."
        """The purpose of the field, and the values that it takes."""
        super().__init__(id="field-" + self.path.replace(".", "-"))

    def compose(self) -> ComposeResult:
        yield Label(label(self.path), classes="field-name")
        info, value = self.info, self._value
        if info.type_name == "boolean":
            checked = value == "true"
            yield _Tick("yes" if checked else "no", checked, compact=True, classes="field-control")
        elif info.choices:
            yield _choice([(choice, choice) for choice in info.choices], value, "field-control")
        else:
            kind = "field-text" if info.type_name == "text" else ""
            if info.type_name in NUMBERS:
                kind = "field-number" if self.path == LENGTH else "field-stepped"
            yield _FormEntry(value, compact=True, classes=f"field-control {kind}")
            if info.type_name in NUMBERS:
                yield from (_Stepper(-1), _Stepper(1))
            if self.path == LENGTH:
                yield _choice(_UNITS, self._key, "field-unit")
        yield Label(hint(info), classes="field-note")

    @property
    def name_shown(self) -> str:
        """Its label in small letters, with the units to choose from."""
        units = [unit for unit, _ in _UNITS] if self.path == LENGTH else []
        return " ".join((label(self.path).lower(), *units))

    def matches(self, needle: str, *, by_purpose: bool) -> bool:
        """Return whether a text in small letters is in the field's name or path, or in its
        description, too.
        """
        text = f"{self.name_shown} {self.path} {self.about if by_purpose else ''}".lower()
        return all(word in text for word in needle.split())

    @property
    def is_typed(self) -> bool:
        """Whether the text in the control differs from what it was last given."""
        return self.entered() != (self._key, self._value)

    def show_value(self, key: str, value: str) -> None:
        """Set the control without posting Edited."""
        self._key, self._value = self._told = key, value
        with self.prevent(Input.Changed, Select.Changed, Checkbox.Changed):
            for entry in self.query(Input):
                entry.value = value
            for choice in self.query(_Choice):
                choice.value = key if self.path == LENGTH else value
            for box in self.query(_Tick):
                box.value = value == "true"

    def show_status(
        self, *, was: str | None, problem: str, note: str = "", chosen: bool = False
    ) -> None:
        """Mark a field that was changed or is wrong, and say what is to be said of it.

        Args:
            was: What it said before it was changed; None if it was not.
            problem: What is wrong with it.
            note: What the plan says of it, which replaces the plain hint.
            chosen: Whether its value was chosen for the machine.
        """
        self.problem = problem
        self.set_class(was is not None, "-changed")
        self.set_class(bool(problem), "-wrong")
        if problem:
            pieces = [f"✗ {problem}"]
        elif was is not None:
            pieces = [f"was {was or 'empty'}", note]
        elif chosen:
            pieces = [f"★ {note or hint(self.info)}"]
        else:
            pieces = [note or hint(self.info)]
        self._pieces = list(filter(None, pieces))
        self._show_note()
        sign = "✗ " if problem else "• " if was is not None else ""
        self.query_one(".field-name", Label).update(Content(sign + label(self.path)))

    def show_idle(self, idle: bool) -> None:
        """Dim a field that does nothing with the values of others, and let the cursor skip it."""
        if idle != self.has_class("-idle"):
            self.set_class(idle, "-idle")
            self.disabled = idle

    def _show_note(self) -> None:
        """Show what there is to say of the selected field, which wraps it, and of others as much as
        fits.
        """
        note = self.query_one(".field-note", Label)
        text, room = " · ".join(self._pieces), note.content_size.width
        if not self.has_focus_within and 0 < room < cell_len(text):
            text = whole_words(self._pieces[0], room)
        if text != str(note.content):
            note.update(Content(text))

    @on(Input.Changed)
    @on(Select.Changed)
    @on(Checkbox.Changed)
    def _changed(self, event: Message) -> None:
        event.stop()
        entered = self.entered()
        if entered != self._told:  # controls also announce what they are given
            self._told = entered
            self.post_message(self.Edited(*entered))

    def action_step(self, direction: Direction) -> None:
        """Enter the next value of a number; nothing at its limit."""
        path, text = self.entered()
        if (
            self.info.type_name in NUMBERS
            and (after := next_text(path, text, direction)) is not None
        ):
            self.query_one(Input).value = after

    @on(events.DescendantFocus)
    @on(events.DescendantBlur)
    def _select(self) -> None:
        self.set_class(self.has_focus_within, "-selected")
        self._show_note()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_note)
        if self.has_focus_within:  # its note is whole now, maybe in two lines
            self.scroll_visible(animate=False)

    def on_click(self) -> None:
        """Select the field, wherever in its row the mouse is."""
        if not self.has_focus_within and not self.disabled:
            self.focus_control()

    def entered(self) -> tuple[str, str]:
        """Return the path that the control sets now, and its text."""
        control = self.query_one(".field-control")
        assert isinstance(control, Input | Select | Checkbox)
        path = str(self.query_one(Select).value) if self.path == LENGTH else self.path
        return path, text_of(control.value)

    def focus_control(self) -> None:
        """Focus this field's control."""
        self.screen.set_focus(self.query_one(".field-control"))


def _choice(options: Sequence[tuple[str, str]], value: str, classes: str) -> _Choice:
    return _Choice(options, value=value, allow_blank=False, compact=True, classes=classes)


class _Fields(VerticalScroll, can_focus=False):
    """The rows. The selected one stays in view when the description below takes another number of
    lines.
    """

    def on_resize(self) -> None:
        for row in self.query(FieldRow):
            if row.has_focus_within:
                row.scroll_visible(animate=False)


class FormPanel(Vertical, can_focus=True):
    """Rows under their headings; the last lines describe the field with the focus. The panel itself
    has it while no field has, so that single keys are commands.
    """

    FOCUS_ON_CLICK = False  # a click beside a control keeps the focus where it is

    fields = getters.child_by_id("form", _Fields)
    find = getters.child_by_id("find", FindField)
    about = getters.child_by_id("about", Static)
    refused = ""
    """What was not done because a field is wrong, until the next plan."""

    def compose(self) -> ComposeResult:
        yield _Fields(id="form")
        yield FindField("a field's name, or what it is for", id="find")
        yield Static(id="about")

    async def show_values(
        self, shown_value: Callable[[str], tuple[str, str]], *, slurm: bool
    ) -> bool:
        """Show every field's value, and make the fields if there are none yet. Return whether they
        were made.

        Args:
            shown_value: Returns the key that a row shows, and its text.
            slurm: Whether jobs can be submitted from here; otherwise there are no fields for that.
        """
        for row in self.all_rows:
            row.show_value(*shown_value(row.path))
        if self.all_rows:
            return False
        widgets: list[Widget] = []
        known = field_index()
        for title, paths in (*GROUPS, ("Advanced", advanced_paths())):
            if title == SLURM and not slurm:
                continue
            widgets.append(Static(title, classes="group"))
            widgets += [
                FieldRow(known.get(path, _LENGTH_FIELD), *shown_value(path)) for path in paths
            ]
        await self.fields.mount_all(widgets)
        self.query_one("#field-slurm-partition").disabled = (
            not slurm and not shown_value("slurm.partition")[1]
        )
        return True

    def go_to_wrong(self, refused: str) -> bool:
        """Give the keyboard to the first field that is wrong, and say what was ``refused`` with it.
        Return whether there is one.
        """
        wrong = next((row for row in self.all_rows if row.problem), None)
        if wrong is not None:
            self.refused = refused
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
    def selected(self) -> FieldRow | None:
        """The field with the focus."""
        return next((row for row in self.all_rows if row.has_focus_within), None)

    def move(self, distance: int) -> None:
        """Give the keyboard to another field and keep it in view; without one, to the first or the
        last.
        """
        rows, selected = self.rows, self.selected
        if not rows:
            return
        last = len(rows) - 1
        if selected in rows:
            index = min(last, max(0, rows.index(selected) + distance))
        else:
            index = 0 if distance > 0 else last
        rows[index].focus_control()
        rows[index].scroll_visible(animate=False)

    def close_find(self) -> bool:
        """Show every field again; return whether some were hidden."""
        was_open = self.find.close()
        self._filter("")
        return was_open

    @on(Input.Changed, "#find")
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._filter(self.find.needle)

    @on(Input.Submitted, "#find")
    def _submitted(self, event: Input.Submitted) -> None:
        """Go to the field that was found, among all of them again: one that is called so before one
        that is described so.
        """
        event.stop()
        needle, found = self.find.needle, self.rows
        found.sort(
            key=lambda row: (
                needle not in (row.name_shown, row.path),
                needle not in row.name_shown,
            )
        )
        self.close_find()
        if found:
            self.go_to(found[0].path)

    def _filter(self, needle: str) -> None:
        heading: Widget | None = None
        # What is described so is shown where nothing is called so.
        by_purpose = not any(row.matches(needle, by_purpose=False) for row in self.all_rows)
        with self.app.batch_update():
            for child in self.fields.children:
                if isinstance(child, FieldRow):
                    child.display = child.matches(needle, by_purpose=by_purpose)
                    if heading is not None and child.display:
                        heading.display = True
                else:
                    heading = child
                    heading.display = not needle

    @on(events.Focus)
    @on(events.Blur)
    @on(events.DescendantFocus)
    @on(events.DescendantBlur)
    def show_about(self) -> None:
        """Describe the field with the focus, or say what is wrong with it."""
        row = self.selected
        if self.has_focus:
            about = Content.from_markup(
                "[$accent]down[/] begins with the first field, [$accent]/[/] finds one"
            )
        elif row is None:
            about = faint("up and down move between fields, / finds one")
        elif row.problem:
            refused = f"{self.refused}: " if self.refused else ""
            about = Content.assemble((f"✗ {refused}{row.path}  ", "bold $error"), row.problem)
        else:
            about = Content.assemble((f"{row.path}  ", "bold"), (row.about, "$faint"))
        self.about.update(about)
