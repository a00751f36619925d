"""Cores as cells: one cell a core where there is room, two cores a cell or averages where there is not. Pure data in, text out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from so_tui.ui.glyphs import GlyphName

LEVELS: dict[GlyphName, str] = {"braille": "▁▂▃▄▅▆▇█", "block": "▁▂▃▄▅▆▇█", "ascii": ".:-=+*#@"}
_PAIRS = ((0x40, 0x44, 0x46, 0x47), (0x80, 0xA0, 0xB0, 0xB8))
"""Braille columns filled from below, one to four dots."""
_Members = tuple[str, str, str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """Cores of a node that do one thing; ``sign`` leads them on the row, so that groups differ without colour as well."""

    name: str
    sign: str
    role: str
    loads: tuple[float, ...]
    """Busy share of each core, percent."""
    cpus: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    """Where its cores stand among those of the node."""

    @property
    def mean(self) -> float:
        return sum(self.loads) / len(self.loads) if self.loads else 0.0


def group_cores(
    loads: Sequence[float], cpus: Sequence[int], adam: frozenset[int], main: frozenset[int]
) -> tuple[CoreGroup, ...]:
    """Group a node's cores by the run's use of them; groups without a core are left out."""
    return tuple(
        CoreGroup(name, sign, role, tuple([loads[at] for at in positions]), members, positions)
        for name, sign, role, members, positions in _groups(tuple(cpus[: len(loads)]), adam, main)
    )


@lru_cache(maxsize=64)
def _groups(
    cpus: tuple[int, ...], adam: frozenset[int], main: frozenset[int]
) -> tuple[_Members, ...]:
    """Return name, sign, role, cores and their positions of each group, which stay the same from one sample to the next."""
    by_role: dict[str, list[int]] = {"adam": [], "main": [], "other": []}
    for position, cpu in enumerate(cpus):
        by_role["adam" if cpu in adam else "main" if cpu in main else "other"].append(position)
    names = (("adam", "Adam", "A"), ("main", "main", "m"), ("other", "other", "o"))
    return tuple(
        (name, sign, role, tuple(cpus[at] for at in found), tuple(found))
        for role, name, sign in names
        if (found := by_role[role])
    )


def heat_cells(groups: Sequence[CoreGroup], width: int, glyphs: GlyphName) -> list[tuple[str, str]]:
    """Return one row of ``(text, role)``: each group's sign and its cores, in at most ``width`` cells."""
    room = width - 2 * len(groups)
    cores = sum(len(group.loads) for group in groups)
    per_cell = (
        1
        if cores <= room
        else 2
        if glyphs == "braille" and (cores + len(groups)) // 2 <= room
        else 0
    )
    cells: list[tuple[str, str]] = []
    for group in groups:
        if cells:
            cells.append((" ", "empty"))
        cells.append((group.sign, "sign"))
        if per_cell == 1:
            of_percent = _LEVEL_OF_PERCENT[glyphs]
            shown = [of_percent[min(100, int(load))] for load in group.loads]
        elif per_cell == 2:
            shown = [
                pair(
                    group.loads[index],
                    group.loads[index + 1] if index + 1 < len(group.loads) else None,
                )
                for index in range(0, len(group.loads), 2)
            ]
        else:
            count = max(1, room * len(group.loads) // cores)
            shown = [level(load, glyphs) for load in averaged(group.loads, count)]
        cells.append(("".join(shown), group.role))
    return cells


def level(load: float, glyphs: GlyphName) -> str:
    """Return the character of one core's load (percent)."""
    levels = LEVELS[glyphs]
    return levels[min(len(levels) - 1, max(0, int(load / 100 * len(levels))))]


_LEVEL_OF_PERCENT: dict[GlyphName, list[str]] = {
    glyphs: [level(percent, glyphs) for percent in range(101)] for glyphs in LEVELS
}
"""Looked up, since hundreds of cores are drawn each second."""


def pair(left: float, right: float | None) -> str:
    """Return one braille cell for two cores, four levels each."""
    mask = _PAIRS[0][min(3, int(left / 25))]
    if right is not None:
        mask |= _PAIRS[1][min(3, int(right / 25))]
    return chr(0x2800 + mask)


def averaged(loads: Sequence[float], count: int) -> list[float]:
    """Average neighbours, so that ``count`` means of ``loads`` remain."""
    edges = [index * len(loads) // count for index in range(count + 1)]
    return [
        sum(loads[start:stop]) / (stop - start)
        for start, stop in itertools.pairwise(edges)
        if stop > start
    ]
