"""What all applications of a session would work out again: style sheets, the plan table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from textual.cache import LRUCache
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from so_tui.folders import state_home
from so_tui.machine.types import Machine
from so_tui.plan.plan import PlanRow
from so_tui.plan.planner import plan_table
from so_tui.spec.run_spec import Preset

_rules: dict[frozenset[tuple[str, str]], LRUCache[tuple[Any, ...], list[RuleSet]]] = {}
_tables: dict[bytes, tuple[PlanRow, ...]] = {}


def share_work(patch: pytest.MonkeyPatch) -> None:
    """Have applications use what an earlier one of this process has worked out."""
    begin, set_variables = Stylesheet.__init__, Stylesheet.set_variables

    def begin_sharing(sheet: Stylesheet, *, variables: dict[str, str] | None = None) -> None:
        begin(sheet, variables=variables)
        _share_rules(sheet, variables or {})

    def go_on_sharing(sheet: Stylesheet, variables: dict[str, str]) -> None:
        sheet._parse_cache = LRUCache(1)  # to be cleared, instead of the one that others use
        set_variables(sheet, variables)
        _share_rules(sheet, variables)

    patch.setattr(Stylesheet, "__init__", begin_sharing)
    patch.setattr(Stylesheet, "set_variables", go_on_sharing)
    patch.setattr("so_tui.plan.planner.plan_table", _planned)


def _share_rules(sheet: Stylesheet, variables: dict[str, str]) -> None:
    """Parse each style sheet once for the colours of a theme; nothing changes its rules."""
    sheet._parse_cache = _rules.setdefault(frozenset(variables.items()), LRUCache(1000))


def _planned(
    presets: Sequence[Preset], machine: Machine, counts: Sequence[int]
) -> tuple[PlanRow, ...]:
    """Plan the same presets once, unless the state folder has what plans may read."""
    if any(state_home().rglob("*.json")):
        return plan_table(presets, machine, counts)
    asked = msgspec.msgpack.encode((presets, machine, counts))
    if asked not in _tables:
        _tables[asked] = plan_table(presets, machine, counts)
    return _tables[asked]
