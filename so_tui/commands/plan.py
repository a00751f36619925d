"""``plan`` and ``presets``."""

from __future__ import annotations

import argparse

from so_tui.commands.common import chosen_machine, chosen_spec, print_json, print_rich
from so_tui.spec import find_preset, load_catalog, spec_tree


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


def presets(arguments: argparse.Namespace) -> int:
    """The catalog, or one preset as TOML. A bad user preset is reported and makes the exit code 2."""
    import tomli_w

    if arguments.preset:
        tree = spec_tree(find_preset(arguments.preset).spec)
        if arguments.json:
            print_json(tree)
        else:
            print(tomli_w.dumps(tree), end="")
        return 0
    catalog = load_catalog()
    if arguments.json:
        listed = [
            {
                "name": name,
                "title": preset.spec.label,
                "gpus": preset.spec.ranks,
                "model": preset.spec.model.id,
                "origin": preset.origin,
                "path": preset.path,
            }
            for name, preset in catalog.presets.items()
        ]
        print_json({"presets": listed, "problems": [str(problem) for problem in catalog.problems]})
    else:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for heading in ("name", "model", "GPUs", "tokens", "from"):
            table.add_column(heading, justify="right" if heading in ("GPUs", "tokens") else "left", header_style="bold")
        for name, preset in catalog.presets.items():
            table.add_row(name, preset.spec.label, str(preset.spec.ranks), str(preset.spec.data.sequence_length), preset.origin)
        print_rich(table, *(f"problem: {problem}" for problem in catalog.problems))
    return 2 if catalog.problems else 0
