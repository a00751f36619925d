"""Presets and facts for tests of planning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from msgspec.structs import replace
from rich.console import Console

from so_tui.machine import Machine
from so_tui.plan.notes import Fact
from so_tui.plan.plan import Plan, StepTime
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.rates import SpeedSource
from so_tui.plan.terms import TermKind
from so_tui.plan.workload import Workload
from so_tui.spec import RunSpec, load_catalog, with_values
from tests.support.machines import superchips, x86

CATALOG = load_catalog()
QUAD = superchips(4)
BIG = superchips(1, node_mib=490_037, name="NVIDIA GH200 480GB")
CPU_ONLY = x86(cores=4, memory_mib=16 * 1024)
H200 = x86("NVIDIA H200")

F = TypeVar("F")


def some(found: F | None) -> F:
    """Return what must be there."""
    assert found is not None
    return found


def spec_of(name: str, **changes: str) -> RunSpec:
    """Return a preset's spec with changes; ``__`` stands for the dot of a key."""
    return with_values(
        CATALOG.presets[name].spec,
        {key.replace("__", "."): value for key, value in changes.items()},
    )


def long_spec(tokens: int, preset: str = "qwen3-4b-random", **changes: str) -> RunSpec:
    """Return a preset's spec for one sequence of so many tokens per step, on one GPU."""
    one = {
        "gpus": "1",
        "train__micro_batch": "1",
        "train__gradient_accumulation": "1",
        "data__sequence_length": str(tokens),
    }
    return spec_of(preset, **one | changes)


def planned(
    name: str, machine: Machine, workload: Workload | None = None, /, **changes: str
) -> Plan:
    return make_plan(spec_of(name, **changes), machine, workload=workload)


def recommended(name: str, machine: Machine, **changes: str) -> Plan:
    """Return the best plan of a preset with changes, on one GPU unless they say otherwise."""
    return recommend(spec_of(name, **{"gpus": "1"} | changes), machine)


def begun_with(name: str, **changes: str) -> RunSpec:
    """Return a preset's spec with changes that only say where a search begins."""
    return replace(spec_of(name, **changes), fixed=("gpus",))


def step_of(plan: Plan) -> StepTime:
    return some(plan.step)


def source_of(plan: Plan) -> SpeedSource:
    return some(plan.speed_source)


def facts_of(found: Iterable[Fact], kind: type[F]) -> list[F]:
    return [fact for fact in found if isinstance(fact, kind)]


def only(found: Iterable[Fact], kind: type[F]) -> F:
    (fact,) = facts_of(found, kind)
    return fact


def bytes_at(plan: Plan, location: str) -> int:
    return sum(term.bytes for term in plan.breakdown if term.location == location)


def bytes_of(plan: Plan, kind: TermKind) -> int:
    return sum(term.bytes for term in plan.breakdown if term.kind == kind)


def shown(renderable: object, width: int) -> str:
    """Return what a terminal of this width shows."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()
