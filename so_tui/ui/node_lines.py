"""NUMA nodes and GPUs as lines in aligned columns, a node with its only GPU in one line; a cell is
a core. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from so_tui.machine.host import cpu_ranges
from so_tui.runs.records import GpuSample
from so_tui.trust.text import brief_line
from so_tui.ui.charts.drawing import cells_in
from so_tui.ui.lines import NEARLY_FULL, cells_of, fill_pieces
from so_tui.ui.snapshot import GpuView, NodeView
from so_tui.ui.text import GlyphName
from so_tui.units import memory_of, thousands
from so_tui.units import memory_size as memory

# Cores as cells: one cell a core where there is room, averages of neighbours where there is not.
# Pure data in, text out.


LEVELS: dict[GlyphName, str] = {"braille": "▁▂▃▄▅▆▇█", "block": "▁▂▃▄▅▆▇█", "ascii": ".:-=+*#@"}
_Numbers = tuple[int, ...]
Cells = list[tuple[str, str]]
"""Texts with their roles."""


class CoreGroup(NamedTuple):
    """Cores of a node that do one thing; ``sign`` leads them on the row, so that groups differ
    without colour as well.
    """

    sign: str
    role: str
    cpus: _Numbers
    positions: _Numbers
    """Where its cores stand among those of the node."""


_SIGNS = {"adam": "A", "main-core": "m", "other": "o"}
"""Signs of the groups by their roles, in their order on the row."""


@lru_cache(maxsize=64)
def group_cores(
    cpus: _Numbers, adam: frozenset[int], main: frozenset[int]
) -> tuple[CoreGroup, ...]:
    """Group a node's cores by the run's use of them, which stays the same from one sample to the
    next; groups without a core are left out.
    """
    roles = ["adam" if cpu in adam else "main-core" if cpu in main else "other" for cpu in cpus]
    return tuple(
        CoreGroup(sign, role, tuple(cpus[at] for at in found), found)
        for role, sign in _SIGNS.items()
        if (found := tuple(at for at, own in enumerate(roles) if own == role))
    )


def _core_cells(loads: Sequence[int], width: int, glyphs: GlyphName) -> str:
    """Return the load of cores in at most ``width`` characters."""
    parts = equal_parts(loads, max(1, min(len(loads), width)))
    return "".join([level_of(sum(part) / len(part), glyphs) for part in parts])


@lru_cache(maxsize=1024)  # hundreds of cores are drawn each second
def level_of(load: float, glyphs: GlyphName) -> str:
    """Return the character of one core's load (percent)."""
    levels = LEVELS[glyphs]
    return levels[min(len(levels) - 1, max(0, int(load / 100 * len(levels))))]


def equal_parts(values: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return ``count`` parts that follow each other."""
    length = len(values)
    return [values[at * length // count : (at + 1) * length // count] for at in range(count)]


class NodePicture(NamedTuple):
    """A node with the ranks and GPUs that are bound or attached to it."""

    view: NodeView
    host: str
    """Its host, where the run has several; else empty."""
    ranks: tuple[int, ...]
    groups: tuple[CoreGroup, ...]
    gpus: tuple[GpuView, ...]
    """GPUs attached to this node, whose load is drawn."""

    @property
    def alone(self) -> GpuSample | None:
        """The GPU that is this node's alone, so that they share a line."""
        return self.gpus[0].sample if len(self.gpus) == 1 else None

    @property
    def short(self) -> str:
        """``chip 0`` where node, GPU and rank have one number and are one chip; ``node 0``."""
        gpu, number = self.alone, self.view.sample.id
        same = gpu is not None and gpu.c2c_to_gpu_bytes_per_s is not None and gpu.index == number
        return f"chip {number}" if same and self.ranks in ((), (number,)) else f"node {number}"

    @property
    def name(self) -> str:
        """``chip 0``, or ``node 0 · GPU 1 · rank 1``."""
        parts = [brief_line(self.host, 16), self.short]
        if parts[1].startswith("node"):
            parts += [f"GPU {self.alone.index}"] if self.alone is not None else []
            parts += [_rank_names(self.ranks)] if self.ranks else []
        return " · ".join(filter(None, parts))


def _rank_names(ranks: Sequence[int]) -> str:
    """Return ``rank 0``, or ``ranks 0-3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {cpu_ranges(ranks)}"


# The lines of nodes and GPUs: columns that are the same in all, and as many as have room.


class Table(NamedTuple):
    """The lines, and the names of their columns with the cells at which these begin."""

    lines: list[Cells]
    labels: list[tuple[int, str]]


BAR = 6
"""Cells of a bar."""
ENOUGH_CELLS = {"adam": 16, "main-core": 6, "other": 16}
LEAST_CELLS = {"adam": 10, "main-core": 3, "other": 4}
"""Cells of cores by what they do, as far as there are so many: until they have enough, figures that
are seldom looked at give way.
"""
_CLOSE = {"busy", "temperature", "held", "adam %", "main-core %", "other %", "memory", "cache"}
"""Columns with one cell before them instead of two: they go on with the column before."""
_LABELS = {
    "gpu bar": "GPU",
    "busy": "GPU",
    "adam": "Adam",
    "main-core": "main",
    "other": "cores",
    "memory bar": "host memory",
    "memory": "host memory",
    "C2C": "C2C, GB/s",
    "PCIe": "PCIe, GB/s",
}
_GIVE_WAY_FIRST = ("module", "cache", "clock", "other %", "other")
_GIVE_WAY = (
    "memory bar",
    "gpu bar",
    "PCIe",
    "C2C",
    "temperature",
    "owner",
    "power",
    "main-core %",
    "main-core",
)
"""Columns that are left out first where there is no room."""


def table_of(
    pictures: Sequence[NodePicture],
    loose: Sequence[GpuView],
    width: int,
    glyphs: GlyphName,
    labelled: bool,
) -> Table:
    """Return a line for each node, with its GPU if it has one alone, and for each other GPU."""
    several = len({view.host for view in loose}) > 1
    rows: list[dict[str, Cells]] = []
    for picture in pictures:
        row = {"name": [(picture.name, "title")]}
        if picture.alone is not None:
            row |= _gpu_columns(picture.alone, labelled=labelled)
        rows.append(row | _node_columns_of(picture, labelled=labelled))
    for view in loose:
        host = f"{brief_line(view.host, 16)} · " if several else ""
        name: Cells = [(f"{host}GPU {view.sample.index}", "gpu")]
        rows.append({"name": name} | _gpu_columns(view.sample, labelled=True))
    known = {key for row in rows for key in row}
    busy = [_busy(picture) for picture in pictures]
    roles = [role for role in _SIGNS if any(role in loads for loads in busy)]
    counts = {role: max(len(loads.get(role, ())) for loads in busy) for role in roles}
    if "adam" in counts:  # wider, it would outshine the loss, and says one number
        counts["adam"] = min(counts["adam"], ENOUGH_CELLS["adam"])
    keys = [key for key in _ORDER if key in known or key.removesuffix(" %") in roles]
    widths = {key: max(cells_in(row.get(key, ())) for row in rows) for key in keys}
    widths |= {f"{role} %": 5 for role in roles}

    def taken() -> int:
        return sum(widths[key] + _gap(keys, at) for at, key in enumerate(keys))

    for wanted, dispensable in (
        (ENOUGH_CELLS, _GIVE_WAY_FIRST),
        (LEAST_CELLS, (*_GIVE_WAY, *reversed(_ORDER[:-2]), "foreign")),
    ):
        widths |= {role: min(wanted[role], count) + 2 for role, count in counts.items()}
        for key in dispensable:
            if taken() <= width:
                break
            if key in keys and key != "name" and (key != "other" or len(roles) > 1):
                keys.remove(key)
    shown = [role for role in roles if role in keys]
    spare = width - taken()
    lacking = [counts[role] + 2 - widths[role] for role in shown if spare > 0]
    for role, most, more in zip(
        shown, lacking, cells_of(lacking, min(spare, sum(lacking))), strict=False
    ):
        widths[role] += min(most, more)
    for row, loads in zip(rows, busy, strict=False):
        for role in [role for role in shown if role in loads]:
            bars = _core_cells(loads[role], widths[role] - 2, glyphs)
            row[role] = [(f"{_SIGNS[role]} ", "sign"), (bars, role)]
            row[f"{role} %"] = [(f"{sum(loads[role]) / len(loads[role]):3.0f} %", "label")]
    labels: list[tuple[int, str]] = []
    lines: list[Cells] = [[] for _ in rows]
    at = 0
    for number, key in enumerate(keys):
        gap = _gap(keys, number)
        at += gap
        label = _LABELS.get(key, "")
        if label and (not labels or labels[-1][1] != label):
            labels.append((at, label))
        for line, row in zip(lines, rows, strict=True):
            cells = row.get(key, [])
            line += [(" " * gap, "note"), *cells]
            line.append((" " * (widths[key] - cells_in(cells)), "note"))
        at += widths[key]
    return Table(lines, labels)


def _gap(keys: Sequence[str], at: int) -> int:
    """Return the cells before a column."""
    if at < 2:
        return 2 * at
    return 1 if keys[at] in _CLOSE else 2


_ORDER = (
    "name",
    "gpu bar",
    "busy",
    "gpu memory",
    "power",
    "temperature",
    "held",
    "clock",
    *(key for role in _SIGNS for key in (role, f"{role} %")),
    "memory bar",
    "memory",
    "cache",
    "C2C",
    "PCIe",
    "module",
    "foreign",
    "owner",
)


def _busy(picture: NodePicture) -> dict[str, list[int]]:
    """Return the load of each core of each group, in percent."""
    cores = picture.view.sample.cores
    return {group.role: [cores[at] for at in group.positions] for group in picture.groups}


def _gpu_columns(gpu: GpuSample, *, labelled: bool) -> dict[str, Cells]:
    """Return what is known of a GPU."""
    from so_tui.plan.plan import GPU_MARGIN

    columns: dict[str, Cells] = {}
    if (busy := gpu.busy_percent) is not None:
        columns["gpu bar"] = _bar(busy / 100, "gpu")
        columns["busy"] = [("" if labelled else "GPU ", "gpu"), (f"{busy:3} %", "value")]
    if (used := gpu.memory_used_bytes) is not None and (total := gpu.memory_total_bytes):
        share = used / total
        role = "over" if share > NEARLY_FULL else "full" if share > 1 - GPU_MARGIN else "memory"
        columns["gpu memory"] = [(_of_total(used, total), role)]
    if gpu.power_w is not None:
        columns["power"] = [(_watts(gpu.power_w), "label")]
    if gpu.temperature_c is not None:
        columns["temperature"] = [(f"{gpu.temperature_c:2} °C", "label")]
    if gpu.throttling:
        columns["held"] = [(f"▼ {brief_line(', '.join(gpu.throttling), 24)}", "full")]
    if gpu.clock_mhz is not None:
        columns["clock"] = [(f"{thousands(gpu.clock_mhz):>5} MHz", "label")]
    for name, to_host, to_gpu in (
        ("C2C", gpu.c2c_to_host_bytes_per_s, gpu.c2c_to_gpu_bytes_per_s),
        ("PCIe", gpu.pcie_to_host_bytes_per_s, gpu.pcie_to_gpu_bytes_per_s),
    ):
        if to_host is not None and to_gpu is not None and "C2C" not in columns:
            text = f"{to_host / 1e9:3.0f} out {to_gpu / 1e9:3.0f} in"
            columns[name] = [(text if labelled else f"{name} {text} GB/s", "label")]
    if gpu.module_power_w is not None:
        columns["module"] = [("module ", "note"), (_watts(gpu.module_power_w), "label")]
    return columns


def _node_columns_of(picture: NodePicture, *, labelled: bool) -> dict[str, Cells]:
    """Return what is known of a node besides its cores."""
    sample = picture.view.sample
    used, total = sample.memory_used_bytes, sample.memory_total_bytes
    # File cache gives way, so a node full of it is not full.
    full = used - sample.file_cache_bytes > 0.94 * total
    role = "full" if full else "value"
    columns: dict[str, Cells] = {
        "memory bar": _bar(used / total if total else 0.0, "memory"),
        "memory": [("" if labelled else "host ", "note"), (_of_total(used, total), role)],
        "cache": [(f"cache {memory(sample.file_cache_bytes, 0)}", "note")],
    }
    if foreign := picture.view.foreign:
        first, more = foreign[0], len(foreign) - 1
        text = f"! {brief_line(first.name, 15)} {first.cores:.1f} cores on {first.cpu}"
        columns["foreign"] = [(f"{text}{f' and {more} more' if more else ''}", "full")]
        columns["owner"] = [("your own" if first.own else "of another user", "full")]
    return columns


def _bar(share: float, role: str) -> Cells:
    (filled, _), (rest, _) = map(_as_pair, fill_pieces(share, BAR, role))
    return [(filled, role), (rest, "axis")]


def _as_pair(piece: str | tuple[str, str]) -> tuple[str, str]:
    return (piece, "") if isinstance(piece, str) else piece


def _of_total(used: int, total: int) -> str:
    """Return ``86/117 GiB``, in as many cells whatever is used."""
    most = len(memory_of(total, total, 0))
    return memory_of(used, total, 0).rjust(most).replace(" of ", "/", 1)


def _watts(power_w: float) -> str:
    return f"{thousands(round(power_w)):>3} W"
