"""What is held out, and that its loss is the plain one whoever measures it."""

import math

import numpy as np
import pytest
import torch
from msgspec import convert

from so_tui.runs.records import EvaluationRecord
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.documents import Counts, SourcePart
from so_tui_trainer.evaluation import divide, evaluate, evaluation_spec, trained_fingerprint
from so_tui_trainer.failures import NonFiniteError
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.ranks import Ranks
from tests.support.documents import documents, loss_alone, spec
from tests.support.launching import tiny
from tests.support.models import causal_model
from tests.support.problems import coded, rejected


@pytest.mark.parametrize(("wanted", "count"), [("0", 0), ("0.1", 5), ("7", 7)])
def test_held_out_rows_are_never_trained_on(wanted: str, count: int) -> None:
    docs = documents(50)
    parts = divide(docs, spec(data__held_out=wanted))
    assert len(parts.held_out) == count
    assert sorted([*parts.training, *parts.held_out]) == list(range(50))
    again = divide(docs, spec(data__held_out=wanted))
    other = divide(docs, spec(data__held_out=wanted, train__seed="43"))
    assert again.held_out.tolist() == parts.held_out.tolist()
    assert not count or other.held_out.tolist() != parts.held_out.tolist()
    batches = Batches(docs, spec(data__held_out=wanted), 0, members=parts.training)
    assert sorted(batches.sequences.documents) == parts.training.tolist()


@pytest.mark.parametrize("wanted", ["0.001", "50", "1000"])
def test_a_part_that_leaves_nothing_on_one_side_is_refused(wanted: str) -> None:
    with rejected("held-out-out-of-range"):
        divide(documents(50), spec(data__held_out=wanted))


def test_a_row_that_was_cut_is_held_out_whole() -> None:
    """Rows of one to three documents; the second source begins with the first one's last number."""
    cut = np.array([1, 2, 2, 3, 3, 3, 3, 4, 5, 6, 7, 7])
    counts = Counts(3, 0, 0)
    sources = (SourcePart("text", 6, counts, "a"), SourcePart("text", 6, counts, "b"))
    docs = documents(12)._replace(rows=cut, parts=sources)
    held_out = divide(docs, spec(data__held_out="3")).held_out
    rows = [(document < 6, cut[document]) for document in range(12)]
    out = {rows[document] for document in held_out}
    assert len(out) == 3
    assert [document for document in range(12) if rows[document] in out] == held_out.tolist()
    assert divide(docs, spec(data__held_out="7")).training.size
    with rejected("held-out-out-of-range"):
        divide(docs, spec(data__held_out="8"))


def test_data_with_a_part_held_out_are_other_training_data() -> None:
    every = [trained_fingerprint("abc", spec(data__held_out=part)) for part in ("0", "0.1", "5")]
    assert every[0] == trained_fingerprint("abc", spec()) == "abc"
    assert len(set(every)) == 3


def test_evaluations_are_of_one_kind_or_none() -> None:
    assert evaluation_spec(spec()) is None
    other = evaluation_spec(spec(data__evaluation="other/data"))
    split = evaluation_spec(spec(data__source="some/data", data__evaluation_split="test"))
    sources = [(each.data.source, each.data.split) for each in (other, split) if each]
    assert sources == [("other/data", "train"), ("some/data", "test")]
    with rejected("several-evaluations"):
        spec(data__held_out="5", data__evaluation="other/data")
    with rejected("no-evaluation-data"):
        spec(train__evaluate_every_steps="5")


class Apart(Ranks):
    """One of several ranks, without the others: its sum is its own share."""

    def all_gather_row(self, row: list[float]) -> list[list[float]]:
        return [row]


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_measured_loss_is_mean_over_tokens(packing: str, ranks: int, single_rank: Ranks) -> None:
    """On one rank or cut over three, which get different numbers of sequences."""
    model = TrainedModel(causal_model(load_config(tiny().model), dtype=torch.float32), "sdpa")
    docs = documents(40)
    shape = spec(data__held_out="11", data__packing=packing)
    members = divide(docs, shape).held_out
    with torch.no_grad():
        total = loss_alone(model.causal, docs, members).item()
    tokens = int(docs.trained_lengths[members].sum())
    found = []
    for rank in range(ranks):
        share = Batches(docs, shape, rank, members=members)
        apart = Apart(single_rank.rank, ranks, single_rank.device, single_rank.group)
        found.append(evaluate(share, model, apart, attempt=1, step=7))
    assert {record.tokens for record in found} == {tokens}
    assert sum(record.loss for record in found) == pytest.approx(total / tokens, rel=1e-5)
    assert model.training
    if ranks == 1:
        assert found[0].perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)


def test_a_loss_that_is_not_finite_ends_the_run(single_rank: Ranks) -> None:
    share = Batches(documents(), spec(), 0, members=np.arange(5))
    spoilt = torch.nn.Module()
    spoilt.forward = lambda *_: torch.tensor(float("nan"))
    with coded(NonFiniteError, "not-finite"):
        evaluate(share, spoilt, single_rank, attempt=1, step=3)


def test_records_of_older_versions_are_still_read() -> None:
    old = {"kind": "evaluation", "attempt": 1, "time": 0.0, "step": 3, "loss": 1.5, "tokens": 10}
    assert convert(old, EvaluationRecord).perplexity is None
