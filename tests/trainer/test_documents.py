"""From files that people have to documents: layouts, mixtures, what is lost and refused."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.documents import _pack, fill
from so_tui_trainer.data.sources import open_sources
from so_tui_trainer.data.tokens import load_tokenizer, prepare
from so_tui_trainer.data.turns import Conversation
from tests.support.launching import tiny
from tests.support.problems import refusal
from tests.support.python_path import printed
from tests.support.rows import (
    ROWS,
    alpaca,
    answers,
    documents_of,
    lines,
    source_refusal,
    spec_of,
    texts,
    turns,
)

FIVE = "They make 5."
VARIANTS: dict[str, dict[str, Any]] = {
    "null input": alpaca(FIVE, input=None)[0],
    "conversational prompt": {
        "prompt": turns("Add."),
        "completion": turns(FIVE, roles="assistant x"),
    },
    "answers in a conversational prompt": {
        "prompt": [*turns("Hi."), {"role": "assistant", "content": "Hello.", "weight": 1}],
        "completion": turns(FIVE, roles="assistant x"),
    },
    "text parts": {"messages": turns([{"type": "text", "text": "Add."}], FIVE)},
    "parts that are texts": {"messages": turns(["Add", "."], ["They ", "make 5."])},
    "OpenAI's keys in ShareGPT's column": {"conversations": turns("Add.", FIVE)},
    "roles in the wild": {
        "conversations": [{"from": "Human", "value": "Add."}, {"from": "model", "value": FIVE}]
    },
    "a prompt that is a number": {"prompt": 5, "completion": FIVE},
    "columns that mean something else": ROWS["alpaca"]
    | {"tools": "hammer, saw", "history": "of Rome", "system": 7},
    "a stop token in the data": {"prompt": "Add.", "completion": f"{FIVE}<|eos|>\n"},
}
KIND = "Be kind.\n\n### Instruction:\n"
COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "alpaca": ({"history": [["Hi.", "Hello."]]}, f"{KIND}Hi.\n\n### Response:\n"),
    "sharegpt": ({}, KIND),
    "messages": ({}, KIND),
}


@pytest.mark.parametrize("layout", ROWS)
def test_only_the_response_and_its_stop_token_are_trained(tmp_path: Path, layout: str) -> None:
    documents = documents_of(tmp_path, lines(tmp_path, [ROWS[layout]]))
    context, trained = texts(documents)
    assert (documents.parts[0].layout, trained) == (layout, "They make 5.<|eos|>")
    assert "### Instruction:" in context
    assert context.endswith("### Response:\n")


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_people_write_instead_is_read_as_well(tmp_path: Path, variant: str) -> None:
    assert answers(tmp_path, lines(tmp_path, [VARIANTS[variant]])) == [FIVE]


@pytest.mark.parametrize("layout", COLUMNS)
def test_what_stands_in_columns_of_its_own_comes_first(tmp_path: Path, layout: str) -> None:
    columns, expected = COLUMNS[layout]
    row = ROWS[layout] | columns | {"system": "Be kind."}
    assert texts(documents_of(tmp_path, lines(tmp_path, [row])))[0].startswith(expected)


ADD, HALVE = {"name": "add", "arguments": {"a": 2, "b": None}}, {"name": "halve", "arguments": {}}
TOOLS = [{"type": "function", "function": {"name": "add", "default": None}}]


def calling(calls: object, **columns: object) -> dict[str, Any]:
    """Return a row whose answer is calls of tools."""
    return {"messages": [*turns("Add."), {"role": "assistant", "tool_calls": calls}], **columns}


def conversations(path: Path) -> list[Conversation]:
    (opened,) = open_sources(spec_of(path).data)
    return list(opened.conversations(0, len(opened.rows)))


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    rows = [
        calling([{"function": ADD}], tools=json.dumps(TOOLS)),
        calling([{"function": HALVE | {"arguments": {"of": 4}}}], tools=""),
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tools, *_, add), second = conversations(tmp_path / "rows.parquet")
    assert (tools.role, tools.extra) == ("tools", (("tools", TOOLS),))
    # A null that is a column cannot be told from a key that the row has not.
    two = {"type": "function", "function": ADD | {"arguments": {"a": 2}}}
    assert add.extra == (("tool_calls", [two]),)
    assert [message.role for message in second] == ["user", "assistant"]
    written = [{"function": ADD | {"arguments": json.dumps(ADD["arguments"])}}]
    for given in (written, json.dumps(written), json.dumps([{"function": ADD}])):
        ((*_, said),) = conversations(lines(tmp_path, [calling(given, content="")]))
        assert dict(said.extra)["tool_calls"] == [{"type": "function", "function": ADD}]


def test_rows_without_a_turn_are_dropped_and_counted(tmp_path: Path) -> None:
    system = turns("Be kind.", roles="system user")
    rows: list[dict[str, Any]] = [{"messages": said} for said in (None, list[Any](), system)]
    counts = documents_of(tmp_path, lines(tmp_path, [ROWS["messages"], *rows])).counts
    assert (counts.rows, counts.dropped) == (4, 3)
    question, answer = ROWS["messages"]["messages"]
    empty, whole = ({"prompt": [question], "completion": [answer][:n]} for n in (0, 1))
    assert documents_of(tmp_path, lines(tmp_path, [empty, whole])).counts.dropped == 1


def test_the_layout_can_be_named(tmp_path: Path) -> None:
    rows = lines(tmp_path, [ROWS["alpaca"] | {"text": "All of it."}])
    assert answers(tmp_path, rows, data__format="text")[0].endswith("l of it.")
    problem = source_refusal(rows, tmp_path, data__format="prompt-completion")
    assert problem.code == "data-columns-mismatch"


def test_plain_text_is_trained_and_cut_to_sequences(tmp_path: Path) -> None:
    words = "one two three four five six seven " * 40
    rows = lines(tmp_path, [{"text": words}, {"text": "A plain text."}])
    documents = documents_of(tmp_path, rows, data__sequence_length="64")
    tokenizer, counts = load_tokenizer(tiny().model), documents.counts
    assert tokenizer.decode(documents.tokens) == f"{words}<|eos|>A plain text.<|eos|>"
    assert documents.lengths.max() == 64
    assert documents.trained_lengths.tolist() == (documents.lengths - 1).tolist()
    assert (counts.rows, counts.cut, counts.truncated, counts.dropped) == (2, 1, 0, 0)
    assert documents.rows.tolist() == [1] * (len(documents.lengths) - 1) + [2]


def mixed(folder: Path, many: int, few: int, weight: str) -> str:
    """Write two sources of many and few rows, and return a mixture with a weight of the first."""
    one = lines(folder, alpaca(*(f"Answer {n}." for n in range(many))), "many.jsonl")
    other = lines(folder, [ROWS["messages"]] * few, "few.jsonl")
    return f'[{{source = "{one}", weight = {weight}}}, {{source = "{other}"}}]'


def test_a_mixture_has_its_shares_and_loses_no_row(tmp_path: Path) -> None:
    mixture = mixed(tmp_path, 40, 3, "3")
    documents = documents_of(tmp_path, mixture)
    assert [(part.counts.rows, part.documents, part.layout) for part in documents.parts] == [
        (40, 40, "alpaca"),
        (3, 3, "messages"),
    ]
    for training in (np.arange(43), np.arange(1, 43)):  # the first is held out
        epoch = documents.epoch(42, training)
        assert set(epoch.tolist()) == set(training.tolist())
        assert np.count_nonzero(epoch >= 40) == 13  # a quarter of 53
        assert documents.epoch(42, training).tolist() == epoch.tolist()
    sequences = Batches(documents, spec_of(mixture), 0).sequences
    assert sorted(sequences.documents.tolist()) == sorted(documents.epoch(42).tolist())


def test_weights_that_no_epoch_can_have_are_refused(tmp_path: Path) -> None:
    for weight in ("0.001", "1e-308"):  # the latter in infinitely many rounds
        documents = documents_of(tmp_path, mixed(tmp_path, 40, 1, weight))
        problem = refusal(partial(documents.epoch, 42))
        assert problem.code == "data-weight-too-large"
        assert problem.value == f"weight 1 of {tmp_path / 'few.jsonl'}"
    assert len(documents_of(tmp_path, mixed(tmp_path, 40, 1, "0.005")).epoch(42)) == 8040


def test_the_weights_of_a_mixture_do_not_make_it_tokenised_again(tmp_path: Path) -> None:
    specs = (spec_of(mixed(tmp_path, 1, 1, weight)) for weight in "15")
    assert len({prepare(spec, tmp_path / "cache") for spec in specs}) == 1


def test_rows_are_truncated_or_dropped_and_counted(tmp_path: Path) -> None:
    digits = "1 2 3 4 5 6 7 8 9 " * 30
    rows = [
        *alpaca(FIVE),
        *alpaca(digits, instruction="Count."),
        *alpaca("Yes.", instruction=digits),
        *alpaca("", None),
    ]
    documents = documents_of(tmp_path, lines(tmp_path, rows), data__sequence_length="64")
    counts = documents.counts
    assert (counts.rows, counts.truncated, counts.dropped, counts.dropped_too_long) == (5, 1, 3, 1)
    assert documents.lengths.tolist()[1] == 64
    assert documents.trained_lengths.min() > 0
    context, trained = texts(documents, 1)
    assert context.startswith("### Instruction:\nCount.")
    assert not trained.endswith("<|eos|>")


def test_a_tokenizer_of_another_name_has_not_the_models_revision(tmp_path: Path) -> None:
    place, commit = tmp_path / "hub" / "models--owner--tokenizer", "a" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    load_tokenizer(tiny().model).save_pretrained(place / "snapshots" / commit)
    (place / "snapshots" / commit / "config.json").write_text(json.dumps(tiny().model.config))
    code = (
        "from so_tui_trainer.data.tokens import load_tokenizer\n"
        "from tests.support.launching import tiny\n"
        "model = tiny(model__revision='v2', model__tokenizer='owner/tokenizer').model\n"
        "print(load_tokenizer(model).eos_token)"
    )
    cached = {
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    assert printed("-c", code, env=os.environ | cached) == "<|eos|>\n"


@pytest.mark.parametrize("seed", range(5))
def test_packing_has_every_document_once(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 257, size=500)
    sequences = _pack(lengths, 256)
    assert sorted(sequences.documents.tolist()) == list(range(500))
    assert sequences.sums(lengths).max() <= 256
    assert sequences.sums(lengths).sum() == lengths.sum()
    assert _pack(lengths, 256).documents.tolist() == sequences.documents.tolist()


@pytest.mark.parametrize(
    ("lengths", "packed"),
    [([6, 5, 4, 5], [[0, 2], [1, 3]]), ([7, 6, 3], [[0, 2], [1]])],
    ids=["where it leaves least", "the fullest with room"],
)
def test_packing_is_best_fit(lengths: list[int], packed: list[list[int]]) -> None:
    sequences = _pack(np.array(lengths), 10)
    assert [sorted(sequences.of(index).tolist()) for index in range(len(sequences))] == packed
    alone = fill(np.array([7, 6, 3]), np.arange(3), tiny(data__packing="false").data)
    assert [alone.of(index).tolist() for index in range(3)] == [[0], [1], [2]]


def test_a_million_documents_are_packed_within_seconds() -> None:
    drawn = np.random.default_rng(0).lognormal(5.5, 0.9, 1_000_000)
    lengths = np.clip(drawn.astype(np.int64), 1, 4096)
    began = time.process_time()
    sequences = _pack(lengths, 4096)
    assert time.process_time() - began < 8  # about 1
    assert sequences.efficiency(lengths, 4096) > 0.99
