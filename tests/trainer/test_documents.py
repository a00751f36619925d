"""From files that people have to documents: layouts, mixtures, what is lost and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from tests.support.launching import tiny
from tests.support.problems import refusal
from tests.support.rows import ROWS, documents_of, lines, source_refusal, spec_of, texts

VARIANTS: dict[str, dict[str, Any]] = {
    "null input": {"instruction": "Add.", "input": None, "output": "They make 5."},
    "conversational prompt": {
        "prompt": [{"role": "user", "content": "Add 2 and 3."}],
        "completion": [{"role": "assistant", "content": "They make 5."}],
    },
    "answers in a conversational prompt": {
        "prompt": [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hello.", "weight": 1},
            {"role": "user", "content": "Add 2 and 3."},
        ],
        "completion": [{"role": "assistant", "content": "They make 5."}],
    },
    "text parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Add."}]},
            {"role": "assistant", "content": "They make 5."},
        ]
    },
    "OpenAI's keys in ShareGPT's column": {"conversations": ROWS["messages"]["messages"]},
    "other roles": {
        "conversations": [
            {"from": "user", "value": "Add."},
            {"from": "model", "value": "They make 5."},
        ]
    },
    "roles in the wild": {
        "conversations": [
            {"from": "Human", "value": "Add."},
            {"from": "AI ", "value": "They make 5."},
        ]
    },
    "parts that are texts": {
        "messages": [
            {"role": "user", "content": ["Add", "."]},
            {"role": "assistant", "content": ["They ", "make 5."]},
        ]
    },
    "a prompt that is a number": {"prompt": 5, "completion": "They make 5."},
    "columns that mean something else": ROWS["alpaca"]
    | {"tools": "hammer, saw", "history": "of Rome", "system": 7},
    "a stop token in the data": {"prompt": "Add 2 and 3.", "completion": "They make 5.<|eos|>\n"},
}
COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "alpaca": (
        {"system": "Be kind.", "history": [["Hi.", "Hello."]]},
        "Be kind.\n\n### Instruction:\nHi.\n\n### Response:\n",
    ),
    "sharegpt": ({"system": "Be kind."}, "Be kind.\n\n### Instruction:\n"),
    "messages": ({"system": "Be kind."}, "Be kind.\n\n### Instruction:\n"),
}


@pytest.mark.parametrize("layout", ROWS)
def test_only_the_response_and_its_stop_token_are_trained(tmp_path: Path, layout: str) -> None:
    documents = documents_of(tmp_path, lines(tmp_path, [ROWS[layout]]))
    context, trained = texts(documents)
    assert trained == "They make 5.<|eos|>"
    assert "### Instruction:" in context
    assert context.endswith("### Response:\n")
    assert documents.parts[0].layout == layout


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_people_write_instead_is_read_as_well(tmp_path: Path, variant: str) -> None:
    assert (
        texts(documents_of(tmp_path, lines(tmp_path, [VARIANTS[variant]])))[1]
        == "They make 5.<|eos|>"
    )


@pytest.mark.parametrize("layout", COLUMNS)
def test_what_stands_in_columns_of_its_own_comes_first(tmp_path: Path, layout: str) -> None:
    columns, expected = COLUMNS[layout]
    assert texts(documents_of(tmp_path, lines(tmp_path, [ROWS[layout] | columns])))[0].startswith(
        expected
    )


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}]
    add, halve = (
        {"name": "add", "arguments": {"a": 2, "b": 3}},
        {"name": "halve", "arguments": {"of": 4}},
    )
    rows = [
        {
            "messages": [
                ROWS["messages"]["messages"][0],
                {"role": "assistant", "tool_calls": [{"function": call}]},
            ],
            "tools": given,
        }
        for call, given in ((add, json.dumps(tools)), (halve, ""))
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (opened,) = open_sources(spec_of(tmp_path / "rows.parquet").data)
    first, second = opened.conversations(0, len(opened.rows))
    assert (first[0].role, first[0].extra) == ("tools", (("tools", tools),))
    assert dict(first[-1].extra)["tool_calls"] == [{"function": add}]
    assert [message.role for message in second] == ["user", "assistant"]
    written = [{"function": {**add, "arguments": json.dumps(add["arguments"])}}]
    for given in (written, json.dumps(written)):
        row = {
            "messages": [
                ROWS["messages"]["messages"][0],
                {"role": "assistant", "content": "", "tool_calls": given},
            ]
        }
        (opened,) = open_sources(spec_of(lines(tmp_path, [row])).data)
        assert dict(next(opened.conversations(0, len(opened.rows)))[-1].extra)["tool_calls"] == [
            {"function": add}
        ]
    assert dict(second[-1].extra)["tool_calls"] == [{"function": halve}]


def test_what_is_null_in_tools_written_as_json_stays(tmp_path: Path) -> None:
    """Where they are columns it cannot be told from a key that the row has not."""
    tools, call = (
        [{"name": "add", "default": None}],
        [{"function": {"name": "add", "arguments": {"a": 2, "b": None}}}],
    )
    turns = [
        ROWS["messages"]["messages"][0],
        {"role": "assistant", "content": "", "tool_calls": json.dumps(call)},
    ]
    (opened,) = open_sources(
        spec_of(lines(tmp_path, [{"messages": turns, "tools": json.dumps(tools)}])).data
    )
    said = next(opened.conversations(0, len(opened.rows)))
    assert (dict(said[0].extra)["tools"], dict(said[-1].extra)["tool_calls"]) == (tools, call)


def test_rows_without_a_turn_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        ROWS["messages"],
        {"messages": None},
        {"messages": []},
        {"messages": [{"role": "system", "content": "Be kind."}]},
    ]
    counts = documents_of(tmp_path, lines(tmp_path, rows)).counts
    assert (counts.rows, counts.dropped) == (4, 3)
    question, answer = ROWS["messages"]["messages"]
    completions = [{"prompt": [question], "completion": said} for said in ([], [answer])]
    assert documents_of(tmp_path, lines(tmp_path, completions)).counts.dropped == 1


def test_the_layout_can_be_named(tmp_path: Path) -> None:
    rows = lines(tmp_path, [ROWS["alpaca"] | {"text": "All of it."}])
    assert texts(documents_of(tmp_path, rows, data__format="text"))[1].endswith("l of it.<|eos|>")
    assert (
        source_refusal(rows, tmp_path, data__format="prompt-completion").code
        == "data-columns-mismatch"
    )


def test_plain_text_is_trained_and_cut_to_sequences(tmp_path: Path) -> None:
    words = "one two three four five six seven " * 40
    documents = documents_of(
        tmp_path,
        lines(tmp_path, [{"text": words}, {"text": "A plain text."}]),
        data__sequence_length="64",
    )
    tokenizer = load_tokenizer(tiny().model)
    assert tokenizer.decode(documents.tokens) == f"{words}<|eos|>A plain text.<|eos|>"
    assert documents.lengths.max() == 64
    assert documents.trained_lengths.tolist() == (documents.lengths - 1).tolist()
    assert (
        documents.counts.rows,
        documents.counts.cut,
        documents.counts.truncated,
        documents.counts.dropped,
    ) == (2, 1, 0, 0)
    assert documents.rows is not None
    assert documents.rows.tolist() == [1] * (len(documents.lengths) - 1) + [2]


def test_a_mixture_has_its_shares_and_loses_no_row(tmp_path: Path) -> None:
    many = lines(
        tmp_path, [ROWS["alpaca"] | {"output": f"Answer {n}."} for n in range(40)], "many.jsonl"
    )
    few = lines(tmp_path, [ROWS["messages"]] * 3, "few.jsonl")
    mixture = (
        f'[{{source = "{many}", weight = 3}}, {{source = "{few}", weight = 1, format = '
        '"messages"}]'
    )
    documents = documents_of(tmp_path, mixture)
    assert [(part.counts.rows, part.documents, part.layout) for part in documents.parts] == [
        (40, 40, "alpaca"),
        (3, 3, "messages"),
    ]
    assert documents.counts.rows == 43
    epoch = documents.epoch(seed=42)
    assert set(epoch.tolist()) == set(range(43))
    assert np.count_nonzero(epoch >= 40) == 13  # a quarter of 53
    assert documents.epoch(seed=42).tolist() == epoch.tolist()
    training = np.arange(1, 43)  # the first is held out
    assert set(documents.epoch(42, training).tolist()) == set(training.tolist())
    assert np.count_nonzero(documents.epoch(42, training) >= 40) == 13
    batches = Batches(documents, spec_of(mixture), 0)
    assert sorted(batches.sequences.documents.tolist()) == sorted(epoch.tolist())


def test_weights_that_no_epoch_can_have_are_refused(tmp_path: Path) -> None:
    many = lines(tmp_path, [ROWS["alpaca"]] * 40, "many.jsonl")
    few = lines(tmp_path, [ROWS["messages"]], "few.jsonl")
    for weight in ("0.001", "1e-308"):  # the latter in infinitely many rounds
        documents = documents_of(
            tmp_path, f'[{{source = "{many}", weight = {weight}}}, {{source = "{few}"}}]'
        )
        problem = refusal(partial(documents.epoch, 42))
        assert (problem.code, problem.value) == ("data-weight-too-large", f"weight 1 of {few}")
    assert (
        len(
            documents_of(
                tmp_path, f'[{{source = "{many}", weight = 0.005}}, {{source = "{few}"}}]'
            ).epoch(42)
        )
        == 8040
    )


def test_the_weights_of_a_mixture_do_not_make_it_tokenised_again(tmp_path: Path) -> None:
    one, other = (
        lines(tmp_path, [ROWS["alpaca"]], "a.jsonl"),
        lines(tmp_path, [ROWS["messages"]], "b.jsonl"),
    )
    folders = {
        prepare(
            spec_of(f'[{{source = "{one}", weight = {weight}}}, {{source = "{other}"}}]'),
            tmp_path / "cache",
        )
        for weight in (1, 5)
    }
    assert len(folders) == 1


def test_rows_are_truncated_or_dropped_and_counted(tmp_path: Path) -> None:
    digits = "1 2 3 4 5 6 7 8 9 " * 30
    rows: list[dict[str, Any]] = [
        {"instruction": "Add.", "output": "They make 5."},
        {"instruction": "Count.", "output": digits},
        {"instruction": digits, "output": "Yes."},
        {"instruction": "Say nothing.", "output": ""},
        {"instruction": "Say nothing.", "output": None},
    ]
    documents = documents_of(tmp_path, lines(tmp_path, rows), data__sequence_length="64")
    counts = documents.counts
    assert (counts.rows, counts.truncated, counts.dropped, counts.dropped_too_long) == (5, 1, 3, 1)
    assert documents.lengths.tolist()[1] == 64
    assert documents.trained_lengths.min() > 0
    assert texts(documents, 1)[0].startswith("### Instruction:\nCount.")
    assert not texts(documents, 1)[1].endswith("<|eos|>")


def test_a_tokenizer_of_another_name_has_not_the_models_revision(tmp_path: Path) -> None:
    place = tmp_path / "hub" / "models--owner--tokenizer"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    load_tokenizer(tiny().model).save_pretrained(place / "snapshots" / ("a" * 40))
    (place / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(tiny().model.config))
    code = (
        "from so_tui.spec import find_preset, with_values; from so_tui_trainer.data.tokens import "
        "load_tokenizer;"
        "changes = {'model.revision': 'v2', 'model.tokenizer': 'owner/tokenizer'};"
        "print(load_tokenizer(with_values(find_preset('tiny').spec, changes).model).eos_token)"
    )
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    asked = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert asked.stdout == "<|eos|>\n", asked.stderr


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
    lengths = np.clip(
        np.random.default_rng(0).lognormal(5.5, 0.9, 1_000_000).astype(np.int64), 1, 4096
    )
    began = time.process_time()
    sequences = _pack(lengths, 4096)
    assert time.process_time() - began < 8  # about 1
    assert sequences.efficiency(lengths, 4096) > 0.99
