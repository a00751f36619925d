"""From files that people have to documents: layouts, sources, mixtures, what is lost and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from so_tui.spec import InputError, RunSpec
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.cache import read
from so_tui_trainer.data.documents import Documents
from so_tui_trainer.data.sources import open_sources
from so_tui_trainer.data.tokens import load_tokenizer, prepare
from tests.support.launching import tiny

ROWS = {
    "alpaca": {"instruction": "Add the numbers.", "input": "2 and 3", "output": "They make 5."},
    "prompt-completion": {"prompt": "Add 2 and 3.", "completion": "They make 5."},
    "messages": {"messages": [{"role": "user", "content": "Add 2 and 3."}, {"role": "assistant", "content": "They make 5."}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Add 2 and 3."}, {"from": "gpt", "value": "They make 5."}]},
}
VARIANTS = {
    "null input": {"instruction": "Add.", "input": None, "output": "They make 5."},
    "conversational prompt": {
        "prompt": [{"role": "user", "content": "Add 2 and 3."}],
        "completion": [{"role": "assistant", "content": "They make 5."}],
    },
    "text parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Add."}]}, {"role": "assistant", "content": "They make 5."}]
    },
    "OpenAI's keys in ShareGPT's column": {"conversations": ROWS["messages"]["messages"]},
    "other roles": {"conversations": [{"from": "user", "value": "Add."}, {"from": "model", "value": "They make 5."}]},
    "roles in the wild": {"conversations": [{"from": "Human", "value": "Add."}, {"from": "AI ", "value": "They make 5."}]},
    "parts that are texts": {
        "messages": [{"role": "user", "content": ["Add", "."]}, {"role": "assistant", "content": ["They ", "make 5."]}]
    },
    "a prompt that is a number": {"prompt": 5, "completion": "They make 5."},
    "columns that mean something else": ROWS["alpaca"] | {"tools": "hammer, saw", "history": "of Rome", "system": 7},
    "a stop token in the data": {"prompt": "Add 2 and 3.", "completion": "They make 5.<|eos|>\n"},
}
ASIDE = {
    "alpaca": ({"system": "Be kind.", "history": [["Hi.", "Hello."]]}, "Be kind.\n\n### Instruction:\nHi.\n\n### Response:\n"),
    "sharegpt": ({"system": "Be kind."}, "Be kind.\n\n### Instruction:\n"),
    "messages": ({"system": "Be kind."}, "Be kind.\n\n### Instruction:\n"),
}


def lines(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def spec_of(source: object, **changes: str) -> RunSpec:
    return tiny(**({"data__source": str(source), "data__format": "auto"} | changes))


def documents_of(folder: Path, source: object, **changes: str) -> Documents:
    spec = spec_of(source, **changes)
    return read(prepare(spec, folder / "cache"), spec.data)


def texts(documents: Documents, index: int = 0) -> tuple[str, str]:
    """A document's context and its trained text."""
    tokenizer = load_tokenizer(tiny())
    part = slice(documents.offsets[index], documents.offsets[index + 1])
    ids, trained = documents.tokens[part], documents.trained[part]
    return str(tokenizer.decode(ids[~trained])), str(tokenizer.decode(ids[trained]))


def problem(source: object, folder: Path, **changes: str) -> str:
    with pytest.raises(InputError) as error:
        documents_of(folder, source, **changes)
    (found,) = error.value.problems
    assert found.remedy
    return str(found)


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
    assert texts(documents_of(tmp_path, lines(tmp_path, [VARIANTS[variant]])))[1] == "They make 5.<|eos|>"


@pytest.mark.parametrize("layout", ASIDE)
def test_what_stands_in_columns_of_its_own_comes_first(tmp_path: Path, layout: str) -> None:
    columns, expected = ASIDE[layout]
    assert texts(documents_of(tmp_path, lines(tmp_path, [ROWS[layout] | columns])))[0].startswith(expected)


def test_tools_and_calls_reach_the_template_without_the_keys_of_other_rows(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}]
    add, halve = {"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "halve", "arguments": {"of": 4}}
    rows = [
        {"messages": [ROWS["messages"]["messages"][0], {"role": "assistant", "tool_calls": [{"function": call}]}], "tools": given}
        for call, given in ((add, json.dumps(tools)), (halve, ""))
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (opened,) = open_sources(spec_of(tmp_path / "rows.parquet").data)
    first, second = opened.conversations()
    assert (first[0].role, first[0].extra) == ("tools", (("tools", tools),))
    assert dict(first[-1].extra)["tool_calls"] == [{"function": add}]
    assert [message.role for message in second] == ["user", "assistant"]
    written = [{"function": {**add, "arguments": json.dumps(add["arguments"])}}]
    for given in (written, json.dumps(written)):
        row = {"messages": [ROWS["messages"]["messages"][0], {"role": "assistant", "content": "", "tool_calls": given}]}
        (opened,) = open_sources(spec_of(lines(tmp_path, [row])).data)
        assert dict(next(opened.conversations())[-1].extra)["tool_calls"] == [{"function": add}]
    assert dict(second[-1].extra)["tool_calls"] == [{"function": halve}]


def test_what_is_null_in_tools_written_as_json_stays(tmp_path: Path) -> None:
    """Where they are columns it cannot be told from a key that the row has not."""
    tools, call = [{"name": "add", "default": None}], [{"function": {"name": "add", "arguments": {"a": 2, "b": None}}}]
    turns = [ROWS["messages"]["messages"][0], {"role": "assistant", "content": "", "tool_calls": json.dumps(call)}]
    (opened,) = open_sources(spec_of(lines(tmp_path, [{"messages": turns, "tools": json.dumps(tools)}])).data)
    said = next(opened.conversations())
    assert (dict(said[0].extra)["tools"], dict(said[-1].extra)["tool_calls"]) == (tools, call)


def test_rows_without_a_turn_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [ROWS["messages"], {"messages": None}, {"messages": []}, {"messages": [{"role": "system", "content": "Be kind."}]}]
    counts = documents_of(tmp_path, lines(tmp_path, rows)).counts
    assert (counts.rows, counts.dropped) == (4, 3)
    question, answer = ROWS["messages"]["messages"]
    completions = [{"prompt": [question], "completion": said} for said in ([], [answer])]
    assert documents_of(tmp_path, lines(tmp_path, completions)).counts.dropped == 1


def test_the_layout_can_be_named(tmp_path: Path) -> None:
    rows = lines(tmp_path, [ROWS["alpaca"] | {"text": "All of it."}])
    assert texts(documents_of(tmp_path, rows, data__format="text"))[1].endswith("l of it.<|eos|>")
    assert "prompt, completion" in problem(rows, tmp_path, data__format="prompt-completion")


def test_plain_text_is_trained_but_for_its_first_token_and_cut_where_it_is_longer_than_a_sequence(tmp_path: Path) -> None:
    words = "one two three four five six seven " * 40
    documents = documents_of(tmp_path, lines(tmp_path, [{"text": words}, {"text": "A plain text."}]), data__sequence_length="64")
    tokenizer = load_tokenizer(tiny())
    assert tokenizer.decode(documents.tokens) == f"{words}<|eos|>A plain text.<|eos|>"
    assert documents.lengths.max() == 64
    assert documents.trained_lengths.tolist() == (documents.lengths - 1).tolist()
    assert (documents.counts.rows, documents.counts.cut, documents.counts.truncated, documents.counts.dropped) == (2, 1, 0, 0)
    assert documents.rows is not None
    assert documents.rows.tolist() == [1] * (len(documents.lengths) - 1) + [2]


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_gzip(path: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))


WRITERS = {
    "rows.jsonl": lambda path, rows: lines(path.parent, rows, path.name),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
    "rows.csv": write_csv,
    "semicolons.csv": lambda path, rows: write_csv(path, rows, ";"),
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "folder of tsv": lambda path, rows: [path.mkdir(), write_csv(path / "rows.tsv", rows, "\t")],
    "rows.jsonl.gz": write_gzip,
    "folder": lambda path, rows: [path.mkdir(), lines(path, rows[:1], "train-1.jsonl"), lines(path, rows[1:], "train-2.jsonl")],
    "saved": lambda path, rows: datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_and_folder_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    rows = [ROWS["alpaca"], ROWS["alpaca"] | {"output": "Five."}]
    WRITERS[name](tmp_path / name, rows)
    documents = documents_of(tmp_path, tmp_path / name)
    assert [texts(documents, index)[1] for index in range(2)] == ["They make 5.<|eos|>", "Five.<|eos|>"]


def test_no_text_of_a_file_becomes_a_number_a_date_or_nothing(tmp_path: Path) -> None:
    answers = ["007", "5", "None", "NA", "true", "1.50"]
    dates = ["2021-01-01", "2022-02-02"]
    write_csv(tmp_path / "rows.csv", [{"instruction": "a", "output": answer} for answer in answers])
    write_csv(tmp_path / "gaps.csv", [{"instruction": "a", "output": answer} for answer in ("5", "", "7")])
    lines(tmp_path, [ROWS["alpaca"] | {"output": date} for date in dates], "dates.jsonl")
    lines(tmp_path, [{"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": dates[0]}]}], "turns.jsonl")
    lines(tmp_path, [{"instruction": "a", "output": answer} for answer in (5, 2.5, 1e-3)], "numbers.jsonl")
    lines(tmp_path, [{"instruction": "a", "output": answer} for answer in (True, False)], "truths.jsonl")
    said_numbers = [{"role": "user", "content": 1.5}, {"role": "assistant", "content": 3}]
    lines(tmp_path, [{"messages": said_numbers}], "said.jsonl")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_csv(folder / "rows.csv", [{"instruction": "a", "output": answer} for answer in answers])
    for name, said in (
        ("rows.csv", answers),
        ("gaps.csv", ["5", "7"]),
        ("dates.jsonl", dates),
        ("turns.jsonl", dates[:1]),
        ("numbers.jsonl", ["5", "2.5", "0.001"]),
        ("truths.jsonl", ["true", "false"]),
        ("said.jsonl", ["3"]),
        ("folder", answers),
    ):
        documents = documents_of(tmp_path, tmp_path / name)
        assert [texts(documents, index)[1] for index in range(len(documents.lengths))] == [f"{answer}<|eos|>" for answer in said]


@pytest.mark.parametrize("later", [{"input": "1 and 4"}, {"output": "five"}, {"system": "Be kind."}])
def test_what_a_later_row_has_is_read_too_however_long_the_file(tmp_path: Path, later: dict[str, str]) -> None:
    """``datasets`` takes the columns of a JSON file and their types from its first 10 MB."""
    early = {"instruction": "Add.", "input": None, "output": 5}
    rows = [early | {"filler": "x" * 1_000_000}] * 11 + [early | {"filler": ""} | later]
    documents = documents_of(tmp_path, lines(tmp_path, rows))
    assert [texts(documents, index)[1] for index in (0, 11)] == ["5<|eos|>", f"{later.get('output', 5)}<|eos|>"]
    context = texts(documents, 11)[0]
    assert ("1 and 4" in context, context.startswith("Be kind.")) == ("input" in later, "system" in later)


def test_files_of_a_folder_may_differ_in_their_columns(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    lines(folder, [ROWS["alpaca"]], "a.jsonl")
    (folder / "b.json").write_text(json.dumps([ROWS["alpaca"] | {"id": 7, "output": "Five."}]))
    documents = documents_of(tmp_path, folder)
    assert [texts(documents, index)[1] for index in (0, 1)] == ["They make 5.<|eos|>", "Five.<|eos|>"]


def test_files_of_a_folder_may_differ_in_their_layout(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    names = ("alpaca", "messages", "sharegpt")
    each = [documents_of(tmp_path, lines(folder, [ROWS[name]], f"{name}.jsonl")) for name in names]
    documents = documents_of(tmp_path, folder)
    assert [texts(documents, index) for index in range(3)] == [texts(one) for one in each]
    named = documents_of(tmp_path, folder, data__format="messages").counts
    assert (named.rows, named.dropped) == (3, 2)


def test_real_times_in_other_columns_are_no_trouble(tmp_path: Path) -> None:
    row = ROWS["alpaca"] | {"created": datetime(2021, 1, 1, tzinfo=UTC)}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    assert texts(documents_of(tmp_path, tmp_path / "rows.parquet"))[1] == "They make 5.<|eos|>"
    rows = lines(tmp_path, [ROWS["alpaca"] | {"created": "2021-01-01 10:00:00"}])
    assert texts(documents_of(tmp_path, rows))[1] == "They make 5.<|eos|>"


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "train-and-more.txt", ".hidden.json"):
        lines(tmp_path, [ROWS["alpaca"]], name)
    datasets.Dataset.from_list([ROWS["alpaca"]]).to_parquet(tmp_path / "c.parquet")
    (told,) = documents_of(tmp_path / "cache", tmp_path).warnings
    assert "c.parquet are no part of it" in told
    lines(tmp_path, [ROWS["alpaca"]], "my-train.jsonl")
    (told,) = documents_of(tmp_path / "cache", tmp_path).warnings
    assert "a.jsonl, b.jsonl, c.parquet" in told
    only = tmp_path / "only"
    only.mkdir()
    assert not documents_of(tmp_path, lines(only, [ROWS["alpaca"]], "train.jsonl").parent).warnings


@pytest.mark.parametrize(("split", "said"), [("train[:10", "Unrecognized"), ("train[:1%]", "no rows"), ("nothing", "Unknown split")])
def test_a_split_that_is_wrong_is_named(tmp_path: Path, split: str, said: str) -> None:
    told = problem(lines(tmp_path, [ROWS["alpaca"] | {"split": "a"}]), tmp_path, data__split=split)
    assert told.startswith(f"data.split = {split}")
    assert said in told


def test_split_and_subset_choose_the_rows(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    (folder / "easy").mkdir(parents=True)
    (folder / "hard").mkdir()
    lines(folder / "easy", [ROWS["alpaca"]] * 4, "train.jsonl")
    lines(folder / "hard", [ROWS["alpaca"] | {"output": "Five."}] * 6, "train.jsonl")
    lines(folder / "hard", [ROWS["alpaca"] | {"output": "Held out."}], "test.jsonl")
    subsets = [
        {"config_name": name, "data_files": [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits]}
        for name, splits in (("easy", ["train"]), ("hard", ["train", "test"]))
    ]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(subsets)}\n---\n")
    half = documents_of(tmp_path, folder, data__subset="hard", data__split="train[:50%]")
    assert half.counts.rows == 3
    assert texts(half)[1] == "Five.<|eos|>"
    assert texts(documents_of(tmp_path, folder, data__subset="hard", data__split="test"))[1] == "Held out.<|eos|>"
    assert "data.subset" in problem(folder, tmp_path)
    assert "data.split" in problem(folder, tmp_path, data__subset="easy", data__split="validation")
    assert "data.subset = hard" in problem(folder / "hard" / "test.jsonl", tmp_path, data__subset="hard")


def test_a_mixture_has_the_shares_of_its_weights_and_loses_no_row(tmp_path: Path) -> None:
    many = lines(tmp_path, [ROWS["alpaca"] | {"output": f"Answer {n}."} for n in range(40)], "many.jsonl")
    few = lines(tmp_path, [ROWS["messages"]] * 3, "few.jsonl")
    mixture = f'[{{source = "{many}", weight = 3}}, {{source = "{few}", weight = 1, format = "messages"}}]'
    documents = documents_of(tmp_path, mixture)
    assert [(part.counts.rows, part.documents, part.layout) for part in documents.parts] == [(40, 40, "alpaca"), (3, 3, "messages")]
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
    documents = documents_of(tmp_path, f'[{{source = "{many}", weight = 0.001}}, {{source = "{few}"}}]')
    with pytest.raises(InputError, match=r"weight 1 of .*few.jsonl: .* 40,000 times each"):
        documents.epoch(42)
    assert len(documents_of(tmp_path, f'[{{source = "{many}", weight = 0.005}}, {{source = "{few}"}}]').epoch(42)) == 8040


def test_the_weights_of_a_mixture_do_not_make_it_tokenised_again(tmp_path: Path) -> None:
    one, other = lines(tmp_path, [ROWS["alpaca"]], "a.jsonl"), lines(tmp_path, [ROWS["messages"]], "b.jsonl")
    folders = {
        prepare(spec_of(f'[{{source = "{one}", weight = {weight}}}, {{source = "{other}"}}]'), tmp_path / "cache") for weight in (1, 5)
    }
    assert len(folders) == 1


def test_rows_that_are_too_long_lose_their_end_and_those_without_trained_tokens_are_dropped(tmp_path: Path) -> None:
    digits = "1 2 3 4 5 6 7 8 9 " * 30
    rows = [
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


def test_a_source_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    told = problem(lines(tmp_path, [{"instruction": "1 2 3 4 5 6 7 8 9 " * 30, "output": "Yes."}]), tmp_path, data__sequence_length="64")
    assert "none of its 1 rows" in told
    assert "data.sequence_length" in told
    assert "answers are empty" in problem(lines(tmp_path, [{"instruction": "a", "output": ""}]), tmp_path)


GOOD = json.dumps(ROWS["alpaca"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", '{"question": "a", "answer": "b"}', ("data.source", "question, answer", "alpaca: instruction, output")),
        ("rows.txt", "anything", (".txt", ".jsonl")),
        ("rows.json", "not json at all", ("rows.json, row 1", "no JSON")),
        ("rows.json", '[{"instruction": "a", "output": "b"},', ("rows.json", "cannot be read")),
        ("rows.jsonl", "[1, 2]\n3", ("rows.jsonl", "cannot be read")),
        ("rows.jsonl", f'{GOOD}\n{GOOD}\n{{"instruction": "a"', ("rows.jsonl, row 3", "no JSON")),
        ("rows.jsonl", f'{GOOD}\n{{"instruction": "a",\n{GOOD}\n', ("rows.jsonl, row 2", "no JSON")),
        ("rows.jsonl", "", ("rows.jsonl", "the file is empty")),
        ("rows.jsonl", f'{GOOD}\n{{"instruction": "a", "output": ["b"]}}', ("row 2", "column output", "not text")),
        ("rows.jsonl", '{"instruction": {"a": 1}, "output": "b"}', ("rows.jsonl, row 1", "column instruction", "not text")),
        (
            "rows.jsonl",
            '{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"role": "narrator", "content": "b"}]}',
            ("rows.jsonl, row 2", "column messages[0].role", "'narrator'", "assistant"),
        ),
        ("rows.jsonl", '{"messages": [{"speaker": "a", "words": "b"}]}', ("row 1", "column messages[0]", "speaker, words")),
        ("rows.jsonl", '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', ("row 1", "not text")),
        ("rows.jsonl", json.dumps(ROWS["messages"] | {"tools": "a"}), ("row 1", "column tools", "no JSON")),
        ("rows.jsonl", f'{GOOD[:-1]}, "history": [["a"]]}}', ("row 1", "column history[0]", "not a pair")),
        ("rows.jsonl", '{"messages": "a"}', ("row 1", "column messages", "not a list of turns")),
        ("rows.csv", 'instruction,output\na,b\nc,d,e\n', ("rows.csv", "line 3")),
        ("rows.parquet", "no parquet", ("rows.parquet", "cannot be read")),
        ("rows.json", "[]", ("rows.json: has no rows",)),
        ("rows.csv", "instruction,output\n", ("rows.csv: has no rows",)),
        ("rows.jsonl", f"{GOOD}\n{GOOD.replace('5', 'ü')}".encode("latin-1"), ("rows.jsonl: row 2", "Save the file as UTF-8")),
        ("rows.jsonl.gz", gzip.compress(GOOD.encode() * 100)[:60], ("rows.jsonl.gz", "cannot be read", "ended before")),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_with_its_row_and_column(
    tmp_path: Path, name: str, content: str | bytes, said: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    told = problem(tmp_path / name, tmp_path)
    for words in said:
        assert words in told


def test_of_a_folder_the_file_and_the_row_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "dataset_info.json").write_text('{\n "description": "what is in it"\n}')
    (folder / "a.jsonl").write_text(GOOD)
    (folder / "b.jsonl").write_text(f'{GOOD}\n{{"instruction": "a"')
    assert f"{folder}/b.jsonl, row 2: is no JSON" in problem(folder, tmp_path)
    (folder / "b.jsonl").unlink()
    (folder / "a.jsonl").unlink()
    assert "cannot be read" in problem(folder, tmp_path)


def test_a_tokenizer_of_another_name_has_not_the_models_revision(tmp_path: Path) -> None:
    place = tmp_path / "hub" / "models--owner--tokenizer"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    load_tokenizer(tiny()).save_pretrained(place / "snapshots" / ("a" * 40))
    (place / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(tiny().model.config))
    code = (
        "from so_tui.spec import find_preset, with_values; from so_tui_trainer.data.tokens import load_tokenizer;"
        "changes = {'model.revision': 'v2', 'model.tokenizer': 'owner/tokenizer'};"
        "print(load_tokenizer(with_values(find_preset('tiny').spec, changes)).eos_token)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    asked = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert asked.stdout == "<|eos|>\n", asked.stderr


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/none/datasets")
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    for variable, named in (("HF_HOME", "HF_HOME"), ("HF_HUB_CACHE", "XDG_CACHE_HOME")):
        monkeypatch.delenv("HF_HOME", raising=False)
        monkeypatch.setenv(variable, "/proc/none")
        told = problem(lines(tmp_path, [ROWS["alpaca"]]), tmp_path)
        assert told.startswith(f"{named} = /proc/none/datasets: cannot be written (")
        assert f"set {named} to a folder" in told


def test_what_is_not_there_is_no_hub_name(tmp_path: Path) -> None:
    told = problem(tmp_path / "absent.jsonl", tmp_path)
    assert "no such file" in told
    assert "Errno" not in told
    (tmp_path / "empty").mkdir()
    assert "empty" in problem(tmp_path / "empty", tmp_path)


def test_a_model_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny().model.config))
    told = problem(lines(tmp_path, [ROWS["alpaca"]]), tmp_path, model__tokenizer=str(tmp_path / "model"))
    assert "model.tokenizer" in told
    absent = problem(lines(tmp_path, [ROWS["alpaca"]]), tmp_path, model__tokenizer=str(tmp_path / "absent"))
    assert "there is no such folder" in absent
