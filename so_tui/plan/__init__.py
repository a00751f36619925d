"""What a run needs and how fast it will be: pure functions from a RunSpec and a Machine to a Plan."""

from so_tui.plan.planner import command_of, make_plan, plan_table, plans_json, recommend, settings_of, unplannable
from so_tui.plan.site import rank_counts

__all__ = ["command_of", "make_plan", "plan_table", "plans_json", "rank_counts", "recommend", "settings_of", "unplannable"]
