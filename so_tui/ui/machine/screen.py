"""Machine: this host as it works now, the host as a tree, its software, and doctor's findings,
worst first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from textual import getters, work
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.worker import Worker

from so_tui.machine.host import cpu_ranges
from so_tui.machine.types import Software
from so_tui.ui.lines import fill, usage_style
from so_tui.ui.machine.host import HostPanel, Monitor
from so_tui.ui.page import OTHER_MACHINE, Page
from so_tui.ui.snapshot import HostView
from so_tui.ui.text import Content, faint, finding_content, in_rows, wrapped
from so_tui.ui.widgets import Rule, command_key, gpu_model
from so_tui.units import memory_of, page_size, plural
from so_tui.units import memory_size as memory

if TYPE_CHECKING:
    from so_tui.machine.types import Gpu, Machine, NumaNode


def _tree_lines(machine: Machine, *, distances: bool = False) -> list[Content]:
    """Return the host as a tree: node, cores, memory, GPU, the GPU's own memory node."""
    pages = f", pages of {page_size(size)}" if (size := machine.page_size_bytes) else ""
    about = f"   {machine.cpu_name}, {machine.architecture}{pages}"
    nodes = machine.cpu_nodes
    branches = [_node_branch(machine, node, distances) for node in nodes]
    unknown = Content.styled("   NUMA node unknown", "$warning")
    placed = {node.id for node in nodes}
    branches += [
        _Branch(_gpu_text(gpu) + unknown) for gpu in machine.gpus if gpu.numa_node not in placed
    ]
    lines = [Content.assemble((machine.label, "bold"), (about, "$faint")), *_drawn(branches)]
    empty = tuple(node.id for node in machine.numa_nodes if node.kind == "empty")
    if empty:
        more = f"{plural(len(empty), 'more node')} without cores or memory: {cpu_ranges(empty)}"
        lines.append(faint(f"   {more}"))
    return lines


class _Branch(NamedTuple):
    """A line of the tree, and what is below it."""

    line: Content
    twigs: Sequence[_Branch] = ()


def _drawn(branches: Sequence[_Branch], under: str = "") -> Iterator[Content]:
    for number, (line, twigs) in enumerate(branches, 1):
        stem, below = ("└─ ", "   ") if number == len(branches) else ("├─ ", "│  ")
        yield Content.assemble((under + stem, "$rule"), line)
        yield from _drawn(twigs, under + below)


def _node_branch(machine: Machine, node: NumaNode, distances: bool) -> _Branch:
    allowed, cores = len(set(node.cpus) & set(machine.allowed_cpus)), len(node.cpus)
    head = Content.assemble(
        (f"node {node.id}", "bold"),
        f"   {plural(cores, 'core')} {cpu_ranges(node.cpus)}",
        (f"   {allowed} of them allowed" if allowed < cores else "", "$warning"),
    )
    twigs = [_Branch(Content.assemble("memory   ", _memory_text(node)))]
    for gpu in machine.gpus:
        if gpu.numa_node == node.id:
            own: list[_Branch] = []
            if gpu.memory_node is not None and not gpu.shares_memory:
                its = machine.node(gpu.memory_node)
                size = f"   its own memory, {memory(its.memory_total_bytes)}"
                own.append(_Branch(Content.assemble((f"node {its.id}", "bold"), size)))
            twigs.append(_Branch(_gpu_text(gpu), own))
    if distances and node.distances:
        between = " ".join(map(str, node.distances))
        twigs.append(_Branch(Content.assemble(("distances   ", "$faint"), between)))
    return _Branch(head, twigs)


def _memory_text(node: NumaNode) -> Content:
    if node.memory_free_bytes is None:
        return Content(memory(node.memory_total_bytes))
    used = node.memory_total_bytes - node.memory_free_bytes
    share = used / node.memory_total_bytes if node.memory_total_bytes else 0.0
    cache = f", {memory(node.file_cache_bytes)} cache" if node.file_cache_bytes else ""
    return (
        fill(share, 16, usage_style(share)) + f"  {memory_of(used, node.memory_total_bytes)}{cache}"
    )


def _gpu_text(gpu: Gpu) -> Content:
    mode = "" if gpu.compute_mode in (None, "Default") else f"   compute mode {gpu.compute_mode}"
    total = None if gpu.shares_memory else gpu.memory_total_bytes
    size = "" if total is None else f"   {memory(total)}"
    return Content.assemble(
        (f"GPU {gpu.index}", "bold $gpu"),
        f"   {gpu_model(gpu.name)}   {gpu.pci_bus_id}{size}",
        ("   NVLink-C2C" if gpu.c2c else "", "$faint"),
        ("   one memory with this node" if gpu.shares_memory else "", "$faint"),
        (mode, "$warning"),
    )


def _software_lines(machine: Machine, width: int) -> list[Content]:
    """Return the software's versions, as many on a line as fit; missing packages are marked as
    absent.

    Of a machine that is only described, nothing is known of its software.
    """
    software = machine.software
    torch = software.torch and f"{software.torch} ({software.torch_built_for or 'CPU'})"
    numactl = software.numactl and software.numactl + (
        "" if software.numactl_works in (True, None) else " (cannot bind here)"
    )
    named = (
        ("python", software.python),
        ("torch", torch),
        ("deepspeed", software.deepspeed),
        ("transformers", software.transformers),
        ("datasets", software.datasets),
        ("flash-attn", software.flash_attn),
        ("flash-attn 4", software.flash_attn_4),
        ("numactl", numactl),
        ("driver", software.nvidia_driver or software.amd_driver),
        *((("CUDA toolkit", software.cuda_toolkit),) if machine.gpus else ()),
        ("compiler", software.compiler),
        ("ninja", software.ninja),
    )
    versions = [
        Content.assemble((f"{name} ", "$faint"), version or ("absent", "$warning"))
        for name, version in named
    ]
    if not machine.live and machine.software == Software():
        versions = [faint("software: not known of a described machine")]
    sizes = (
        ("host memory", machine.host_memory_bytes),
        ("memory limit", machine.memory_limit_bytes),
        ("/dev/shm", machine.shm_total_bytes),
    )
    host = "   ".join(f"{name} {memory(size)}" for name, size in sizes if size is not None)
    mpam = Content.assemble(
        ("memory bandwidth partitions (MPAM) ", "$faint"),
        f"{machine.mpam.state}: {machine.mpam.evidence}",
    )
    notes = (Content.assemble(("note ", "$warning"), note) for note in machine.notes)
    return [*wrapped(versions, width), Content(host), mpam, *notes]


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
    BINDINGS = [
        command_key(
            "H",
            "hardware",
            "Hardware, doctor",
            "What this host is made of and doctor's findings, or what it does now",
        ),
        command_key("y", "copy", "Copy remedy", "Copy the remedy of the finding that is selected"),
        command_key("b", "distances", "Distances", "NUMA distances of each node"),
        command_key(
            "g", "inspect_again", "Inspect again", "Inspect this machine and ask doctor again"
        ),
        command_key(
            "e", "validation", "Validation", "What `so-tui validate` measured here, beside the plan"
        ),
        *HostPanel.KEYS,
        OTHER_MACHINE,
    ]

    host = getters.query_one(HostPanel)
    about = getters.query_one("#about", Vertical)

    def __init__(self) -> None:
        self._distances = False
        self._live_first = True
        """Whether the host as it works now is shown where there is room for one half only."""
        self._sampling: Worker[None] | None = None
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
        self._share_columns()
        self.watch(self.app, "machine", self._show)
        self.watch(self.app, "findings", self._show_findings)
        self.set_interval(SAMPLE_S, self.sample_soon)

    async def on_resize(self) -> None:
        self._share_columns()
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
        match action:
            case "hardware":
                return self._here and not (self.host.display and self.about.display)
            case "copy" | "distances":
                return self.about.display
            case "node_plot" | "page":
                return self.host.display
        return super().check_action(action, parameters)

    def sample_soon(self) -> bool:
        """Have this host sampled if it is shown; return whether it is."""
        machine = self.app.machine
        if machine is None or not (self.is_current and self._here and self.host.display):
            return False
        self._due.set()
        if self._sampling is None or self._sampling.is_finished:
            self._sampling = self._sample(machine)
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
        self._share_columns()
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
        machine = self.app.machine
        if machine is None:
            return
        self._share_columns()
        tree, software = self.query_one("#tree", Static), self.query_one("#software", Static)
        tree.update(in_rows(_tree_lines(machine, distances=self._distances)))
        software.update(in_rows(_software_lines(machine, self._about_width - 4)))

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
