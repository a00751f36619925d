"""What people are shown of their data before anything starts, and the command that prints it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from so_tui.cli import main
from so_tui.launch.helper_jobs import DataPreview, Progress, Sample, preview_data
from so_tui.spec import spec_tree
from so_tui_trainer.tools.check_inputs import _check
from so_tui_trainer.tools.data import _histogram
from so_tui_trainer.tools.prepare import _prepare
from tests.support.launching import tiny
from tests.support.problems import refusal
from tests.support.rows import alpaca, lines, spec_of, turns
from tests.support.schemas import valid


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_mixture_is_told_source_by_source_with_rows_of_each(tmp_path: Path) -> None:
    answers = ("An answer. " * (n + 1) for n in range(30))
    one = lines(tmp_path, alpaca(*answers), "many.jsonl")
    other = lines(
        tmp_path,
        [{"messages": turns("Hi.", said), "id": 1} for said in ("Hello.", "")],
        "few.jsonl",
    )
    mixture = f'[{{source = "{one}", weight = 3}}, {{source = "{other}"}}]'
    *progress, preview = preview_data(spec_of(mixture, data__sequence_length="64"), 4)
    assert isinstance(preview, DataPreview)
    assert isinstance(progress[-1], Progress)
    assert progress[-1].done_rows == progress[-1].total_rows == 32
    assert (preview.rows, preview.documents, preview.dropped) == (32, 31, 1)
    many, few = preview.sources
    assert (many.format, few.format) == ("alpaca", "messages")
    assert (many.unused, few.unused) == ("", "unused columns: id")
    assert (few.rows, few.dropped, few.documents, few.times_an_epoch) == (2, 1, 1, 10)
    assert many.truncated == preview.truncated > 0
    assert few.share == pytest.approx(0.25, abs=0.02)
    shown = [(Path(sample.source).stem, sample.row) for sample in preview.samples]
    assert shown == [("many", 1), ("few", 1), ("many", 2), ("many", 3)]
    assert [piece for piece in preview.samples[1].pieces if piece[1]] == [("Hello.<|eos|>", True)]
    assert sum(preview.sequence_cells(80)) == 80
    assert sum(entry.tokens for entry in preview.histogram) == preview.tokens


@pytest.mark.slow
@pytest.mark.parametrize("work", [_check, _prepare])
def test_holding_out_everything_is_refused(work: Callable[[Any], Any], tmp_path: Path) -> None:
    request = {"spec": spec_tree(spec_of(lines(tmp_path, alpaca("Yes.")), data__held_out="1"))}
    problem = refusal(lambda: list(work(request)))
    assert (problem.code, problem.value) == ("held-out-out-of-range", "1")


@pytest.mark.slow
def test_what_several_checks_find_wrong_is_said_once(tmp_path: Path) -> None:
    rows, nowhere = "builtin:tiny/rows.jsonl", str(tmp_path / "nowhere")
    request = {"spec": spec_tree(tiny(model__tokenizer=nowhere, data__evaluation=rows))}
    assert refusal(lambda: list(_check(request))).field == "model.tokenizer"


@pytest.mark.parametrize("lengths", [[5], [7, 7, 7], list(range(1, 500)), [*[50] * 500, 4000]])
def test_the_histogram_counts_every_document_once(lengths: list[int]) -> None:
    bins = _histogram(np.array(lengths))
    assert sum(entry["documents"] for entry in bins) == len(lengths)
    assert sum(entry["tokens"] for entry in bins) == sum(lengths)
    for entry in bins:
        inside = sum(entry["from"] <= length <= entry["to"] for length in lengths)
        assert inside == entry["documents"]
    assert len(bins) <= 12


def test_what_a_terminal_would_obey_is_shown_as_a_picture() -> None:
    sample = Sample("rows.jsonl", 1, 3, 1, (("a\x1b[2J\tb\n", False), ("c\x9b\x7f\x00", True)))
    assert list(sample.visible) == [("a\u241b[2J\tb\n", False), ("c\ufffd\u2421\u2400", True)]


@pytest.mark.slow
def test_the_command_answers_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tiny", "--rows", "2", "--json"]) == 0
    answer = valid("data", capsys.readouterr().out)
    assert (answer["rows"], len(answer["samples"])) == (355, 2)
