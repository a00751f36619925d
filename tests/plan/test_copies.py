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
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.reasons import DISK_BYTES_PER_S
from so_tui.spec import with_values
from tests.support.machines import x86
from tests.support.planning import BIG, QUAD, spec_of


def planned(memory_gib: int, **changes: str) -> Plan:
    machine = x86("NVIDIA H200", gpu_count=1, cores=32, memory_mib=memory_gib * 1024)
    settings = {
        "offload__mode": "superoffload",
        "offload__ratio": "0.9",
        "checkpoint__every_steps": "100",
    } | changes
    return make_plan(spec_of("llama-3.1-8b", gpus="1", **settings), machine)


def behind(plan: Plan) -> SavesBehind | None:
    return next((fact for fact in plan.reasons if isinstance(fact, SavesBehind)), None)


def term_bytes(plan: Plan) -> int:
    return sum(term.bytes for term in plan.breakdown if term.kind == "copies")


@pytest.mark.parametrize(("states", "moments"), [("fp32", 8.0), ("int8-moments", 2 + 2 / 128)])
def test_all_states_are_copied_where_there_is_room(states: str, moments: float) -> None:
    plan = planned(1024, offload__states=states)
    layout = profile_of(plan.spec.model).layout(1, plan.spec.offload)
    expected = (4 + moments) * layout.cpu_numel + 12 * layout.gpu_numel
    assert term_bytes(plan) == pytest.approx(expected, rel=1e-9)
    assert plan.optional.copies_bytes == term_bytes(plan)
    assert behind(plan) == SavesBehind(share=1.0, bytes=term_bytes(plan))
    second = sum(term.bytes for term in plan.breakdown if term.kind == "second-states")
    assert plan.host_optional_bytes == second + term_bytes(plan)


def test_second_states_come_first_and_hold_copies_too() -> None:
    plan = planned(250)
    fact = behind(plan)
    assert fact is not None
    assert plan.fits
    assert (
        fact.share == 1.0
    )  # of those on the GPU in copies of their own, of the others in second states
    assert 0 < fact.bytes < behind(planned(1024)).bytes  # type: ignore[union-attr]


def seconds_of_1000_steps(plan: Plan) -> float:
    """Return how long they take with a checkpoint every half an hour, on a disk that takes 1 GB/s.

    Training waits for what is not copied. While second states hold copies, which are written first,
    their sub-groups are held back.
    """
    step_s, write_s, saves = plan.step_s or 0.0, plan.disk_bytes / DISK_BYTES_PER_S, behind(plan)
    assert saves is not None
    early = next((fact for fact in plan.reasons if isinstance(fact, StepsEarly)), None)
    held_back_s = (
        (early.share * write_s * (1 - step_s / early.held_back_step_s))
        if early and early.held_back_step_s
        else 0.0
    )
    return 1000 * step_s * (1 + ((1 - saves.share) * write_s + held_back_s) / 1800)


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
    spec = with_values(
        recommend(spec_of(model, gpus=str(gpus)), machine, gpus).spec,
        {"checkpoint.every_minutes": "30"},
    )
    planned_s = seconds_of_1000_steps(make_plan(spec, machine))
    copies_first_s = seconds_of_1000_steps(
        make_plan(with_values(spec, {"offload.speculation": "off"}), machine)
    )
    assert (round(planned_s / 60), round(copies_first_s / 60)) == minutes
    assert planned_s < 1.01 * copies_first_s


@pytest.mark.parametrize(
    ("share", "copied_bytes", "shown"),
    [(0.0, 0, ()), (0.6, 3 << 30, ("60%", "40%", "3.0 GiB")), (1.0, 0, ("second",))],
)
def test_plan_says_what_is_copied(share: float, copied_bytes: int, shown: tuple[str, ...]) -> None:
    """And what training waits for."""
    text = SavesBehind(share=share, bytes=copied_bytes).message
    assert all(part in text for part in shown), text
    assert ("waits" in text) == (share < 1)


def test_full_host_holds_fewer_copies_or_none() -> None:
    shares = [
        fact.share
        for gib in (150, 170, 200)
        if (fact := behind(planned(gib, train__gradient_clipping="0")))
    ]
    assert 0 <= shares[0] < shares[1] < shares[2] <= 1
    assert planned(170, train__gradient_clipping="0").verdict == "fits"
    given = planned(1024, checkpoint__copies_gib="10", train__gradient_clipping="0")
    assert 0 < term_bytes(given) <= 10 * 2**30


def test_a_later_attempt_gets_what_its_host_has_then() -> None:
    """What a plan gives to copies and second states is no limit of the run's: it may be resumed on
    a larger host.
    """
    before = planned(170)
    given = planned(170, offload__speculation_gib="3", checkpoint__copies_gib="2")
    assert before.optional.second_states_bytes > 0
    machine = x86("NVIDIA H200", gpu_count=1, cores=32, memory_mib=1024 * 1024)
    assert make_plan(before.spec, machine).optional == planned(1024).optional
    limited = make_plan(given.spec, machine).optional
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
    assert behind(plan) is None
    assert term_bytes(plan) == plan.optional.copies_bytes == 0


@pytest.mark.parametrize(
    ("states", "each"), [("fp32", 0), ("bf16-moments", 8), ("int8-moments", 8)]
)
def test_moments_that_are_decoded_for_the_disk_are_planned(states: str, each: int) -> None:
    plan = planned(1024, offload__states=states, offload__ratio="1")
    layout = profile_of(plan.spec.model).layout(1, plan.spec.offload)
    saving = sum(term.bytes for term in plan.breakdown if term.kind == "saving")
    assert saving == each * max(group.numel for group in layout.sub_groups)


def test_engine_chooses_the_same_copies_from_its_budget() -> None:
    sizes = [copy_bytes("int8-moments") * numel for numel in (300, 1000, 50, 700, 20)]
    for budget in range(0, 22_000, 100):
        chosen = copied(sizes, (1, 3), budget)
        assert copied(sizes, (1, 3), sum(sizes[index] for index in chosen)) == chosen
