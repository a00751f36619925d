"""Memory and time of a run: pure functions from a RunSpec and a Machine to a Plan.

Names are imported when they are used: who only reads plans needs their types alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from so_tui.plan.planner import (
        best_number_of_gpus,
        make_plan,
        plan_table,
        recommend,
        unplannable,
    )
    from so_tui.plan.resources import rank_counts
    from so_tui.plan.show import command_of, plan_tree, plans_json, settings_of


__all__ = [
    "best_number_of_gpus",
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


_MODULES = {
    "show": (
        "command_of",
        "plan_tree",
        "plans_json",
        "settings_of",
    ),
    "planner": (
        "best_number_of_gpus",
        "make_plan",
        "plan_table",
        "recommend",
        "unplannable",
    ),
    "resources": ("rank_counts",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
