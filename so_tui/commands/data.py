"""``data`` and ``fetch``: what goes into a run, seen and downloaded before it starts."""

from __future__ import annotations

import argparse
from typing import Any

from so_tui.commands.common import chosen_spec, print_json, print_rich
from so_tui.spec import spec_tree


def data(arguments: argparse.Namespace) -> int:
    """Counts of the data set and a few rows as the model sees them, trained tokens coloured."""
    from so_tui.launch.helpers import call_tool

    answer = call_tool("data", {"spec": spec_tree(chosen_spec(arguments)), "rows": arguments.rows})
    if arguments.json:
        print_json(answer)
        return 0
    from rich.table import Table
    from rich.text import Text

    counts = Table(box=None, show_header=False, pad_edge=False)
    for name in ("rows", "tokens", "trained_tokens", "truncated", "dropped", "sequences"):
        if name in answer:
            counts.add_row(name.replace("_", " "), f"{answer[name]:,}")
    counts.add_row("packing efficiency", f"{100 * answer['packing_efficiency']:.1f} %")
    print_rich(
        counts,
        "",
        Text("rows as the model sees them: ").append("trained tokens", style="bold green").append(" and ").append("context", style="dim"),
    )
    for number, sample in enumerate(answer["samples"], start=1):
        print_rich(Text(f"── row {number} ", style="dim"), _coloured(sample))
    return 0


def _coloured(sample: dict[str, Any]) -> Any:
    """One row as rich text; ``pieces`` is a list of [text, trained]."""
    from rich.text import Text

    text = Text()
    for piece, trained in sample["pieces"]:
        text.append(piece, style="bold green" if trained else "dim")
    return text


def fetch(arguments: argparse.Namespace) -> int:
    """Download what a preset needs; prints a line for each file."""
    from so_tui.launch.helpers import stream_tool

    for event in stream_tool("fetch", {"spec": spec_tree(chosen_spec(arguments))}):
        if message := event.get("message"):
            print(message, flush=True)
    return 0
