"""The parts that all five screens share: top line, navigation and key line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual import events, getters, on
from textual.app import ComposeResult
from textual.widget import Widget
from textual.widgets import Input
from textual.worker import Worker

from so_tui.ui.shared_app import SharedApp
from so_tui.ui.text import Content, faint, shorten
from so_tui.ui.textual_fixes import CachedLinesMixin, StylesFocus
from so_tui.ui.widgets import FindField, Grip, KeyLine, keys
from so_tui.units import plural

if TYPE_CHECKING:
    from so_tui.doctor import Finding
    from so_tui.settings import Settings


PAGES: tuple[tuple[str, str], ...] = (
    ("presets", "Presets"),
    ("configure", "Configure"),
    ("dashboard", "Dashboard"),
    ("runs", "Runs"),
    ("machine", "Machine"),
)
"""Name and title of each screen, in the order of their number keys."""
SHORT = {"configure": "Config", "dashboard": "Dash", "machine": "Mach"}
"""Titles for narrow terminals."""


class _TopLine(CachedLinesMixin):
    """Host, machine and live runs, on every screen."""

    DEFAULT_CSS = """
    _TopLine { height: 1; background: $surface; padding: 0 1; }
    """

    app = getters.app(SharedApp)

    def on_mount(self) -> None:
        for name in (
            "machine",
            "inspecting",
            "machine_file",
            "findings",
            "starting",
            "settings",
            "live",
        ):
            self.watch(self.app, name, self._changed, init=False)

    def _changed(self) -> None:
        self.refresh()

    def render(self) -> Content:
        app, live = self.app, self.app.live
        right = (
            Content.assemble(("● ", "$success"), f"{plural(live, 'run')} live")
            if live
            else faint("○ no live runs")
        )
        if app.starting:
            starting = f"starting {shorten(app.starting, 28)} …"
            right = Content.assemble((starting, "bold $run"), "  ", right)
        left = Content.styled("so-tui", "bold")
        width = self.size.width
        if app.machine is None:
            left += faint("  inspecting this machine …" if app.inspecting else "")
        else:
            from so_tui.machine.types import facts_of

            left += Content.assemble("  ", (app.machine.label, "bold"), "  ")
            if app.machine_file:
                left += Content.styled("planning for another machine  ", "$warning")
            gap = ""
            for fact in filter(None, [*facts_of(app.machine), _doctor_summary(app.findings or ())]):
                if left.cell_length + len(gap) + len(fact) + right.cell_length + 2 > width:
                    break
                left += faint(gap + fact)
                gap = " · "
        return left + " " * max(1, width - left.cell_length - right.cell_length) + right


def _doctor_summary(findings: Sequence[Finding]) -> str:
    """Return ``doctor: 1 problem that blocks, 2 warnings``; empty when all is well."""
    severities = [finding.severity for finding in findings]
    blocks, warnings = severities.count("blocks"), severities.count("warning")
    blocking = f"{plural(blocks, 'problem')} that block{'s' if blocks == 1 else ''}"
    parts = [blocking] * bool(blocks) + [plural(warnings, "warning")] * bool(warnings)
    return f"doctor: {', '.join(parts)}" if parts else ""


class _Navigation(CachedLinesMixin):
    """The five screens with their keys; the one that is shown is marked."""

    DEFAULT_CSS = """
    _Navigation {
        height: 1; padding: 0 1;
        link-style: none; link-color: $foreground;
        link-style-hover: bold; link-color-hover: $accent; link-background-hover: $panel;
    }
    """

    def __init__(self, current: str) -> None:
        self._current = current
        super().__init__()

    def render(self) -> Content:
        right = Content.from_markup("[@click=app.help]? help[/]")
        long = dict(PAGES)
        short = long | SHORT
        for titles in (long, short, {self._current: short[self._current]}):
            left = self._tabs(titles)
            room = self.size.width - left.cell_length - right.cell_length
            if room > 0:
                return left + " " * room + right
        return left

    def _tabs(self, titles: Mapping[str, str]) -> Content:
        pieces = []
        for number, (name, _) in enumerate(PAGES, 1):
            style = f"@click=app.show('{name}')"
            if name == self._current:
                style = "b $block-cursor-foreground on $block-cursor-background"
            tab = f" {number} {titles.get(name, '')}".rstrip()
            pieces.append(f"[{style}]{tab} [/]")
        return Content.from_markup(" ".join(pieces))


class Page(StylesFocus[None], CachedLinesMixin):
    """One of the five screens."""

    app = getters.app(SharedApp)
    PAGE: ClassVar[str]
    HELP_TEXT: ClassVar[str]
    """Purpose of this screen in a sentence or two; the help opens with it."""
    BINDINGS = keys("page")

    _left: Widget | None = None
    """The field that was left last; tab continues from it."""

    @property
    def resting(self) -> Widget | None:
        """The widget with the focus while no field has it, if there is one."""
        return None

    def compose(self) -> ComposeResult:
        yield _TopLine()
        yield _Navigation(self.PAGE)
        yield from self.body()
        yield KeyLine()

    def body(self) -> Iterable[Widget]:
        """Return the screen's own widgets."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.watch(self.app, "settings", self._settings_changed, init=False)

    def _settings_changed(self, before: Settings, settings: Settings) -> None:
        """Draw figures in other units, as in another size: all screens do that at once."""
        if before.screen.units != settings.screen.units:
            self.post_message(events.Resize(self.size, self.size))

    @property
    def last_actions(self) -> tuple[str, ...]:
        """Actions whose keys stand last in the key line: nothing starts from here on another
        machine.
        """
        return ("launch",) if self.app.machine_file else ()

    def left(self) -> None:
        """Hand what is chosen here to the screen that the user has gone to."""

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        self.app.report_failure(event)

    def action_leave_field(self) -> None:
        """Take the focus out of a text field, so that single keys are commands again."""
        if self.focused is not self.resting:
            self._left = self.focused
            self.set_focus(self.resting)

    def _move_focus(self, direction: int = 0, selector: str | type[Widget] = "*") -> Widget | None:
        if self.focused is self.resting and self._left in self.focus_chain:
            self.set_focus(self._left)
        return super()._move_focus(direction, selector)


class FiltersTable(Page):
    """A page with a table ``#table``, whose rows are found by the text in the field ``#filter``."""

    filter = getters.query_one("#filter", FindField)

    def filtered(self) -> None:
        """Show the rows that the filter finds."""
        raise NotImplementedError

    def action_find(self) -> None:
        self.filter.open()

    @on(Input.Changed, "#filter")
    def _filter_typed(self) -> None:
        self.filtered()

    @on(Input.Submitted, "#filter")
    def _back_to_the_table(self) -> None:
        self.set_focus(self.query_one("#table"))

    def action_leave_field(self) -> None:
        self.filter.close()
        self._back_to_the_table()


# Panels that are made larger and smaller, by keys and by pulling the lines between them. Their
# sizes are settings of the user.


@dataclass(frozen=True, slots=True)
class Size:
    """The present size of a panel."""

    name: str
    """Of the setting that keeps it, in the table ``panels``."""
    cells: int
    least: int
    most: int
    towards: int = 1
    """1 where pulling its line down or to the right makes it larger, -1 where that makes it
    smaller.
    """
    step: int = 1
    """Cells of a key press."""
    count: int = 1
    """Panels of this size that stand above each other."""

    def grown(self, cells: int) -> int:
        """Return the size with ``cells`` more."""
        return max(self.least, min(max(self.least, self.most), self.cells + cells))

    def pulled(self, cells: int) -> int:
        """Return the size after its line was pulled by ``cells``."""
        return self.grown(round(self.towards * cells / self.count))


class ResizablePage(Page):
    """A page that says what size a panel has; this class changes it."""

    BINDINGS = keys("panels")
    SIZES: ClassVar[tuple[str, ...]]
    """Settings in the table ``panels`` that are sizes of this page."""

    _grasped: Size | None = None
    """The size when its line was grasped."""

    def size_of(self, panel: Widget | None) -> Size | None:
        """Return the size that a line, or the panel with a widget in it, changes; None if that has
        none.
        """
        raise NotImplementedError

    def sizes_changed(self) -> None:
        """Lay the page out anew."""
        raise NotImplementedError

    def action_resize(self, direction: int) -> None:
        """Make the panel with the focus larger, or smaller."""
        if (size := self.size_of(self.focused)) is not None:
            self.app.keep({f"panels.{size.name}": size.grown(direction * size.step)})
            self.sizes_changed()

    def action_reset_sizes(self) -> None:
        """Let sizes follow from the terminal again."""
        self.app.keep({f"panels.{name}": None for name in self.SIZES})
        self.sizes_changed()

    @on(Grip.Pulled)
    def _pulled(self, message: Grip.Pulled) -> None:
        message.stop()
        self._grasped = size = self._grasped or self.size_of(message.grip)
        if size is None:
            return
        changes = {f"panels.{size.name}": size.pulled(message.cells)}
        if not message.done:
            self.app.apply(changes)
        else:
            self._grasped = None
            if message.cells:
                self.app.keep(changes)
        self.sizes_changed()
