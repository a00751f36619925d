"""A launch for people: verdict, binding beside what DeepSpeed alone would do, environment with reasons, and the command to copy."""

from __future__ import annotations

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from so_tui.launch import environment
from so_tui.launch.preparation import Launch
from so_tui.machine import cpu_ranges
from so_tui.machine.types import Machine
from so_tui.plan.messages import deepspeed_text
from so_tui.plan.types import MemoryPolicy, RankBinding

_VERDICTS = {"fits": ("✓", "bold green"), "tight": ("~", "bold yellow"), "does not fit": ("✗", "bold red")}


def render_launch(launch: Launch, machine: Machine) -> RenderableType:
    """What ``run --dry-run`` prints."""
    plan = launch.plan
    sign, style = _VERDICTS[plan.verdict]
    title = Text.assemble((f"{sign} {plan.verdict}", style), f"  {plan.spec.label} on {machine.label}: {plan.mode}, ratio {plan.ratio:g}")
    notes = [Text(f"  {reason}") for reason in plan.reason_texts] + [
        Text(f"  ~ {warning}", style="yellow") for warning in plan.warning_texts
    ]
    return Group(
        title,
        *notes,
        Text(),
        _binding(plan.binding),
        Text(),
        _environment(launch.env),
        Text(),
        Text("the command", style="bold"),
        Text(shlex.join(launch.argv), overflow="fold"),
    )


def _binding(ranks: tuple[RankBinding, ...]) -> Table:
    table = Table(box=None, pad_edge=False, title="binding", title_justify="left", title_style="bold")
    for heading in ("rank", "GPU", "node", "cores", "memory", "DeepSpeed with our list", "DeepSpeed by itself"):
        table.add_column(heading)
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            "none" if rank.gpu is None else str(rank.gpu),
            "unknown" if rank.numa_node is None else str(rank.numa_node),
            cpu_ranges(rank.cpus),
            _policy(rank.memory_policy),
            deepspeed_text(rank.deepspeed),
            deepspeed_text(rank.deepspeed_unlisted or rank.deepspeed),
        )
    return table


def _environment(changes: tuple[environment.Variable, ...]) -> Table:
    table = Table(box=None, pad_edge=False, title="environment", title_justify="left", title_style="bold")
    for heading in ("variable", "value", "why"):
        table.add_column(heading, overflow="fold")
    shown = environment.shown(changes)
    for change in changes:
        table.add_row(change.name, Text("removed", style="dim") if change.value is None else shown[change.name], change.reason)
    return table


def _policy(policy: MemoryPolicy) -> str:
    return policy.mode if policy.mode == "default" else f"{policy.mode} {','.join(map(str, policy.nodes))}"
