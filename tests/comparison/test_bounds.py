"""What the benchmarks make of measured steps: bounds that are kept or not, and what a step did
beside training.
"""

from __future__ import annotations

from itertools import pairwise
from time import monotonic
from typing import Any

import pytest

from benchmarks import bounds
from benchmarks.checkpoints import work_during
from so_tui.plan.planner import make_plan
from so_tui.runs.records import CheckpointRecord
from so_tui.spec import find_preset, with_values
from tests.support.machines import x86
from tests.support.records import step_record


def row(
    step_s: float, *, forward_s: float = 0.2, adam_busy_s: float = 0.0, ratio: float = 0.9
) -> dict[str, Any]:
    figures = {
        "step_s": step_s,
        "forward_s": forward_s,
        "backward_s": 0.4,
        "exposed_optimizer_s": 0.1,
        "adam_busy_s": adam_busy_s,
    }
    return {
        "figures": figures,
        "ratio": ratio,
        "activation_checkpointing": "none",
        "planned_step_s": 1.0,
    }


def kept(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the last column of the table, by setting."""
    cells = (
        [cell.strip() for cell in line.split("|")] for line in bounds.table(rows).splitlines()[2:]
    )
    return {found[1]: found[-2] for found in cells}


def test_a_step_is_held_against_no_offload_and_against_forward_with_adam_whichever_takes_longer() -> (  # noqa: E501
    None
):
    floor = {"no offload": row(1.0)}
    assert kept(floor | {"fp32": row(1.10)})["fp32"] == "yes"
    assert kept(floor | {"fp32": row(1.11)})["fp32"] == "no"
    assert kept(floor | {"fp32": row(1.31, adam_busy_s=1.0)})["fp32"] == "yes"
    assert kept(floor | {"fp32": row(1.33, adam_busy_s=1.0)})["fp32"] == "no"
    found = kept(
        floor
        | {
            "recommended ratio": row(1.0 / 0.91),
            "int8-moments": row(1.0 / 0.94),
            "bf16-moments": row(1.0 / 0.96),
        }
    )
    assert found["no offload"] == ""
    assert (found["recommended ratio"], found["int8-moments"], found["bf16-moments"]) == (
        "yes",
        "no",
        "yes",
    )
    assert "not measured" in found["fp32"]


def test_the_recommended_ratio_is_no_slower_than_the_given_one() -> None:
    machine = x86("NVIDIA H200")
    spec = with_values(
        find_preset("qwen3-4b-random").spec, {"gpus": "1", "offload.mode": "superoffload"}
    )
    ratio = bounds.recommended_ratio(spec, machine)
    given, chosen = (
        make_plan(with_values(spec, {"offload.ratio": str(each)}), machine, probed=False)
        for each in (0.9, ratio)
    )
    assert chosen.verdict == "fits"
    assert given.step_s is not None
    assert chosen.step_s is not None
    assert chosen.step_s <= 1.01 * given.step_s


def test_after_the_first_setting_that_would_end_too_late_nothing_is_measured() -> None:
    """Or the figures of a short one would be taken for those of the long one before it."""
    machine = x86("NVIDIA H200")
    spec = with_values(
        find_preset("qwen3-4b-random").spec, {"gpus": "1", "offload.mode": "superoffload"}
    )
    long, short = (
        make_plan(with_values(spec, {"offload.ratio": str(ratio)}), machine, probed=False)
        for ratio in (0.9, 0.1)
    )
    unfit = make_plan(
        with_values(spec, {"train.micro_batch": "512", "model.activation_offload": "off"}),
        machine,
        probed=False,
    )
    assert not unfit.fits
    assert bounds.seconds_of(short) < bounds.seconds_of(long)
    between_s = (bounds.seconds_of(short) + bounds.seconds_of(long)) / 2
    assert list(bounds.in_time([unfit, short, long, short], monotonic() + between_s)) == [
        short.spec
    ]
    assert list(bounds.in_time([unfit, long, short], monotonic() + 1e6)) == [long.spec, short.spec]


@pytest.mark.parametrize(
    ("written_s", "expected"),
    [
        (3.6, ["", "copy", "write", "write", "write", "complete", "complete", ""]),
        (None, ["", "copy", *["write"] * 5, ""]),
    ],
)
def test_a_step_is_put_down_to_what_took_most_of_it(
    written_s: float | None, expected: list[str]
) -> None:
    """The checkpoint of step 2 takes six seconds, and older programs do not say when all of it was
    written.
    """
    steps = [step_record(number, time=100.0 + number) for number in range(1, 10)]
    saved = [
        CheckpointRecord(
            attempt=1,
            time=109.0,
            step=2,
            path="there",
            bytes=1,
            seconds=6.0,
            paused_s=0.2,
            written_s=written_s,
        )
    ]
    begun = {each.step: each.time for each in steps}
    found = [work_during(before, after, saved, begun) for before, after in pairwise(steps)]
    assert found == expected
