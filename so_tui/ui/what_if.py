"""Plans beside the one that is shown: the same run with another offload ratio, or another share of cores for Adam. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from so_tui.spec import InputError, with_values
from so_tui.ui.stepping import beyond

if TYPE_CHECKING:
    from so_tui.machine.types import Machine
    from so_tui.plan.accuracy import StepError
    from so_tui.plan.types import Plan

RATIO = "offload.ratio"
CORES = "offload.cpu_adam_cores_fraction"
VALUES = {
    RATIO: tuple(step / 10 for step in range(11)),
    CORES: tuple(step / 10 for step in range(1, 10)),
}
"""The values that a strip shows, ascending."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One value, and what the plan says with it."""

    value: float
    step_s: float | None
    gpu_bytes: int | None
    gpu_capacity_bytes: int | None
    host_bytes: int | None
    verdict: str
    """``fits``, ``tight`` or ``does not fit``."""
    step_error: StepError | None = None


@dataclass(frozen=True, slots=True)
class Strip:
    """The choices of one field."""

    path: str
    choices: tuple[Choice, ...]
    present: float

    @property
    def at(self) -> int:
        """The choice nearest to the present value."""
        return min(
            range(len(self.choices)),
            key=lambda index: abs(self.choices[index].value - self.present),
        )

    def stepped(self, direction: int) -> float | None:
        """Return the next value in a direction; None at the end."""
        return beyond((choice.value for choice in self.choices), self.present, direction)


def strips_for(
    plan: Plan, machine: Machine, cancelled: Callable[[], bool] = lambda: False
) -> tuple[Strip, ...] | None:
    """Return what other values would do; nothing where the plan offloads nothing; None if it was cancelled meanwhile."""
    if plan.mode == "gpu" or not plan.possible:
        return ()
    present = {RATIO: plan.ratio}
    if plan.mode == "superoffload" and plan.binding and plan.binding[0].adam_cpus:
        present[CORES] = plan.spec.offload.cpu_adam_cores_fraction
    strips = []
    for path, value in present.items():
        choices = []
        for other in sorted({*VALUES[path], round(value, 6)}):
            if cancelled():
                return None
            if (choice := _choice(plan, machine, path, other)) is not None:
                choices.append(choice)
        if choices:
            strips.append(Strip(path, tuple(choices), value))
    return tuple(strips)


def _choice(plan: Plan, machine: Machine, path: str, value: float) -> Choice | None:
    """Return the plan with another value; None where this run cannot have it."""
    from so_tui.plan import make_plan

    try:
        other = make_plan(
            with_values(plan.spec, {"offload.mode": plan.mode, path: f"{value:g}"}), machine
        )
    except InputError:
        return None
    hosts = other.host_bytes_per_node.values()
    most = max(hosts) if hosts else None
    return Choice(
        value,
        other.step_s,
        other.gpu_bytes,
        other.gpu_capacity_bytes,
        most,
        other.verdict,
        other.step_error,
    )
