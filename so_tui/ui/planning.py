"""The plan of what is in Configure, made in a worker and answered with messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from so_tui.spec import InputError, Problem, Refused, RunSpec, with_values
from so_tui.ui.messages import Compared, Planned
from so_tui.ui.what_if import strips_for

if TYPE_CHECKING:
    from so_tui.machine.types import Machine


def answers(
    serial: int,
    base: RunSpec,
    edits: dict[str, str],
    machine: Machine,
    described: bool,
    cancelled: Callable[[], bool],
) -> Iterator[Planned | Compared]:
    """Yield the plan, or what is wrong with the values, and then what other values would do, unless that is not wanted any more.

    ``described`` machines are planned for as they are; this one as the run finds it.
    """
    from so_tui.launch import machine_of, preview

    try:
        spec = with_values(base, edits)
        planned_for = machine if described else machine_of(spec, machine)
        plan, launch = preview(spec, planned_for)
    except InputError as error:
        yield Planned(serial, None, error.problems)
        return
    except Refused as error:
        problems = (
            Problem(
                code=error.codes[0], field="gpus", value="", message=error.reasons[0], remedy=""
            ),
        )
        yield Planned(serial, None, problems)
        return
    yield Planned(serial, plan, (), launch)
    strips = strips_for(plan, planned_for, cancelled)
    if strips is not None:
        yield Compared(serial, strips)
