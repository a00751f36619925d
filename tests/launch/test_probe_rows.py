"""What a probe without data of its own trains on: tokenised as a run does it, documents have the
lengths that the plan assumes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.launch.probe import probe_spec, write_rows
from so_tui.plan.workload import Workload
from so_tui.spec import find_preset, with_values
from so_tui_trainer.data import documents as cache
from so_tui_trainer.data import tokens
from so_tui_trainer.data.documents import fill


@pytest.mark.parametrize(
    ("known", "length", "trained"),
    [
        (Workload(), 2048, 1.0),
        (Workload(attended_tokens=300, trained_share=0.5, useful_share=1.0), 300, 0.5),
    ],
    ids=["nothing is known of the data", "documents of 300 tokens, half of them trained"],
)
def test_documents_as_planned(known: Workload, length: int, trained: float, tmp_path: Path) -> None:
    spec = with_values(
        find_preset("tiny").spec, {"data.sequence_length": "2048", "train.micro_batch": "3"}
    )
    rows = write_rows(spec, known, tmp_path / "probes")
    assert write_rows(spec, known, tmp_path / "probes") == rows
    short = probe_spec(spec, "random", rows=rows)
    documents = cache.read(tokens.prepare(short), short.data)
    lengths = documents.lengths
    assert lengths.mean() == pytest.approx(length, rel=0.1)
    assert documents.trained.mean() == pytest.approx(trained, abs=0.08)
    sequences = fill(lengths, documents.epoch(0), short.data)
    assert len(sequences) >= 3
    assert sequences.efficiency(lengths, 2048) > 0.7
