"""The memory that a plan gives to copies of states, from which checkpoints are written while
training goes on.
"""

from __future__ import annotations

import pytest

from so_tui.machine.types import Machine
from so_tui.model.profile import profile_of
from so_tui.model.sharding import copied, copy_bytes
from so_tui.plan.notes import SavesBehind
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import bytes_of, facts_of, only

UNCLIPPED = {"train__gradient_clipping": "0"}
"""So that no second states take the memory first."""


def host(memory_gib: int) -> Machine:
    return x86("NVIDIA H200", cores=32, memory_mib=memory_gib * 1024)


def planned(memory_gib: int, **changes: str) -> Plan:
    given = {"gpus": "1", "offload__mode": "superoffload", "offload__ratio": "0.9"}
    given |= {"checkpoint__every_steps": "100"}
    return planning.planned("llama-3.1-8b", host(memory_gib), **given | changes)


def behind(plan: Plan) -> SavesBehind:
    return only(plan.reasons, SavesBehind)


@pytest.mark.parametrize(
    ("states", "moments", "decoded"), [("fp32", 8.0, 0), ("int8-moments", 2 + 2 / 128, 8)]
)
def test_all_states_are_copied_where_there_is_room(
    states: str, moments: float, decoded: int
) -> None:
    """And memory is planned for moments that are decoded for the disk."""
    plan = planned(1024, offload__states=states)
    layout, size = (
        profile_of(plan.spec.model).layout(1, plan.spec.offload),
        bytes_of(plan, "copies"),
    )
    expected = (4 + moments) * layout.cpu_numel + 12 * layout.gpu_numel
    assert size == plan.optional.copies_bytes == pytest.approx(expected, rel=1e-9)
    assert behind(plan) == SavesBehind(share=1.0, bytes=size)
    assert plan.host_optional_bytes == bytes_of(plan, "second-states") + size
    whole = planned(1024, offload__states=states, offload__ratio="1")
    largest = max(group.numel for group in layout.sub_groups)
    assert bytes_of(whole, "saving") == decoded * largest


def test_second_states_come_first_and_hold_copies_too() -> None:
    plan = planned(250)
    assert plan.fits
    # States on the GPU have copies of their own; the others are in second states.
    assert behind(plan).share == 1.0
    assert 0 < behind(plan).bytes < behind(planned(1024)).bytes


def test_full_host_holds_fewer_copies_or_none() -> None:
    plans = [planned(gib, **UNCLIPPED) for gib in (150, 170, 200)]
    shares = [behind(plan).share for plan in plans]
    assert 0 <= shares[0] < shares[1] < shares[2] <= 1
    assert plans[1].verdict == "fits"
    given = planned(1024, checkpoint__copies_gib="10", **UNCLIPPED)
    assert 0 < bytes_of(given, "copies") <= 10 * 2**30


def test_a_later_attempt_gets_what_its_host_has_then() -> None:
    """What a plan gives to copies and second states is no limit of the run's: it may be resumed on
    a larger host.
    """
    before = planned(170)
    given = planned(170, offload__speculation_gib="3", checkpoint__copies_gib="2")
    assert before.optional.second_states_bytes > 0
    assert make_plan(before.spec, host(1024)).optional == planned(1024).optional
    limited = make_plan(given.spec, host(1024)).optional
    assert (limited.second_states_bytes, limited.copies_bytes <= 2 * 2**30) == (3 * 2**30, True)


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint__every_steps": "0", "checkpoint__every_minutes": "0"},
        {"checkpoint__background": "false"},
        {"offload__engine": "deepspeed"},
        {"offload__mode": "zerooffload"},
    ],
)
def test_runs_that_write_nothing_behind_their_training_get_none(change: dict[str, str]) -> None:
    plan = planned(1024, **change)
    assert not facts_of(plan.reasons, SavesBehind)
    assert bytes_of(plan, "copies") == plan.optional.copies_bytes == 0


def test_engine_chooses_the_same_copies_from_its_budget() -> None:
    sizes = [copy_bytes("int8-moments") * numel for numel in (300, 1000, 50, 700, 20)]
    for budget in range(0, 22_000, 100):
        chosen = copied(sizes, (1, 3), budget)
        assert copied(sizes, (1, 3), sum(sizes[index] for index in chosen)) == chosen
