"""The dashboard's view of where each rank really is: its cores, its memory, and what is wrong with either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from so_tui.launch.placement import IDLE_NICE, misplaced, share_on_nodes
from so_tui.launch.slow_causes import LEAST_OWN_SHARE
from so_tui.machine.cpulist import cpu_ranges
from so_tui.runs.placement import RankPlacement
from so_tui.runs.records import RankBindingReport
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, brief_message, percent, plural, shorten
from so_tui.ui.widgets.styled_lines import StyledLines

ROOMY_ROWS = 40
"""Rows of a terminal from which on every rank has a line, whether or not anything is wrong with it."""
FEW_ROWS = 30
"""Rows of a terminal below which only problems are shown."""
MOST_ROWS = 8
LONGEST_LIST = 40
"""Characters of a list of cores."""


class PlacementPanel(StyledLines):
    """A line for each rank; where rows are few, one for all that are where they were planned, and one for each that is not."""

    _shown: tuple[object, ...] = ()
    """What the lines say."""

    def show(self, snapshot: Snapshot, width: int, height: int) -> None:
        """Show the newest placement in lines of ``width`` cells, in a terminal of ``height`` rows."""
        shown = (
            snapshot.placement,
            snapshot.binding,
            snapshot.plan and snapshot.plan.binding,
            width,
            height,
        )
        if shown == self._shown:  # placement is sampled much more rarely than everything else
            return
        self._shown = shown
        lines = placement_lines(snapshot, height)[:MOST_ROWS]
        self.display = bool(lines)
        self.update(Content("\n").join(line.truncate(width, ellipsis=True) for line in lines))

    @property
    def shown_rows(self) -> int:
        """Rows that the panel takes."""
        return self.rows if self.display else 0


class _Planned(NamedTuple):
    """Where a rank should be."""

    name: str
    cpus: tuple[int, ...]
    main_cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    """Empty where any NUMA node will do, or only another host's plan knows."""


def placement_lines(snapshot: Snapshot, height: int) -> list[Content]:
    """Return the lines about the placement of ranks, those with problems first."""
    reports = (
        {report.rank: report for report in snapshot.binding.ranks}
        if snapshot.binding is not None
        else {}
    )
    placed = {place.rank: place for place in snapshot.placement}
    wrong: list[Content] = []
    right: list[Content] = []
    shares: list[float] = []
    for rank, planned in _planned(snapshot).items():
        place, report = placed.get(rank), reports.get(rank)
        if problems := list(_problems(place, planned, report)):
            wrong.append(Content.assemble((f"✗ {planned.name}  ", "$error"), "; ".join(problems)))
        elif place is not None:
            right.append(_line(place, planned))
            shares += [share] if (share := share_on_nodes(place, planned.nodes)) is not None else []
    if not right or (height >= ROOMY_ROWS and len(wrong) + len(right) <= MOST_ROWS):
        return wrong + right
    if height < FEW_ROWS:
        return wrong
    good = Content.styled(
        f"✓ {plural(len(right), 'rank')} on the planned cores{_on_node(shares)}", "$faint"
    )
    return [*wrong[: MOST_ROWS - 1], good]


def _on_node(shares: Sequence[float]) -> str:
    """Return how much of the ranks' memory is where it should be; nothing where it may be anywhere."""
    if not shares:
        return ""
    least = percent(min(shares))
    return f", {'all' if least == percent(1.0) else f'at least {least}'} of their memory on their nodes"


def _planned(snapshot: Snapshot) -> dict[int, _Planned]:
    """Return where each rank should be: those of the plan, and those of other hosts, as they reported after they were bound."""
    reports = snapshot.binding.ranks if snapshot.binding is not None else ()
    bound = snapshot.plan.binding if snapshot.plan is not None else ()
    found = {
        report.rank: _Planned(_name(report.rank, report.gpu), report.cpus, report.main_cpus, ())
        for report in reports
    }
    return found | {
        each.rank: _Planned(
            _name(each.rank, each.gpu), each.cpus, each.main_cpus, each.memory_policy.nodes
        )
        for each in bound
    }


def _problems(
    place: RankPlacement | None, planned: _Planned, report: RankBindingReport | None
) -> Iterator[str]:
    if report is not None and report.problem:
        yield f"could not be bound: {brief_message(report.problem)}"
    if place is None:
        return
    if misplaced(place, planned.cpus, planned.main_cpus):
        yield f"may run on cores {_listed({*place.cpus, *place.adam_cpus})}, planned {_listed(planned.cpus)}"
    share = share_on_nodes(place, planned.nodes)
    if share is not None and share < LEAST_OWN_SHARE:
        others = {
            node for node, size in place.node_bytes.items() if size and node not in planned.nodes
        }
        yield f"{percent(share)} of its memory is on node {_listed(planned.nodes)}, the rest on {_listed(others)}"


def _line(place: RankPlacement, planned: _Planned) -> Content:
    """Return ``✓ rank 0 · GPU 0  main cores 0-6, Adam 7-71  memory node 0 99 %``."""
    cores = (
        f"main cores {_listed(place.cpus)}, Adam {_listed(place.adam_cpus)}"
        if place.adam_cpus
        else f"cores {_listed(place.cpus)}"
    )
    parts: list[tuple[str, str] | str] = [(f"✓ {planned.name}  ", "$faint"), cores]
    if place.node_bytes:
        node = max(place.node_bytes, key=lambda node: place.node_bytes[node])
        share = place.node_bytes[node] / max(1, sum(place.node_bytes.values()))
        parts += [("  memory ", "$faint"), f"node {node} {percent(share)}"]
    if place.mpam_groups:
        parts += [
            ("  MPAM ", "$faint"),
            shorten(" + ".join(map(_group, place.mpam_groups[:2])), LONGEST_LIST),
        ]
    if place.nice > 0:
        parts.append(
            (f"  {f'nice {place.nice}' if place.nice < IDLE_NICE else 'idle priority'}", "$warning")
        )
    return Content.assemble(*parts)


def _group(name: str) -> str:
    """Return the name of a group without what says who made it: ``so-tui-adam-4026531836-812-99`` is ``so-tui-adam``."""
    return "-".join(name.split("-", 3)[:3]) if name.startswith("so-tui-") else name


def _name(rank: int, gpu: int | None) -> str:
    return f"rank {rank}" + ("" if gpu is None else f" · GPU {gpu}")


def _listed(numbers: set[int] | tuple[int, ...]) -> str:
    return shorten(cpu_ranges(numbers), LONGEST_LIST) or "none"
