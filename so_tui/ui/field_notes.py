"""Notes that a plan adds to single fields of the form. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from so_tui.trust.printable import printable_line
from so_tui.ui.form import LENGTH, LENGTH_KEYS
from so_tui.ui.widgets import plan_view
from so_tui.units import plural, thousands

if TYPE_CHECKING:
    from so_tui.launch.executors.slurm.partitions import Partition
    from so_tui.machine.types import Machine
    from so_tui.plan.types import Plan
    from so_tui.spec import Problem


def impossible_field(plan: Plan | None) -> tuple[str, str]:
    """Return the field that makes a plan impossible on its machine and the reason; two empty strings where none does."""
    from so_tui.plan.facts.blockers import NoSuchGpu, TooFewGpus

    if plan is None or plan.possible:
        return "", ""
    field = "gpus" if isinstance(plan.reasons[0], TooFewGpus | NoSuchGpu) else "offload.mode"
    return field, plan.reason_texts[0]


def problems_by_row(problems: Sequence[Problem]) -> dict[str, str]:
    """Return what to do about each row of the form that is wrong; a source of a mixture has no row of its own."""
    found: dict[str, str] = {}
    for problem in problems:
        path = LENGTH if problem.field in LENGTH_KEYS else problem.field.partition("[")[0]
        found.setdefault(path, problem.remedy or f"{problem.message}.")
    return found


def field_note(path: str, plan: Plan | None, machine: Machine | None, given_mode: str) -> str:
    """Return what the plan derives from a field, where that says more than its range. ``given_mode`` is the offload mode in the form."""
    if path == "gpus" and machine is not None:
        return f"of {len(machine.gpus)}, or a list" if machine.gpus else "ranks: no GPU here"
    if plan is None:
        return ""
    if path == "offload.mode" and plan.spec.offload.mode != given_mode:
        return f"→ {plan.mode}"
    if path == "train.gradient_accumulation":
        gradient_accumulation_steps = (
            f"{plan.spec.gradient_accumulation_steps} " if plan.spec.train.tokens_per_step else ""
        )
        return f"{gradient_accumulation_steps}= {thousands(plan.tokens_per_step)} tokens"
    if path == LENGTH and plan.spec.train.steps:
        return plan_view.run_duration(plan)
    if path == "offload.cpu_adam_cores_fraction" and plan.binding and plan.binding[0].adam_cpus:
        rank = plan.binding[0]
        return f"Adam {len(rank.adam_cpus)}, main {len(rank.main_cpus)}{' a rank' if len(plan.binding) > 1 else ''}"
    return ""


def partition_note(partitions: Sequence[Partition], chosen: str, *, slurm: bool) -> str:
    """Return what the chosen partition offers, what it may be, or why none can be named here."""
    if not slurm:
        return "no Slurm here"
    found = next((partition for partition in partitions if partition.name == chosen), None)
    if found is None:
        return (
            printable_line(", ".join(partition.name for partition in partitions)) or "empty: here"
        )
    parts = [
        "" if found.open else "closed now",
        f"{found.idle} of {plural(found.nodes, 'node')} free",
        f"{plural(found.gpus, 'GPU')} each" if found.gpus else "",
        f"at most {found.time_limit}" if found.time_limit else "",
    ]
    return printable_line(", ".join(filter(None, parts)))
