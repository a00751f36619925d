"""Files and folders that people have: each kind is read, every text as it is written, and what
cannot be used is named with its row.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import datasets
import pyarrow
import pytest

from so_tui_trainer.data.sources import open_sources
from so_tui_trainer.data.tokens import load_tokenizer
from tests.support.heavy_inputs import INPUTS
from tests.support.launching import tiny
from tests.support.python_path import older_than
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

Rows = list[dict[str, Any]]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 731\n"


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


def test_a_path_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    for name in ("run [1]/rows[a].jsonl", "b*[c]?.jsonl", "many {2}/rows.csv", "p[1].parquet"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        WRITERS[f"rows{path.suffix}"](path, alpaca("One."))
        assert answers(tmp_path, path) == ["One."]
        if path.parent != tmp_path:
            assert answers(tmp_path, path.parent) == ["One."]


@pytest.mark.parametrize(
    ("name", "is_named"),
    [
        ("rows.jsonl.bak", True),
        ("rows.jsonl~", True),
        ("#rows.jsonl#", True),
        ("~rows.jsonl", True),
        ("rows.jsonl.tmp", True),
        ("old/rows.parquet.1", True),
        ("empty.jsonl", True),
        (".rows.jsonl.swp", False),
        ("._rows.jsonl", False),
        (".ipynb_checkpoints/rows-checkpoint.jsonl", False),
        ("notes.txt", False),
    ],
)
def test_backups_in_a_folder_are_left_out(tmp_path: Path, name: str, is_named: bool) -> None:
    folder = lines(tmp_path / "data", alpaca("New.")).parent
    lines(folder, [] if name.startswith("empty") else alpaca("Old."), name)
    assert answers(tmp_path, folder) == ["New."]
    warned = documents_of(tmp_path, folder).warnings
    assert [f"1 file not read: {name} (" in warning for warning in warned] == [True] * is_named


def test_a_copy_in_a_folder_is_read_and_warned_of(tmp_path: Path) -> None:
    folder = lines(tmp_path / "data", alpaca("New.")).parent
    lines(folder, alpaca("New."), "rows (copy).jsonl")
    lines(folder, alpaca("Old."), "rows.other.jsonl")
    assert sorted(answers(tmp_path, folder)) == ["New.", "New.", "Old."]
    (warning,) = documents_of(tmp_path, folder).warnings
    assert "rows.jsonl has the same content as rows (copy).jsonl" in warning


QUOTED = 'say "hi", then'
TABLES: dict[str, tuple[str, list[str]]] = {
    "pipes.csv": ("instruction|output\na|b, c\n", ["b, c"]),
    "tabs.csv": ("instruction\toutput\na\tb, c\n", ["b, c"]),
    "commas.tsv": ("instruction,output\na,b\n", ["b"]),
    "quoted.csv": ('\ufeffinstruction,output\na,"say ""hi"", then"\n', [QUOTED]),
    "lines.csv": ('instruction,output\r\na,"b\n\nc"\r\n', ["b\n\nc"]),
    "slashes.csv": ('instruction,output\na,"C:\\new\\"\n', ["C:\\new\\"]),
    "returns.csv": ("instruction,output\ra,b\r", ["b"]),
    "quoted.tsv": ('instruction\toutput\na\t"say ""hi"", then"\n', [QUOTED]),
    "plain.tsv": ('instruction\toutput\na\t"Hi" he said\nb\t"c\n', ['"Hi" he said', '"c']),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_in_its_own_dialect(tmp_path: Path, name: str) -> None:
    content, said = TABLES[name]
    path = tmp_path / "tables" / name
    path.parent.mkdir()
    path.write_bytes(content.encode())
    assert answers(tmp_path, path) == answers(tmp_path, path.parent) == said


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_other_encodings_are_named(tmp_path: Path, name: str, encoding: str) -> None:
    WRITERS[name](tmp_path / name, alpaca("One."))
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_bytes(text.encode(encoding))
    problem = source_refusal(tmp_path / name, tmp_path)
    assert (problem.code, "iconv" in problem.remedy) == ("data-not-utf8", True)


def test_a_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("instruction,output\na,b\nc,ü\n".encode("latin-1"))
    assert source_refusal(path, tmp_path).message == "line 3 has text that is not UTF-8"


def test_values_of_json_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Neither other rows of a column nor the size of a number change a value."""
    call = {"lat": 48.858370123456, "tiny": 1e-12, "id": 123456789012345678901234567890}
    tools = [{"type": "function", "function": {"name": "f", "parameters": call}}]
    said = ["[1.50, 2]", '{"a": 1}', "1e-12", 18446744073709551617]
    rows = [{"messages": turns("Go.", text), "tools": tools} for text in said]
    (opened,) = open_sources(spec_of(lines(tmp_path, rows)).data)
    read = [list(conversation) for conversation in opened.conversations(0, len(rows))]
    assert [conversation[-1].content for conversation in read] == [*map(str, said)]
    assert [dict(conversation[0].extra)["tools"] for conversation in read] == [
        row["tools"] for row in rows
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv.gz", "folder/b.parquet", "rows.json"])
def test_pointers_of_git_lfs_are_no_data(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines(path.parent, alpaca("One."), "a.parquet.jsonl")
    path.write_text(POINTER)
    source = path.parent if name.startswith("folder") else path
    problem = source_refusal(source, tmp_path)
    assert (problem.code, problem.value) == ("lfs-pointer", str(path))
    assert f"`git lfs pull` in {path.parent}" in problem.remedy


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
)
def test_pointers_of_git_lfs_are_no_tokenizer(tmp_path: Path, name: str) -> None:
    tokenizer = tmp_path / "tokenizer"
    load_tokenizer(tiny().model).save_pretrained(tokenizer)
    (tokenizer / "model.safetensors").write_text(POINTER)  # a tokenizer does not need it
    rows = lines(tmp_path, alpaca("One."))
    assert documents_of(tmp_path, rows, model__tokenizer=str(tokenizer)).lengths.size
    (tokenizer / name).write_text(POINTER)
    problem = source_refusal(rows, tmp_path, model__tokenizer=str(tokenizer))
    assert (problem.code, problem.field) == ("lfs-pointer", "model.tokenizer")
    assert problem.message.startswith(f"{name} is a pointer")


@pytest.mark.parametrize("compress", ["zstd", "bz2"])
def test_compressed_files_need_no_further_package(tmp_path: Path, compress: str) -> None:
    path = tmp_path / f"rows.jsonl.{'zst' if compress == 'zstd' else compress}"
    with pyarrow.CompressedOutputStream(str(path), compress) as file:
        file.write("\n".join(map(json.dumps, alpaca("One.", "Two."))).encode())
    assert answers(tmp_path, path) == ["One.", "Two."]


def test_archives_in_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with ZipFile(tmp_path / "data" / "rows.zip", "w") as archive:
        archive.writestr("in/rows.jsonl", json.dumps(alpaca("One.")[0]))
        archive.writestr("__MACOSX/in/rows.jsonl", json.dumps(alpaca("Two.")[0]))
    assert answers(tmp_path, tmp_path / "data") == ["One."]


def test_ignored_files_of_a_folder_are_warned_of(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    for name in ("a.jsonl", "b.jsonl", "train-and-more.txt", ".hidden.json"):
        lines(folder, alpaca(name), name)
    datasets.Dataset.from_list([ROWS["alpaca"]]).to_parquet(folder / "c.parquet")
    (warning,) = documents_of(tmp_path, folder).warnings
    assert "c.parquet (" in warning
    lines(folder, [ROWS["alpaca"]], "my-train.jsonl")
    (warning,) = documents_of(tmp_path, folder).warnings
    assert "not read: a.jsonl, b.jsonl, c.parquet" in warning
    only = lines(tmp_path / "only", [ROWS["alpaca"]], "train.jsonl").parent
    assert not documents_of(tmp_path, only).warnings


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
    of_file = source_refusal(folder / "hard" / "test.jsonl", tmp_path, data__subset="hard")
    assert (of_file.code, of_file.value) == ("data-subset-of-file", "hard")
    for split, code in (
        ("train[:10", "data-split-unknown"),
        ("train[:1%]", "data-split-empty"),
        ("validation", "data-split-unknown"),
    ):
        problem = source_refusal(folder, tmp_path, data__subset="easy", data__split=split)
        assert (problem.code, problem.field, problem.value) == (code, "data.split", split)


GOOD = json.dumps(ROWS["alpaca"])
DEEP = f'{{"messages": {"[" * 5_000}1{"]" * 5_000}}}'
NINES = "9" * 5000
NARRATOR = (
    '{"messages": [{"role": "user", "content": "a"}]}\n'
    '{"messages": [{"role": "narrator", "content": "b"}]}'
)


def test_a_source_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    long_prompt = lines(tmp_path, alpaca("Yes.", instruction="1 2 3 4 5 6 7 8 9 " * 30))
    problem = source_refusal(long_prompt, tmp_path, data__sequence_length="64")
    assert problem.code == "data-prompts-too-long"
    assert source_refusal(lines(tmp_path, alpaca("")), tmp_path).code == "data-nothing-trained"


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("rows.jsonl", '{"question": "a", "answer": "b"}', "data-columns-unknown"),
        ("rows.txt", "anything", "data-file-type-unknown"),
        ("rows.json", '[{"instruction": "a", "output": "b"},', "data-source-unreadable"),
        ("rows.jsonl", "[1, 2]\n3", "data-source-unreadable"),
        pytest.param(
            "rows.jsonl", "\n\n  \n", "data-source-empty", marks=older_than("datasets", 5, 0)
        ),
        ("rows.parquet", "no parquet", "data-source-unreadable"),
        ("rows.csv", "instruction,output\n", "data-source-empty"),
        ("rows.jsonl", f"{GOOD}\n{GOOD.replace('5', 'ü')}".encode("latin-1"), "data-not-utf8"),
        (
            "rows.jsonl.gz",
            gzip.compress(GOOD.encode() * 100, mtime=0)[:60],
            "data-source-unreadable",
        ),
    ],
)
def test_an_unusable_file_is_named(
    tmp_path: Path, name: str, content: str | bytes, code: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    problem = source_refusal(path, tmp_path)
    assert (problem.code, problem.field, problem.value) == (code, "data.source", str(path))


NESTED = f'{GOOD}\n{GOOD}\n{{"messages": {"[" * 50_000}1{"]" * 50_000}}}\n'


@pytest.mark.parametrize(
    ("name", "content", "code", "row"),
    [
        ("rows.json", "not json at all", "data-row-not-json", 1),
        ("rows.jsonl", "null\n", "data-row-not-object", 1),
        ("rows.json", f"[null, {GOOD}]", "data-row-not-object", 1),
        ("rows.jsonl", f"{GOOD},\n{GOOD},\n", "data-row-not-json", 1),
        ("rows.jsonl", f"{GOOD}\n// the end\n", "data-row-not-json", 2),
        ("rows.jsonl", f'{GOOD}\n{{"output": 1e999}}\n', "data-number-too-long", 2),
        ("rows.jsonl", f'{GOOD}\n{{"text": "half: \\ud83d"}}\n', "data-half-character", 2),
        ("rows.json", f'[{GOOD}, {{"text": "\\uDE00"}}]', "data-half-character", 2),
        ("rows.csv", "instruction,output\na,b\nc,d,e\n", "data-line-unreadable", 2),
        ("rows.csv", "instruction,output\na,b\nc\n", "data-line-unreadable", 2),
        ("rows.csv", "text\nwell, yes\n", "data-line-unreadable", 1),
        ("rows.csv", 'instruction,output\n"Go.","A \\"good\\" day"\n', "data-line-unreadable", 1),
        ("rows.csv", 'instruction,output\nGo.,"A good day\n', "data-line-unreadable", 1),
        ("rows.tsv", 'instruction\toutput\n"a"\t"\\"b\\""\n', "data-line-unreadable", 1),
        ("rows.csv", "text,text\na,b\n", "data-column-twice", None),
        ("rows.jsonl", f'{GOOD}\n{GOOD}\n{{"instruction": "a"', "data-row-not-json", 3),
        ("rows.jsonl", f'{GOOD}\n{{"instruction": "a",\n{GOOD}\n', "data-row-not-json", 2),
        ("rows.jsonl", NESTED, "data-row-too-deep", 3),
        ("rows.json", f"[{GOOD},\n{GOOD},\n{DEEP}]", "data-row-too-deep", None),
        ("rows.json.gz", f"[\n{DEEP}]", "data-row-too-deep", None),
        ("rows.jsonl", json.dumps({"messages": f"[{NINES}]"}), "data-row-unreadable", 1),
        ("rows.jsonl", f'{{"output": {NINES}}}\n{{"instruction"\n', "data-number-too-long", 1),
        ("folder/b.jsonl", f'{GOOD}\n{{"instruction": "a"', "data-row-not-json", 2),
        ("folder/b.jsonl.gz", f"{GOOD}\n{DEEP}\n", "data-row-too-deep", 2),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_row_that_is_no_json_or_too_deep_or_long_is_named(
    name: str, content: str, code: str, row: int | None, tmp_path: Path
) -> None:
    """In a folder that is given by a link, the row is named by the link."""
    path, folder = tmp_path / name, tmp_path / "far" / "away"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text('{\n "description": "what is in it"\n}')
    (tmp_path / "folder").symlink_to(folder)
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    problem = source_refusal(path.parent if path.parent != tmp_path else path, tmp_path)
    assert (problem.code, problem.value) == (code, f"{path}, row {row}" if row else str(path))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_is_too_long_is_named_at_once(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.write(f"{GOOD}\n".encode())
        file.truncate(8 << 30)  # sparse: it takes no space
    begun = time.process_time()
    problem = source_refusal(tmp_path / name, tmp_path)
    assert (problem.code, problem.value) == ("data-row-too-long", f"{tmp_path / name}, row 2")
    assert time.process_time() - begun < 5, "8 GiB are not read"


def test_a_small_compressed_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(40):
            file.write(bytes(1 << 20))
    assert source_refusal(tmp_path / "rows.jsonl.gz", tmp_path).code == "data-row-too-long"


@pytest.mark.parametrize("name", ["rows.zip", "rows.jsonl"])
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (f"{GOOD}\n".encode() + bytes(40 << 20), "data-row-too-long"),
        (f'{GOOD}\n{{"a": {"[" * 500}{"]" * 500}}}'.encode(), "data-row-too-deep"),
    ],
)
def test_rows_in_an_archive_are_checked_like_others(
    content: bytes, code: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with ZipFile(folder / name, "w", ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", content)
    problem = source_refusal(folder, tmp_path)
    assert (problem.code, problem.value) == (code, f"{folder / name}/rows.jsonl, row 2")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("csv.gz with a header of 8 GB", "data-row-too-long"),
        ("csv.gz with a row of 8 GB", "data-row-too-long"),
        ("csv of 300,000 columns", "data-too-many-columns"),
        ("row of 60,000 keys", "data-too-many-columns"),
        ("60,000 rows of other keys", "data-too-many-columns"),
        pytest.param("folder of 20,000 files", "data-too-many-files", marks=pytest.mark.slow),
        pytest.param("jsonl.gz of 5.6 GB", "data-expands-too-much", marks=pytest.mark.slow),
        pytest.param("gz with 4 GB of line ends", "data-expands-too-much", marks=pytest.mark.slow),
    ],
)
def test_what_would_take_hours_is_refused(name: str, code: str, tmp_path: Path) -> None:
    begun = time.process_time()
    source = Path(INPUTS[name](tmp_path)[-1].partition("=")[2])
    problem = source_refusal(source, tmp_path)
    assert (problem.code, problem.value.partition(",")[0]) == (code, str(source))
    assert time.process_time() - begun < 20


def test_pipes_and_devices_are_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("rows.jsonl", "zero.jsonl"):
        assert source_refusal(tmp_path / name, tmp_path).code == "data-source-not-a-file"


@pytest.mark.parametrize(
    ("content", "row", "column"),
    [
        (f'{GOOD}\n{{"instruction": "a", "output": ["b"]}}', 2, "output"),
        ('{"instruction": {"a": 1}, "output": "b"}', 1, "instruction"),
        (NARRATOR, 2, "messages[0].role"),
        ('{"messages": [{"speaker": "a", "words": "b"}]}', 1, "messages[0]"),
        ('{"messages": [{"role": "user", "content": [{"type": 1}]}]}', 1, "messages[0].content"),
        (json.dumps(ROWS["messages"] | {"tools": "a"}), 1, "tools"),
        (f'{GOOD[:-1]}, "history": [["a"]]}}', 1, "history[0]"),
        ('{"messages": "a"}', 1, "messages"),
    ],
)
def test_an_unreadable_column_is_named(tmp_path: Path, content: str, row: int, column: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    problem = source_refusal(path, tmp_path)
    assert (problem.code, problem.value) == ("data-row-unreadable", f"{path}, row {row}")
    assert problem.message.startswith(f"column {column}: ")


@pytest.mark.parametrize(
    "content",
    [
        f'{GOOD}\n{GOOD[:-1]}, "output": "c"}}',
        f'[{GOOD[:-1]}, "output": "c"}}]',
        f'{{\n{GOOD[1:-1]}, "output": "c"}}',
        '{"messages": [{"role": "user", "output": "a", "output": "b"}]}',
    ],
)
def test_a_key_with_two_values_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    problem = source_refusal(path, tmp_path)
    assert (problem.code, "'output'" in problem.message) == ("data-key-twice", True)


def test_a_missing_path_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    problem = source_refusal(tmp_path / "absent.jsonl", tmp_path)
    assert problem.code == "data-source-missing"
    assert "Errno" not in problem.message
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        assert source_refusal(tmp_path / "empty", tmp_path).code == "data-source-unreadable"
        (tmp_path / "empty" / "dataset_info.json").write_text('{"description": "no rows"}')


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data" / "rows.zip"
    path.parent.mkdir()
    with ZipFile(path, "w") as archive:
        archive.writestr("rows.jsonl", GOOD)
    path.write_bytes(path.read_bytes()[:-9])
    assert source_refusal(path.parent, tmp_path).code == "data-source-unreadable"


def test_a_model_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(tiny().model.config))
    rows = lines(tmp_path, [ROWS["alpaca"]])
    for name, code in (("config", "files-missing"), ("absent", "folder-missing")):
        folder = str(tmp_path / name)
        problem = source_refusal(rows, tmp_path, model__tokenizer=folder)
        assert problem.code == f"tokenizer-{code}"
        assert (problem.field, problem.value) == ("model.tokenizer", folder)
