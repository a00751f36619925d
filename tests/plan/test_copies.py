"""The memory that a plan gives to copies of states, from which checkpoints are written while
training goes on.
"""

from __future__ import annotations

import pytest

from so_tui.machine.types import Machine
from so_tui.model.profile import profile_of
from so_tui.model.sharding import copied, copy_bytes
from so_tui.plan.notes import SavesBehind, StepsEarly
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan
from so_tui.plan.reasons import DISK_BYTES_PER_S
from so_tui.spec import with_values
from tests.support import planning
from tests.support.machines import x86
from tests.support.planning import BIG, QUAD, bytes_of, facts_of, only, recommended

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
    # Of those on the GPU in copies of their own, of the others in second states.
    assert behind(plan).share == 1.0
    assert 0 < behind(plan).bytes < behind(planned(1024)).bytes


def seconds_of_1000_steps(plan: Plan) -> float:
    """Return how long they take with a checkpoint every half an hour, on a disk that takes 1 GB/s.

    Training waits for what is not copied. While second states hold copies, which are written first,
    their sub-groups are held back.
    """
    step_s, write_s = plan.step_s or 0.0, plan.disk_bytes / DISK_BYTES_PER_S
    held_back_s = sum(
        early.share * write_s * (1 - step_s / early.held_back_step_s)
        for early in facts_of(plan.reasons, StepsEarly)
        if early.held_back_step_s
    )
    return 1000 * step_s * (1 + ((1 - behind(plan).share) * write_s + held_back_s) / 1800)


@pytest.mark.parametrize(
    ("model", "gpus", "machine", "minutes"),
    [
        ("gpt-oss-20b", 1, BIG, (54, 77)),
        ("llama-3.1-8b", 1, QUAD, (32, 33)),
        ("phi-4", 1, BIG, (59, 75)),
        ("phi-4", 2, QUAD, (70, 70)),
    ],
)
def test_memory_gains_more_as_second_states_than_as_copies(
    model: str, gpus: int, machine: Machine, minutes: tuple[int, int]
) -> None:
    """The minutes of 1000 steps in docs/checkpoints.md: as planned, and with copies first, which
    leaves these hosts no second states.
    """
    saving = {"checkpoint.every_minutes": "30"}
    spec = with_values(recommended(model, machine, gpus=str(gpus)).spec, saving)
    copies_first = with_values(spec, {"offload.speculation": "off"})
    planned_s, other_s = (
        seconds_of_1000_steps(make_plan(one, machine)) for one in (spec, copies_first)
    )
    assert (round(planned_s / 60), round(other_s / 60)) == minutes
    assert planned_s < 1.01 * other_s


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
        {"checkpoint__every_steps": "0"},
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
