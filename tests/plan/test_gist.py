"""What a plan comes to: its limit, what would make it faster, and the spare copy on the host."""

from __future__ import annotations

import io

from msgspec.structs import replace
from rich.console import Console

from so_tui.machine.known import named_machine
from so_tui.plan.gist import Limit, faster_than, limit_of, other_cautions, spare_bytes
from so_tui.plan.notes import FasterAttention, LargerSteps, MemoryNeeded, Note, StepsEarly
from so_tui.plan.plan import StepTime
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.show import render_plan
from so_tui.spec import find_preset, with_values
from tests.support.planning import only

GH200 = named_machine("gh200-480")
PLAN = recommend(find_preset("qwen3-14b").spec, GH200)


def test_the_longest_part_of_a_step_limits_it() -> None:
    limit = limit_of(PLAN)
    assert limit is not None
    assert (limit.part, limit.share > 0.9) == ("gpu", True)
    waiting = StepTime(forward_s=1, backward_s=2, exposed_optimizer_s=5, data_s=2)
    assert limit_of(replace(PLAN, step=waiting, step_s=10)) == Limit("optimizer", 0.5, 5)
    reading = replace(waiting, data_s=9)
    assert limit_of(replace(PLAN, step=reading, step_s=17)) == Limit("data", 9 / 17, 5)


def test_a_plan_without_a_speed_has_no_limit() -> None:
    assert limit_of(replace(PLAN, fits=False, verdict="does not fit")) is None
    assert limit_of(replace(PLAN, step=None, step_s=None)) is None


def test_what_is_faster_is_told_by_type_and_the_rest_kept() -> None:
    larger = LargerSteps(
        step_s=2, exposed_optimizer_s=1, times=2, tokens=9, key="k", value=2, faster=1.2
    )
    attention = FasterAttention(
        backend="flash-attn-3", used="torch-flash", step_s=1, given_step_s=2
    )
    note = Note(text="would be faster elsewhere")
    plan = replace(PLAN, warnings=(note, larger, attention))
    assert faster_than(plan) == [attention, larger]
    assert other_cautions(plan) == [note]
    unfit = replace(plan, fits=False)
    assert (faster_than(unfit), len(other_cautions(unfit))) == ([], 3)


def test_second_states_are_a_part_of_what_the_host_needs() -> None:
    early = only(PLAN.reasons, StepsEarly)
    assert spare_bytes(PLAN, 0) == early.bytes > 0
    assert spare_bytes(PLAN, 0) < PLAN.host_bytes_per_node[0]
    assert spare_bytes(PLAN, 1) == 0
    only(PLAN.reasons, MemoryNeeded)
    assert spare_bytes(make_plan(find_preset("tiny").spec, GH200), 0) == 0


def test_a_plan_with_what_a_person_set_is_shown_whole() -> None:
    set_by_hand = with_values(find_preset("llama-3.1-8b").spec, {"offload.mode": "superoffload"})
    machine = named_machine("h200-8")
    plan = recommend(set_by_hand, machine)
    output = io.StringIO()
    Console(file=output, width=400).print(render_plan(plan, machine))
    text = output.getvalue()
    missing = [reason for reason in plan.reason_texts if reason not in text]
    assert missing == []
