"""Machine: this host as it works now, the host as a tree, its software, and doctor's findings,
worst first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.text import Span as RichSpan
from rich.text import Text
from textual import getters, work
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Span
from textual.widget import Widget
from textual.widgets import OptionList, Static

from so_tui.machine.types import Software
from so_tui.ui.machine.host import HostPanel, Monitor
from so_tui.ui.messages import is_working
from so_tui.ui.page import Page
from so_tui.ui.snapshot import HostView
from so_tui.ui.text import Content, faint, finding_content, in_rows, wrapped
from so_tui.ui.widgets import Rule, keys
from so_tui.units import plural

if TYPE_CHECKING:
    from rich.tree import Tree

    from so_tui.machine.types import Machine


_STYLES = {"bold": "bold", "bold green": "bold $gpu", "dim": "$faint", "yellow": "$warning"}
"""Styles of the theme by those of the command that prints the same."""


def _tree_lines(tree: Tree, stem: str = "", under: str = "") -> Iterator[Content]:
    """Yield the lines of a tree of texts."""
    text = tree.label
    assert isinstance(text, Text)
    spans = [RichSpan(0, len(text), text.style), *text.spans]
    themed = [Span(span.start, span.end, _STYLES[str(span.style)]) for span in spans if span.style]
    yield Content.assemble((stem, "$rule"), Content(text.plain, themed))
    for number, branch in enumerate(tree.children, 1):
        last = number == len(tree.children)
        branch_stem, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield from _tree_lines(branch, under + branch_stem, under + below)


def _software_lines(machine: Machine, versions: dict[str, str | None], width: int) -> list[Content]:
    """Return the software's versions, as many on a line as fit; missing packages are marked as
    absent.

    Of a machine that is only described, nothing is known of its software.
    """
    named = [
        Content.assemble((f"{name} ", "$faint"), version or ("absent", "$warning"))
        for name, version in versions.items()
        if version or machine.gpus or name != "CUDA toolkit"
    ]
    if not machine.live and machine.software == Software():
        named = [faint("software: not known of a described machine")]
    mpam = Content.assemble(
        ("memory bandwidth partitions (MPAM) ", "$faint"),
        f"{machine.mpam.state}: {machine.mpam.evidence}",
    )
    notes = (Content.assemble(("note ", "$warning"), note) for note in machine.notes)
    return [*wrapped(named, width), mpam, *notes]


WIDE = 160
"""Columns from which on both halves have room beside each other."""
SAMPLE_S = 1.0
_MARGIN = 10
"""Columns beside a finding: padding and scroll bar."""


class MachineScreen(Page):
    PAGE = "machine"
    CSS_PATH = ["screen.tcss", "../numa_nodes.tcss"]
    AUTO_FOCUS = "#findings"
    HELP_TEXT = (
        "What this host is made of, which cores and memory belong to which GPU, and what would "
        "slow down or stop a run. Beside it, or with H: what it does now, its nodes and GPUs over "
        "the last ten minutes, and the processes that use GPUs or are bound to cores."
    )
    BINDINGS = keys("machine", "nodes", "pages", "other-machine")

    host = getters.query_one(HostPanel)
    about = getters.query_one("#about", Vertical)

    def __init__(self) -> None:
        self._distances = False
        self._live_first = True
        """Whether the host as it works now is shown where there is room for one half only."""
        self._due = asyncio.Event()
        self._view: HostView | None = None
        super().__init__()

    def body(self) -> Iterable[Widget]:
        with Horizontal(id="halves"):
            yield HostPanel()
            with Vertical(id="about"):
                with VerticalScroll(id="machine", classes="panel") as made_of:
                    made_of.border_title = "hardware and software"
                    yield Static("inspecting this machine …", id="tree")
                    yield Static("software", classes="heading", id="software-title")
                    yield Static(id="software")
                with Vertical(id="doctor"):
                    yield Rule("doctor", id="doctor-rule")
                    with Vertical(classes="frame"):
                        yield OptionList(id="findings", compact=True)

    def on_mount(self) -> None:
        self.watch(self.app, "machine", self._show)
        self.watch(self.app, "findings", self._show_findings)
        self.set_interval(SAMPLE_S, self.sample_soon)

    async def on_resize(self) -> None:
        self._show()
        self._show_findings()
        await self._show_host()

    # This host as it works now.

    @property
    def _here(self) -> bool:
        """Whether the machine that is shown is this host."""
        return self.app.machine is not None and self.app.machine.live and not self.app.machine_file

    def _share_columns(self) -> None:
        """Show both halves beside each other where there is room, else one of them. Of another
        machine, doctor stands beside the rest.
        """
        both = self.size.width >= WIDE
        self.host.display = self._here and (both or self._live_first)
        self.about.display = both or not self.host.display
        self.set_class(both and not self.host.display, "-beside")
        self.refresh_bindings()
        if self.host.display and not self.about.display and self.focused is not None:
            self.set_focus(None)

    @property
    def _about_width(self) -> int:
        return self.size.width // 2 if self.size.width >= WIDE else self.size.width

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only keys whose half is shown, and the one that changes it where the other is
        not.
        """
        allowed = {
            "hardware": self._here and not (self.host.display and self.about.display),
            **dict.fromkeys(("copy", "distances"), self.about.display),
            **dict.fromkeys(("node_plot", "page"), self.host.display),
        }
        return allowed[action] if action in allowed else super().check_action(action, parameters)

    def sample_soon(self) -> bool:
        """Have this host sampled if it is shown; return whether it is."""
        machine = self.app.machine
        if machine is None or not (self.is_current and self._here and self.host.display):
            return False
        self._due.set()
        if not is_working(self, "monitor"):
            self._sample(machine)
        return True

    @work(group="monitor", name="sample this machine", exclusive=True, exit_on_error=False)
    async def _sample(self, machine: Machine) -> None:
        """Sample in a thread whenever it is due. One worker takes all samples, as the dashboard's
        does all polls.
        """
        monitor = await asyncio.to_thread(Monitor, machine)
        self._due.clear()  # a sample covers the time since the one before: none yet
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                self._view = await asyncio.to_thread(monitor.poll)
                await self._show_host()
        finally:
            monitor.close()

    async def _show_host(self) -> None:
        if self._view is not None and self.host.display and self.host.size.width:
            await self.host.show(self._view)

    async def action_hardware(self) -> None:
        """Show the other half where there is room for one."""
        self._live_first = not self._live_first
        self._show()
        self._show_findings()
        self.sample_soon()

    async def action_node_plot(self) -> None:
        self.host.numa.next_plot()
        await self._show_host()

    async def action_page(self, pages: int) -> None:
        self.host.first += pages * max(1, len(self.host.row.children))
        await self._show_host()

    # What it is made of.

    def _show(self) -> None:
        from so_tui.machine.show import tree_of, versions_of

        self._share_columns()
        machine = self.app.machine
        if machine is None:
            return
        tree, software = self.query_one("#tree", Static), self.query_one("#software", Static)
        tree.update(in_rows(_tree_lines(tree_of(machine, distances=self._distances))))
        software.update(
            in_rows(_software_lines(machine, versions_of(machine.software), self._about_width - 4))
        )

    def _show_findings(self) -> None:
        findings = self.app.findings
        rule = self.query_one("#doctor-rule", Rule)
        options = self.query_one("#findings", OptionList)
        if findings is None:
            rule.update("doctor", "checking …")
            return
        found = f"{plural(len(findings), 'finding')}, worst first; y copies a remedy"
        rule.update("doctor", found if findings else "no findings")
        at = options.highlighted
        width = self._about_width - _MARGIN
        options.set_options([finding_content(finding, width) for finding in findings])
        options.display = bool(findings)
        self.set_class(not findings, "-nothing-found")
        if findings:
            options.highlighted = min(at or 0, len(findings) - 1)
        elif self.about.display and (self.focused is None or self.focused is options):
            self.set_focus(self.query_one("#machine"))  # so that the arrow keys scroll

    def action_copy(self) -> None:
        findings, at = self.app.findings, self.query_one("#findings", OptionList).highlighted
        if findings and at is not None:
            self.app.copy_to_clipboard(findings[at].remedy)
            self.notify(f"Copied: {findings[at].remedy}", markup=False)

    def action_distances(self) -> None:
        self._distances = not self._distances
        self._show()

    def action_validation(self) -> None:
        from so_tui.folders import validation_dir
        from so_tui.ui.machine.validation import ValidationScreen

        self.app.push_screen(ValidationScreen(validation_dir()))

    def action_inspect_again(self) -> None:
        self.notify("Inspecting again …")
        self.app.load(None, "")
