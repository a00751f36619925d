"""The error of predicted steps: derived from what was measured, and shown beside what it is of."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import planner_errors
from benchmarks.planner_errors import Row, errors, pairs, quantile, ratio_error
from so_tui.plan import rates
from so_tui.plan.planner import make_plan
from so_tui.plan.rates import (
    Calibrated,
    Speed,
    StepError,
    about_as_fast,
    published_speed,
    step_error,
    surely_faster,
)
from so_tui.plan.show import plans_json, render_plan
from so_tui.ui.plan_view import headline
from tests.support.machines import x86
from tests.support.planning import QUAD, shown, spec_of

measured_rows = cache(planner_errors.rows)
DOCS = Path(__file__).parents[2] / "docs" / "planner.md"
H200 = "NVIDIA H200"


def speed_of(gpu: str, *, calibrated: bool = False) -> Speed:
    found = published_speed(gpu)
    assert found is not None
    return (
        replace(found, calibrated=Calibrated(date="2026-11-22T10:00:00+00:00"))
        if calibrated
        else found
    )


def test_the_errors_are_those_that_were_measured() -> None:
    for calibrated, most in ((True, rates.CALIBRATED), (False, rates.PUBLISHED)):
        found = quantile(errors(measured_rows(), calibrated=calibrated), rates.WITHIN)
        assert most - 0.01 < found <= most  # rounded up to whole percents
    assert round(ratio_error(pairs(measured_rows())), 2) == rates.ALIKE
    assert {row.gpu for row in measured_rows()} == set(rates.CHECKED_GPUS)


def test_order_of_settings_about_as_fast_is_chance() -> None:
    found = [pair for group in pairs(measured_rows()) for pair in group if pair.predicted]
    closer = [pair.measured > 0 for pair in found if pair.predicted < rates.ALIKE]
    further = [pair.measured > 0 for pair in found if pair.predicted >= rates.ALIKE]
    assert len(closer) > 100
    assert sum(closer) / len(closer) < 0.6
    assert sum(further) / len(further) > 0.9


def test_difference_is_sure_where_nine_of_ten_pairs_agree() -> None:
    found = [pair for group in pairs(measured_rows()) for pair in group]
    sure = [pair.measured > 0 for pair in found if rates.SURE <= pair.predicted < 2 * rates.SURE]
    less = [pair.measured > 0 for pair in found if rates.ALIKE <= pair.predicted < rates.SURE]
    assert len(sure) > 100
    assert sum(sure) / len(sure) > 0.9
    assert sum(less) / len(less) < 0.8
    assert surely_faster(1.1001, 1.0)
    assert not surely_faster(1.0999, 1.0)


def test_the_docs_show_what_was_measured() -> None:
    shown_in_docs = DOCS.read_text()
    assert planner_errors.table(measured_rows()) in shown_in_docs
    assert planner_errors.order_table(pairs(measured_rows())) in shown_in_docs
    assert f"**{100 * ratio_error(pairs(measured_rows())):.1f} %**" in shown_in_docs


def measured(setting: str, planned_s: float, measured_s: float, **values: object) -> Row:
    fields = {
        "machine": "a",
        "model": "4b",
        "gpu": H200,
        "gpus": 1,
        "searched": True,
        "checks": True,
        "tokens": 1,
        "published_s": None,
    }
    return Row(setting=setting, calibrated_s=planned_s, measured_s=measured_s, **(fields | values))  # type: ignore[arg-type]


def test_an_error_is_a_share_of_the_prediction() -> None:
    """And only of settings that no constant rests on."""
    rows = [measured("a", 2.0, 2.2), measured("b", 2.0, 1.0), measured("c", 1.0, 9.0, checks=False)]
    assert errors(rows, calibrated=True) == pytest.approx([0.1, 0.5])
    assert errors(rows, calibrated=False) == []
    found = [quantile([1.0, 2.0, 3.0, 4.0, 5.0], share) for share in (0.5, 0.8, 1.0)]
    assert found == [3.0, 4.0, 5.0]


def test_ratios_are_of_one_model_on_one_machine() -> None:
    """What all of them are off by does not count, and a machine on which many were measured counts
    as one.
    """
    steady = [measured("a", 1.0, 2.0), measured("b", 2.0, 4.0), measured("b", 2.0, 4.0)]
    others = [measured("a", 1.0, 1.0, machine="b"), measured("c", 4.0, 2.0, machine="b", tokens=2)]
    apart = [
        measured("a", 1.0, 3.0, model="8b"),
        measured("a", 1.0, 3.0, gpus=2),
        measured("z", 1.0, 3.0, searched=False),
    ]
    found = pairs([*steady, *others, *apart])
    assert [len(group) for group in found] == [2, 1]
    assert [pair.error for pair in found[0]] == pytest.approx([0.0, 0.0])
    assert found[1][0].predicted == pytest.approx(found[1][0].error)
    assert ratio_error([*found, *found[:1]]) == pytest.approx(0.0)


def test_the_error_of_a_step_depends_on_its_rates() -> None:
    """And says where it was not checked."""
    own = speed_of(H200, calibrated=True)
    assert step_error(own, H200, 1) == StepError(share=rates.CALIBRATED, checked=True)
    assert step_error(speed_of(H200), H200, 1) == StepError(share=rates.PUBLISHED, checked=True)
    assert rates.CALIBRATED < rates.PUBLISHED
    assert not step_error(speed_of(H200), H200, 2).checked
    for gpu in ("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA B200"):
        assert not step_error(speed_of(gpu), gpu, 1).checked
    assert not step_error(own, "another", 1).checked


def test_speeds_are_alike_within_what_ratios_are_off() -> None:
    assert about_as_fast(100.0, 100.0 * (1 - 0.9 * rates.ALIKE))
    assert about_as_fast(100.0 * (1 - 0.9 * rates.ALIKE), 100.0)
    assert not about_as_fast(100.0, 100.0 * (1 - 1.1 * rates.ALIKE))


def test_the_error_is_shown_beside_the_step() -> None:
    plan = make_plan(spec_of("qwen3-4b-random", gpus="1"), x86(H200))
    assert plan.step_error == StepError(share=rates.PUBLISHED, checked=True)
    step = f"{plan.step_s:.2f} s ±15%"
    assert shown(render_plan(plan, x86(H200)), 200).count(step) == 2
    assert "±15%" in headline(plan, 80).plain
    row = json.loads(json.dumps(plans_json([plan])))["plans"][0]
    assert row["step_error"] == {
        "share": rates.PUBLISHED,
        "alike": rates.ALIKE,
        "checked": True,
    }
    elsewhere = make_plan(spec_of("phi-4", gpus="4"), QUAD)
    assert "±15% or more" in shown(render_plan(elsewhere, QUAD), 200)


def test_a_plan_without_a_step_has_no_error() -> None:
    assert published_speed("Voodoo 3dfx") is None
    for name, machine in (("tiny", x86()), ("qwen3-4b-random", x86("Voodoo 3dfx"))):
        plan = make_plan(spec_of(name, gpus="1"), machine)
        assert (plan.step_s, plan.step_error) == (None, None)
