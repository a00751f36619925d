"""A launch as ``run --dry-run`` shows it: verdict, binding, environment with reasons, overridden
settings and the command; or as JSON.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from so_tui.launch import command
from so_tui.launch.executors import executor_of
from so_tui.machine import cpu_ranges
from so_tui.plan.binding import deepspeed_text
from so_tui.plan.plan import Binding, DeepSpeedBinding, Launch, MemoryPolicy, Variable
from so_tui.plan.show import plan_tree, render_saving, verdict_lines
from so_tui.trust.decoding import Tree
from so_tui.trust.text import printable, printable_line, quoted
from superoffload.ds_config import Override, overrides


class ShownBinding(Struct, frozen=True, kw_only=True):
    """The binding of a rank in ``run --dry-run --json``."""

    rank: int
    gpu: int | None
    numa_node: int | None
    cpus: tuple[int, ...]
    memory_policy: MemoryPolicy
    deepspeed: DeepSpeedBinding
    """What DeepSpeed's launcher does with our core list, and below without it."""
    deepspeed_unlisted: DeepSpeedBinding | None = field(name="deepspeed_alone")


class ShownLaunch(Struct, frozen=True, kw_only=True):
    """What ``run --dry-run --json`` prints."""

    argv: tuple[str, ...]
    env: dict[str, str | None]
    """Changes of the environment; None removes a variable."""
    placeholders: dict[str, str]
    """What stands in ``argv`` and ``env`` for values that are known at the start, and their
    meanings.
    """
    ds_config: Tree
    binding: tuple[ShownBinding, ...]
    plan: Tree
    """As ``plan_tree`` returns it."""
    batch_script: str


def render_launch(launch: Launch) -> RenderableType:
    """Return what ``run --dry-run`` prints of the plan and of the environment."""
    plan = launch.plan
    overridden = overrides(launch.ds_config)
    return Group(
        Text(f"on {printable_line(launch.machine.label)}"),
        *verdict_lines(plan),
        Text(),
        render_saving(plan),
        Text(),
        _binding(plan.binding),
        Text(),
        _environment(launch.environment),
        *((Text(), _overrides(overridden)) if overridden else ()),
        Text(),
    )


def render_start(launch: Launch) -> RenderableType:
    """Return the command and the batch script of ``run --dry-run``: to be copied, so it must not be
    wrapped.
    """
    script = executor_of(launch.spec).preview(launch)
    return Group(
        Text("the command", style="bold"),
        Text(quoted(*launch.argv)),
        *(
            Text(f"  {name}: {meaning}, known at the start", style="dim")
            for name, meaning in _placeholders(launch).items()
        ),
        *(
            (Text(), Text("the batch script", style="bold"), Text(printable(script)))
            if script
            else ()
        ),
    )


def shown_launch(launch: Launch) -> ShownLaunch:
    """Return what ``run --dry-run --json`` prints."""
    return ShownLaunch(
        argv=launch.argv,
        env=command.shown(launch.environment),
        placeholders=_placeholders(launch),
        ds_config=launch.ds_config,
        binding=msgspec.convert(
            launch.plan.binding, tuple[ShownBinding, ...], from_attributes=True
        ),
        plan=plan_tree(launch.plan),
        batch_script=executor_of(launch.spec).preview(launch),
    )


def _placeholders(launch: Launch) -> dict[str, str]:
    texts = (*launch.argv, *(change.value for change in launch.environment))
    return {name: meaning for name, meaning in command.MEANINGS.items() if name in texts}


def _binding(ranks: Binding) -> Table:
    table = _table(
        "binding",
        "rank",
        "GPU",
        "node",
        "cores",
        "memory",
        "DeepSpeed with our core list",
        "DeepSpeed without it",
    )
    for rank in ranks:
        policy = rank.memory_policy
        nodes = "" if policy.mode == "default" else f" {','.join(map(str, policy.nodes))}"
        table.add_row(
            str(rank.rank),
            "none" if rank.gpu is None else str(rank.gpu),
            "unknown" if rank.numa_node is None else str(rank.numa_node),
            cpu_ranges(rank.cpus),
            policy.mode + nodes,
            deepspeed_text(rank.deepspeed),
            deepspeed_text(rank.deepspeed_unlisted or rank.deepspeed),
        )
    return table


def _environment(changes: tuple[Variable, ...]) -> Table:
    table = _table("environment", "variable", "value", "why")
    shown = command.shown(changes)
    for change in changes:
        table.add_row(
            change.name,
            Text("removed", style="dim")
            if change.value is None
            else printable_line(shown[change.name] or ""),
            change.reason,
        )
    return table


def _overrides(overridden: tuple[Override, ...]) -> Table:
    table = _table("DeepSpeed settings that the engine overrides", "key", "given", "used", "why")
    for override in overridden:
        table.add_row(override.key, _json(override.given), _json(override.used), override.reason)
    return table


def _table(title: str, *headings: str) -> Table:
    return Table(
        *(Column(heading, overflow="fold") for heading in headings),
        box=None,
        pad_edge=False,
        title=title,
        title_justify="left",
        title_style="bold",
    )


def _json(value: object) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()
