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

from tests.support.rows import (
    ROWS,
    alpaca,
    answers,
    documents_of,
    lines,
    source_refusal,
    texts,
    turns,
)

Rows = list[dict[str, Any]]


def write_csv(path: Path, rows: Rows, delimiter: str = ",") -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def _write_folder(path: Path, rows: Rows) -> None:
    for number, row in enumerate(rows, 1):
        lines(path, [row], f"train-{number}.jsonl")


WRITERS: dict[str, Callable[[Path, Rows], object]] = {
    "rows.jsonl": lambda path, rows: lines(path.parent, rows, path.name),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
    "rows.csv": write_csv,
    "semicolons.csv": lambda path, rows: write_csv(path, rows, ";"),
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "folder of tsv": lambda path, rows: write_csv(path / "rows.tsv", rows, "\t"),
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode())
    ),
    "folder": _write_folder,
    "saved": lambda path, rows: datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows)
    ).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_and_folder_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, alpaca("They make 5.", "Five."))
    assert answers(tmp_path, tmp_path / name) == ["They make 5.", "Five."]


WORDS, DATES = ["007", "5", "None", "NA", "true", "1.50"], ["2021-01-01", "2022-02-02"]
VERBATIM: dict[str, tuple[Rows, list[str]]] = {
    "rows.csv": (alpaca(*WORDS), WORDS),
    "folder/rows.csv": (alpaca(*WORDS), WORDS),
    "gaps.csv": (alpaca("5", "", "7"), ["5", "7"]),
    "dates.jsonl": (alpaca(*DATES), DATES),
    "turns.jsonl": ([{"messages": turns("When?", DATES[0])}], DATES[:1]),
    "numbers.jsonl": (alpaca(5, 2.5, 1e-3), ["5", "2.5", "0.001"]),
    "truths.jsonl": (alpaca(True, False), ["true", "false"]),
    "said.jsonl": ([{"messages": turns(1.5, 3)}], ["3"]),
}


@pytest.mark.parametrize("name", VERBATIM)
def test_no_text_of_a_file_becomes_a_number_a_date_or_nothing(tmp_path: Path, name: str) -> None:
    rows, said = VERBATIM[name]
    path = tmp_path / name
    (write_csv if path.suffix == ".csv" else WRITERS["rows.jsonl"])(path, rows)
    source = path.parent if name.startswith("folder") else path
    assert answers(tmp_path, source) == said


@pytest.mark.parametrize(
    "later", [{"input": "1 and 4"}, {"output": "five"}, {"system": "Be kind."}]
)
def test_columns_of_later_rows_are_read_too(tmp_path: Path, later: dict[str, str]) -> None:
    """``datasets`` takes the columns of a JSON file and their types from its first 10 MB."""
    (early,) = alpaca(5, input=None)
    rows = [early | {"filler": "x" * 1_000_000}] * 11 + [early | {"filler": ""} | later]
    documents = documents_of(tmp_path, lines(tmp_path, rows))
    assert texts(documents, 0)[1] == "5<|eos|>"
    context, said = texts(documents, 11)
    assert said == f"{later.get('output', 5)}<|eos|>"
    assert ("1 and 4" in context, context.startswith("Be kind.")) == (
        "input" in later,
        "system" in later,
    )


def test_files_of_a_folder_may_differ_in_columns_and_layout(tmp_path: Path) -> None:
    lines(tmp_path / "columns", alpaca("One."), "a.jsonl")
    (tmp_path / "columns" / "b.json").write_text(json.dumps(alpaca("Two.", id=7)))
    assert answers(tmp_path, tmp_path / "columns") == ["One.", "Two."]
    folder, names = tmp_path / "layouts", ("alpaca", "messages", "sharegpt")
    each = [documents_of(tmp_path, lines(folder, [ROWS[name]], f"{name}.jsonl")) for name in names]
    documents = documents_of(tmp_path, folder)
    assert [texts(documents, index) for index in range(3)] == [texts(one) for one in each]
    named = documents_of(tmp_path, folder, data__format="messages").counts
    assert (named.rows, named.dropped) == (3, 2)


def test_real_times_in_other_columns_are_no_trouble(tmp_path: Path) -> None:
    datasets.Dataset.from_list(alpaca("One.", created=datetime(2021, 1, 1, tzinfo=UTC))).to_parquet(
        tmp_path / "rows.parquet"
    )
    assert answers(tmp_path, tmp_path / "rows.parquet") == ["One."]
    rows = lines(tmp_path, alpaca("One.", created="2021-01-01 10:00:00"))
    assert answers(tmp_path, rows) == ["One."]


def test_ignored_files_of_a_folder_are_warned_of(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    for name in ("a.jsonl", "b.jsonl", "train-and-more.txt", ".hidden.json"):
        lines(folder, [ROWS["alpaca"]], name)
    datasets.Dataset.from_list([ROWS["alpaca"]]).to_parquet(folder / "c.parquet")
    (warning,) = documents_of(tmp_path, folder).warnings
    assert "c.parquet (" in warning
    lines(folder, [ROWS["alpaca"]], "my-train.jsonl")
    (warning,) = documents_of(tmp_path, folder).warnings
    assert "not read: a.jsonl, b.jsonl, c.parquet" in warning
    only = lines(tmp_path / "only", [ROWS["alpaca"]], "train.jsonl").parent
    assert not documents_of(tmp_path, only).warnings


@pytest.mark.parametrize(
    ("split", "code"),
    [
        ("train[:10", "data-split-unknown"),
        ("train[:1%]", "data-split-empty"),
        ("nothing", "data-split-unknown"),
    ],
)
def test_a_wrong_split_is_named(tmp_path: Path, split: str, code: str) -> None:
    rows = lines(tmp_path, alpaca("One.", split="a"))
    problem = source_refusal(rows, tmp_path, data__split=split)
    assert (problem.code, problem.field, problem.value) == (code, "data.split", split)


def test_split_and_subset_choose_the_rows(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    lines(folder / "easy", [ROWS["alpaca"]] * 4, "train.jsonl")
    lines(folder / "hard", alpaca(*["Five."] * 6), "train.jsonl")
    lines(folder / "hard", alpaca("Held out."), "test.jsonl")
    subsets = [
        {
            "config_name": name,
            "data_files": [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits],
        }
        for name, splits in (("easy", ["train"]), ("hard", ["train", "test"]))
    ]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(subsets)}\n---\n")
    for split, said in (("train[:50%]", ["Five."] * 3), ("test", ["Held out."])):
        assert answers(tmp_path, folder, data__subset="hard", data__split=split) == said
    assert source_refusal(folder, tmp_path).code == "data-subset-unknown"
    absent = source_refusal(folder, tmp_path, data__subset="easy", data__split="validation")
    assert absent.code == "data-split-unknown"
    of_file = source_refusal(folder / "hard" / "test.jsonl", tmp_path, data__subset="hard")
    assert (of_file.code, of_file.field, of_file.value) == (
        "data-subset-of-file",
        "data.subset",
        "hard",
    )
