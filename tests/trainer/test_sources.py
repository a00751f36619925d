"""Files and folders that people have: each kind is read, and every text as it is written."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.support.rows import ROWS, documents_of, lines, source_refusal, texts


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_gzip(path: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))


def _write_tsv_folder(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir()
    write_csv(path / "rows.tsv", rows, "\t")


def _write_folder(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir()
    lines(path, rows[:1], "train-1.jsonl")
    lines(path, rows[1:], "train-2.jsonl")


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], object]] = {
    "rows.jsonl": lambda path, rows: lines(path.parent, rows, path.name),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
    "rows.csv": lambda path, rows: write_csv(path, rows),
    "semicolons.csv": lambda path, rows: write_csv(path, rows, ";"),
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "folder of tsv": _write_tsv_folder,
    "rows.jsonl.gz": write_gzip,
    "folder": _write_folder,
    "saved": lambda path, rows: datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows)
    ).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_and_folder_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    rows = [ROWS["alpaca"], ROWS["alpaca"] | {"output": "Five."}]
    WRITERS[name](tmp_path / name, rows)
    documents = documents_of(tmp_path, tmp_path / name)
    assert [texts(documents, index)[1] for index in range(2)] == [
        "They make 5.<|eos|>",
        "Five.<|eos|>",
    ]


def test_no_text_of_a_file_becomes_a_number_a_date_or_nothing(tmp_path: Path) -> None:
    answers = ["007", "5", "None", "NA", "true", "1.50"]
    dates = ["2021-01-01", "2022-02-02"]
    write_csv(tmp_path / "rows.csv", [{"instruction": "a", "output": answer} for answer in answers])
    write_csv(
        tmp_path / "gaps.csv", [{"instruction": "a", "output": answer} for answer in ("5", "", "7")]
    )
    lines(tmp_path, [ROWS["alpaca"] | {"output": date} for date in dates], "dates.jsonl")
    lines(
        tmp_path,
        [
            {
                "messages": [
                    {"role": "user", "content": "When?"},
                    {"role": "assistant", "content": dates[0]},
                ]
            }
        ],
        "turns.jsonl",
    )
    lines(
        tmp_path,
        [{"instruction": "a", "output": answer} for answer in (5, 2.5, 1e-3)],
        "numbers.jsonl",
    )
    lines(
        tmp_path,
        [{"instruction": "a", "output": answer} for answer in (True, False)],
        "truths.jsonl",
    )
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
        assert [texts(documents, index)[1] for index in range(len(documents.lengths))] == [
            f"{answer}<|eos|>" for answer in said
        ]


@pytest.mark.parametrize(
    "later", [{"input": "1 and 4"}, {"output": "five"}, {"system": "Be kind."}]
)
def test_columns_of_later_rows_are_read_too(tmp_path: Path, later: dict[str, str]) -> None:
    """``datasets`` takes the columns of a JSON file and their types from its first 10 MB."""
    early: dict[str, Any] = {"instruction": "Add.", "input": None, "output": 5}
    rows = [early | {"filler": "x" * 1_000_000}] * 11 + [early | {"filler": ""} | later]
    documents = documents_of(tmp_path, lines(tmp_path, rows))
    assert [texts(documents, index)[1] for index in (0, 11)] == [
        "5<|eos|>",
        f"{later.get('output', 5)}<|eos|>",
    ]
    context = texts(documents, 11)[0]
    assert ("1 and 4" in context, context.startswith("Be kind.")) == (
        "input" in later,
        "system" in later,
    )


def test_files_of_a_folder_may_differ_in_their_columns(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    lines(folder, [ROWS["alpaca"]], "a.jsonl")
    (folder / "b.json").write_text(json.dumps([ROWS["alpaca"] | {"id": 7, "output": "Five."}]))
    documents = documents_of(tmp_path, folder)
    assert [texts(documents, index)[1] for index in (0, 1)] == [
        "They make 5.<|eos|>",
        "Five.<|eos|>",
    ]


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


def test_ignored_files_of_a_folder_are_warned_of(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "train-and-more.txt", ".hidden.json"):
        lines(tmp_path, [ROWS["alpaca"]], name)
    datasets.Dataset.from_list([ROWS["alpaca"]]).to_parquet(tmp_path / "c.parquet")
    (warning,) = documents_of(tmp_path / "cache", tmp_path).warnings
    assert "c.parquet (" in warning
    lines(tmp_path, [ROWS["alpaca"]], "my-train.jsonl")
    (warning,) = documents_of(tmp_path / "cache", tmp_path).warnings
    assert "not read: a.jsonl, b.jsonl, c.parquet" in warning
    only = tmp_path / "only"
    only.mkdir()
    assert not documents_of(tmp_path, lines(only, [ROWS["alpaca"]], "train.jsonl").parent).warnings


@pytest.mark.parametrize(
    ("split", "code"),
    [
        ("train[:10", "data-split-unknown"),
        ("train[:1%]", "data-split-empty"),
        ("nothing", "data-split-unknown"),
    ],
)
def test_a_wrong_split_is_named(tmp_path: Path, split: str, code: str) -> None:
    problem = source_refusal(
        lines(tmp_path, [ROWS["alpaca"] | {"split": "a"}]), tmp_path, data__split=split
    )
    assert (problem.code, problem.field, problem.value) == (code, "data.split", split)


def test_split_and_subset_choose_the_rows(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    (folder / "easy").mkdir(parents=True)
    (folder / "hard").mkdir()
    lines(folder / "easy", [ROWS["alpaca"]] * 4, "train.jsonl")
    lines(folder / "hard", [ROWS["alpaca"] | {"output": "Five."}] * 6, "train.jsonl")
    lines(folder / "hard", [ROWS["alpaca"] | {"output": "Held out."}], "test.jsonl")
    subsets = [
        {
            "config_name": name,
            "data_files": [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits],
        }
        for name, splits in (("easy", ["train"]), ("hard", ["train", "test"]))
    ]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(subsets)}\n---\n")
    half = documents_of(tmp_path, folder, data__subset="hard", data__split="train[:50%]")
    assert half.counts.rows == 3
    assert texts(half)[1] == "Five.<|eos|>"
    assert (
        texts(documents_of(tmp_path, folder, data__subset="hard", data__split="test"))[1]
        == "Held out.<|eos|>"
    )
    assert source_refusal(folder, tmp_path).code == "data-subset-unknown"
    assert (
        source_refusal(folder, tmp_path, data__subset="easy", data__split="validation").code
        == "data-split-unknown"
    )
    of_file = source_refusal(folder / "hard" / "test.jsonl", tmp_path, data__subset="hard")
    assert (of_file.code, of_file.field, of_file.value) == (
        "data-subset-of-file",
        "data.subset",
        "hard",
    )
