"""Memory and time of a run: pure functions from a RunSpec and a Machine to a Plan.

Names are imported when they are used: who only reads plans needs their types alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from so_tui.plan.planner import command_of, make_plan, plan_table, plan_tree, plans_json, recommend, settings_of, unplannable
    from so_tui.plan.resources import rank_counts

__all__ = [
    "command_of",
    "make_plan",
    "plan_table",
    "plan_tree",
    "plans_json",
    "rank_counts",
    "recommend",
    "settings_of",
    "unplannable",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{'resources' if name == 'rank_counts' else 'planner'}"), name)
