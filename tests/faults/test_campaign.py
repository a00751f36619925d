"""The campaign itself: what it judges, that it can be resumed, and its table."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from tests.faults import campaign, report
from tests.faults.campaign import Result
from tests.faults.kinds import KINDS, matching
from tests.faults.verdict import Expected, Seen, problems

LOSSES = {step: frozenset({(7.0 - step).hex()}) for step in range(1, 5)}
EXPECTED = Expected(
    frozenset({("failed", "rank-lost")}),
    frozenset(),
    LOSSES,
    loses_records=False,
    resumed_from=6,
    starter_exit=None,
)
SEEN = Seen(
    reported="failed",
    recorded=("failed", "rank-lost"),
    refused=(),
    end="finished",
    losses=LOSSES,
    resumed_from=6,
)


def result(index: int, kind: str = "kill-rank0", **changes: object) -> Result:
    """Return the result of a fault that held, with changes."""
    held = Result(
        seed=1,
        index=index,
        kind=kind,
        group="kill",
        what="SIGKILL",
        problems=(),
        seconds=20.0,
        moment="saving",
        state="failed",
    )
    return msgspec.structs.replace(
        held,
        code="rank-lost",
        end="finished",
        compared=16,
        host={"cores": 2, "torch": "2.13.0"},
        **changes,
    )


def test_nothing_is_wrong_where_everything_held() -> None:
    assert problems(EXPECTED, SEEN) == ()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"reported": "finished", "recorded": ("finished", "finished")}, "wrong-state"),
        ({"recorded": ("failed", "unexpected")}, "wrong-code"),
        ({"refused": ("run-is-live",)}, "refused"),
        ({"end": "failed"}, "not-finished"),
        ({"losses": LOSSES | {3: frozenset({"0x1p+0"})}}, "loss-differs"),
        ({"losses": LOSSES | {3: LOSSES[3] | {"0x1p+0"}}}, "loss-differs"),
        ({"losses": {step: loss for step, loss in LOSSES.items() if step != 3}}, "steps-missing"),
        ({"losses": LOSSES | {5: frozenset({"0x1p+0"})}}, "loss-differs"),
        ({"resumed_from": 3}, "resumed-too-early"),
        ({"trained_twice": (2,)}, "steps-repeated"),
        ({"orphans": ("17 python",)}, "orphan-process"),
        ({"shared_memory": ("torch_17_1",)}, "shared-memory-left"),
        ({"locks": ("supervisor.lock",)}, "lock-held"),
        ({"partial": ("step-000003.partial",)}, "partial-checkpoint-left"),
        ({"tracebacks": ("command 1",)}, "traceback"),
    ],
)
def test_each_thing_that_does_not_hold_has_its_code(change: dict[str, object], code: str) -> None:
    assert code in problems(EXPECTED, dataclasses.replace(SEEN, **change))  # type: ignore[arg-type]


def test_a_resume_that_must_be_refused_is_judged_by_the_code_of_the_refusal() -> None:
    refused = dataclasses.replace(EXPECTED, refusals=frozenset({"checkpoints-unreadable"}))
    assert problems(refused, dataclasses.replace(SEEN, refused=("checkpoints-unreadable",))) == ()
    assert problems(refused, SEEN) == ("not-refused",)
    assert problems(refused, dataclasses.replace(SEEN, refused=("unexpected",))) == ("not-refused",)


def test_steps_may_be_missing_only_where_records_are_lost_and_those_that_are_left_must_be_equal() -> (  # noqa: E501
    None
):
    losing = dataclasses.replace(EXPECTED, loses_records=True)
    assert problems(losing, dataclasses.replace(SEEN, losses={4: LOSSES[4]})) == ()
    assert problems(losing, dataclasses.replace(SEEN, losses={4: LOSSES[3]})) == ("loss-differs",)


def test_the_exit_code_of_the_command_that_started_the_run_counts_where_it_is_given() -> None:
    followed = dataclasses.replace(EXPECTED, starter_exit=frozenset({4}))
    assert problems(followed, dataclasses.replace(SEEN, starter_exit=4)) == ()
    assert problems(followed, dataclasses.replace(SEEN, starter_exit=1)) == ("wrong-exit-code",)
    assert problems(followed, SEEN) == ("wrong-exit-code",)


def test_every_kind_has_a_name_of_its_own_and_comes_once_before_one_comes_twice() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    first = [kind.name for _, kind in islice(campaign.chosen(KINDS, 7), len(KINDS))]
    assert sorted(first) == sorted(kind.name for kind in KINDS)
    assert first == [kind.name for _, kind in islice(campaign.chosen(KINDS, 7), len(KINDS))]
    assert first != [kind.name for _, kind in islice(campaign.chosen(KINDS, 8), len(KINDS))]


def test_a_campaign_goes_on_where_it_was_ended_even_in_the_middle_of_a_line(tmp_path: Path) -> None:
    out = tmp_path / "faults.jsonl"
    kinds = matching("kill")
    assert len(campaign.pending(kinds, 1, 5, campaign.read(out))) == 5
    (index, kind), *left = campaign.pending(kinds, 1, 5, [])
    campaign.append(out, result(index, kind.name))
    with out.open("ab") as file:
        file.write(b'{"v":1,"seed":1,"ind')
    assert campaign.pending(kinds, 1, 5, campaign.read(out)) == left
    campaign.append(out, result(left[0][0], left[0][1].name))
    assert campaign.pending(kinds, 1, 5, campaign.read(out)) == left[1:]
    assert len(campaign.pending(kinds, 2, 5, campaign.read(out))) == 5


def test_cores_are_divided_equally_or_shared_by_all() -> None:
    assert campaign.core_shares(range(8), 3) == [{0, 1}, {2, 3}, {4, 5}]
    assert campaign.core_shares([0, 1], 2) == [{0, 1}, {0, 1}]
    assert campaign.core_shares([3, 5, 7], 1) == [{3, 5, 7}]


def test_the_table_counts_what_held_and_names_what_did_not() -> None:
    broken = result(3, problems=("loss-differs",), note="step 7", state="failed")
    text = report.table([result(1), result(2, moment="loading"), broken])
    assert "3 faults, 2 held; 48 losses" in text
    assert "| SIGKILL | 3 | loading 1, saving 2 | failed (rank-lost) | 2 **!** |" in text
    assert "- `--seed 1 --repeat 3-kill-rank0` (saving): loss-differs. step 7" in text
