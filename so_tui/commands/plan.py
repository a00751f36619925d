"""``plan``."""

from __future__ import annotations

import argparse

from so_tui.commands.common import chosen_machine, chosen_spec, print_json, print_rich
from so_tui.spec import load_catalog


def plan(arguments: argparse.Namespace) -> int:
    """The models x GPU counts table of a machine, or one plan with its arithmetic."""
    from so_tui.plan import make_plan, plan_table, plans_json, recommend
    from so_tui.plan.show import render_plan, render_table

    machine = chosen_machine(arguments)
    if arguments.preset:
        spec = chosen_spec(arguments)
        chosen = make_plan(spec, machine) if arguments.as_given or arguments.set else recommend(spec, machine)
        if arguments.json:
            print_json(plans_json([chosen]))
        else:
            print_rich(render_plan(chosen, machine))
        return 0 if chosen.fits else 3
    catalog = load_catalog()
    rows = plan_table(list(catalog.presets.values()), machine)
    if arguments.json:
        print_json(plans_json([cell for row in rows for cell in row.cells.values()]))
    else:
        print_rich(render_table(rows, machine), *(str(problem) for problem in catalog.problems))
    return 0
