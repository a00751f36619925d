"""How often a run saves where nobody says it, what that costs, and the sentence that says so."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from so_tui.plan.notes import SavesEvery
from so_tui.plan.plan import Plan
from so_tui.plan.planner import make_plan, recommend
from so_tui.plan.saving import DISK_BYTES_PER_S, MOST_SHARE, may_lose_much, saving_text
from so_tui.plan.show import render_plan
from so_tui.spec import RunSpec, find_preset
from so_tui.spec.merge import with_values
from so_tui.ui.plan_view import launch_facts
from so_tui.ui.text import in_rows
from tests.support.machines import x86
from tests.support.planning import facts_of, only, planned, shown, some

ROOMY = x86("NVIDIA H200", cores=32, memory_mib=1024 * 1024)
ON_HOST = {"gpus": "1", "offload__mode": "superoffload", "offload__ratio": "0.9"}


def plan_of(preset: str = "llama-3.1-8b", **changes: str) -> Plan:
    return planned(preset, ROOMY, **ON_HOST | changes)


def minutes(plan: Plan) -> float:
    return plan.spec.checkpoint.every_minutes


def test_a_run_saves_every_half_hour_by_default() -> None:
    plan = plan_of()
    every = only(plan.reasons, SavesEvery)
    assert (minutes(plan), every.minutes, every.usual_minutes) == (30, 30, 30)
    assert (plan.spec.checkpoint.keep, plan.disk_peak_bytes) == (2, 3 * plan.disk_bytes)
    # All of it is copied, so training loses a tenth of the time of writing.
    written_s = plan.disk_bytes / DISK_BYTES_PER_S
    assert every.cost_s == plan.checkpoint_cost_s == pytest.approx(0.1 * written_s)
    assert minutes(recommend(find_preset("llama-3.1-8b").spec, ROOMY)) == 30


def test_saving_that_costs_more_than_its_share_is_rarer() -> None:
    """Training stands still for all of it where nothing is written behind it."""
    plan = plan_of(checkpoint__background="false")
    every = only(plan.reasons, SavesEvery)
    assert every.cost_s == pytest.approx(plan.disk_bytes / DISK_BYTES_PER_S)
    assert minutes(plan) == every.minutes == 90
    assert every.cost_s / (60 * 90) <= MOST_SHARE < every.cost_s / (60 * 60)


@pytest.mark.parametrize("given", ["0", "1", "30", "45.5"])
def test_minutes_that_a_person_set_are_kept(given: str) -> None:
    plan = plan_of(checkpoint__background="false", checkpoint__every_minutes=given)
    assert minutes(plan) == float(given)
    assert not facts_of(plan.reasons, SavesEvery)


def test_saving_by_steps_takes_the_place_of_the_clock() -> None:
    assert minutes(plan_of(checkpoint__every_steps="100")) == 0
    both = plan_of(checkpoint__every_steps="100", checkpoint__every_minutes="30")
    assert minutes(both) == 30


@pytest.mark.parametrize("preset", ["qwen3-4b-random", "llama-3.1-8b:as-published"])
def test_what_is_measured_saves_nothing_meanwhile(preset: str) -> None:
    measured = find_preset(preset).spec
    if not preset.endswith("as-published"):
        measured = with_values(measured, {"benchmark.measured_steps": "20"})
    assert minutes(make_plan(measured, ROOMY)) == 0
    asked = with_values(measured, {"checkpoint.every_minutes": "10"})
    assert minutes(make_plan(asked, ROOMY)) == 10


def test_what_a_plan_decided_stays_when_it_is_planned_again() -> None:
    """As a resume does: rarer where its machine needs that, and never more often."""
    spec: RunSpec = plan_of(checkpoint__background="false").spec
    assert minutes(make_plan(spec, ROOMY)) == 90
    cheap = spec.changed("checkpoint", background=True)
    assert minutes(make_plan(cheap, ROOMY)) == 90
    assert minutes(make_plan(plan_of(checkpoint__every_minutes="0").spec, ROOMY)) == 0


def test_one_sentence_says_how_often_and_what_it_costs() -> None:
    plan = plan_of()
    assert saving_text(plan) == "saves every 30 min (96.4 GB each, 0.5 % of the time)"
    exported = plan_of(checkpoint__export="true")
    assert saving_text(exported) == saving_text(plan), "an export is no part of each"
    steps = plan_of(checkpoint__every_steps="10")
    cost_s = some(steps.checkpoint_cost_s)
    share = cost_s / (10 * some(steps.step_s) + cost_s)
    assert saving_text(steps) == (
        f"saves every 10 steps (96.4 GB each, {100 * share:.1f} % of the time)"
    )
    rare = plan_of(checkpoint__background="false")
    assert saving_text(rare).startswith("saves every 1 h 30 m (")


def test_no_share_is_said_where_it_is_not_known() -> None:
    """In plans of earlier versions."""
    older = replace(plan_of(), checkpoint_cost_s=None)
    assert saving_text(older) == "saves every 30 min (96.4 GB each)"
    tree = msgspec.to_builtins(older, str_keys=True)
    del tree["checkpoint_cost_s"]
    assert msgspec.convert(tree, Plan, strict=False).checkpoint_cost_s is None


@pytest.mark.parametrize(
    ("changes", "text", "warns"),
    [
        ({"train__steps": "5000"}, "nothing is saved before the end", True),
        ({"train__steps": "10"}, "nothing is saved before the end", False),
        ({"train__epochs": "1"}, "nothing is saved before the end", True),
        ({"checkpoint__at_end": "false", "train__steps": "5000"}, "nothing is saved", True),
    ],
)
def test_a_long_run_that_saves_nothing_is_warned_of(
    changes: dict[str, str], text: str, warns: bool
) -> None:
    plan = plan_of(checkpoint__every_minutes="0", **changes)
    assert (saving_text(plan), may_lose_much(plan)) == (text, warns)
    assert not may_lose_much(plan_of(**changes | {"checkpoint__every_minutes": "30"}))


def test_an_interval_longer_than_the_run_saves_nothing_before_the_end() -> None:
    step_s = plan_of().step_s
    assert step_s
    hour = {"train__steps": str(round(3600 / step_s)), "checkpoint__background": "false"}
    for plan, late in (
        (plan_of(**hour), True),  # every 90 minutes
        (plan_of(**hour, checkpoint__every_minutes="30"), False),
        (plan_of(**hour | {"train__steps": "10"}), False),
    ):
        assert may_lose_much(plan) == late
        assert saving_text(plan).endswith("the run ends before the first") == late


@pytest.mark.parametrize("given", [{}, {"checkpoint__every_minutes": "0", "train__steps": "9000"}])
def test_plan_and_launch_question_say_it(given: dict[str, str]) -> None:
    """In a warning's colour where it is one."""
    plan = plan_of(**given)
    assert saving_text(plan) in shown(render_plan(plan, ROOMY), 100)
    question = in_rows(launch_facts(plan))
    assert saving_text(plan) in question.plain
    marked = {question.plain[span.start : span.end]: span.style for span in question.spans}
    assert (marked.get(saving_text(plan)) == "$warning") == may_lose_much(plan) == bool(given)
