"""The error of predicted steps: derived from what was measured, and shown beside what it is of."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import planner_errors
from benchmarks.planner_errors import errors, pairs, quantile, ratio_error
from so_tui.plan import rates
from so_tui.plan.rates import (
    Calibrated,
    StepError,
    about_as_fast,
    published_speed,
    step_error,
    surely_faster,
)
from so_tui.plan.show import render_plan
from so_tui.ui.plan_view import headline
from tests.support.machines import x86
from tests.support.planning import H200, QUAD, planned, shown

measured_rows = cache(planner_errors.rows)
DOCS = Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_errors_are_those_that_were_measured() -> None:
    for calibrated, most in ((True, rates.CALIBRATED), (False, rates.PUBLISHED)):
        found = quantile(errors(measured_rows(), calibrated=calibrated), rates.WITHIN)
        assert most - 0.01 < found <= most  # rounded up to whole percents
    assert round(ratio_error(pairs(measured_rows())), 2) == rates.ALIKE
    assert {row.gpu for row in measured_rows()} == set(rates.CHECKED_GPUS)


@pytest.mark.parametrize(
    ("least", "below", "rightly"),
    [
        (0.0, rates.ALIKE, (0.4, 0.6)),  # chance
        (rates.ALIKE, rates.SURE, (0.6, 0.8)),
        (rates.ALIKE, 1.0, (0.9, 1.0)),
        (rates.SURE, 2 * rates.SURE, (0.9, 1.0)),
    ],
)
def test_order_of_settings_is_as_sure_as_is_said(
    least: float, below: float, rightly: tuple[float, float]
) -> None:
    found = [pair for group in pairs(measured_rows()) for pair in group if pair.predicted]
    agreeing = [pair.measured > 0 for pair in found if least <= pair.predicted < below]
    assert len(agreeing) > 70
    assert rightly[0] < sum(agreeing) / len(agreeing) <= rightly[1]


def test_the_docs_show_what_was_measured() -> None:
    shown_in_docs = DOCS.read_text()
    assert planner_errors.table(measured_rows()) in shown_in_docs
    assert planner_errors.order_table(pairs(measured_rows())) in shown_in_docs
    assert f"**{100 * ratio_error(pairs(measured_rows())):.1f} %**" in shown_in_docs


def test_the_error_of_a_step_depends_on_its_rates() -> None:
    """And says where it was not checked."""
    gpus = ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA B200")
    speeds = {gpu: speed for gpu in gpus if (speed := published_speed(gpu))}
    own = replace(speeds["NVIDIA H200"], calibrated=Calibrated(date="2026-11-22T10:00:00+00:00"))
    assert step_error(own, "NVIDIA H200", 1) == StepError(share=rates.CALIBRATED, checked=True)
    assert rates.CALIBRATED < rates.PUBLISHED
    found = {gpu: step_error(speed, gpu, 1) for gpu, speed in speeds.items()}
    assert found == {gpu: StepError(share=rates.PUBLISHED, checked=gpu == gpus[0]) for gpu in gpus}
    assert not step_error(own, "NVIDIA H200", 2).checked
    assert not step_error(own, "another", 1).checked


def test_speeds_are_alike_within_what_ratios_are_off() -> None:
    near, far = 100.0 * (1 - 0.9 * rates.ALIKE), 100.0 * (1 - 1.1 * rates.ALIKE)
    assert about_as_fast(100.0, near)
    assert about_as_fast(near, 100.0)
    assert not about_as_fast(100.0, far)
    assert [surely_faster(rate, 1.0) for rate in (1.1001, 1.0999)] == [True, False]


def test_the_error_is_shown_beside_the_step() -> None:
    plan, elsewhere = planned("qwen3-4b-random", H200, gpus="1"), planned("phi-4", QUAD, gpus="4")
    assert plan.step_error == StepError(share=rates.PUBLISHED, checked=True)
    assert shown(render_plan(plan, H200), 200).count(f"{plan.step_s:.2f} s ±15%") == 2
    assert "±15%" in headline(plan, 80).plain
    assert "±15% or more" in shown(render_plan(elsewhere, QUAD), 200)


def test_a_plan_without_a_step_has_no_error() -> None:
    assert published_speed("Voodoo 3dfx") is None
    for name, machine in (("tiny", x86()), ("qwen3-4b-random", x86("Voodoo 3dfx"))):
        plan = planned(name, machine, gpus="1")
        assert (plan.step_s, plan.step_error) == (None, None)
