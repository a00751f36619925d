"""Memory and time of a run: pure functions from a RunSpec and a Machine to a Plan."""

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
