"""Data that cannot be used: the problem names the file, the row and what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import datasets
import pytest

from tests.support.launching import tiny
from tests.support.rows import ROWS, lines, source_refusal


def test_a_source_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    long_prompt = lines(tmp_path, [{"instruction": "1 2 3 4 5 6 7 8 9 " * 30, "output": "Yes."}])
    assert (
        source_refusal(long_prompt, tmp_path, data__sequence_length="64").code
        == "data-prompts-too-long"
    )
    assert (
        source_refusal(lines(tmp_path, [{"instruction": "a", "output": ""}]), tmp_path).code
        == "data-nothing-trained"
    )


GOOD = json.dumps(ROWS["alpaca"])
NARRATOR = (
    '{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"role": "narrator", '
    '"content": "b"}]}'
)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("rows.jsonl", '{"question": "a", "answer": "b"}', "data-columns-unknown"),
        ("rows.txt", "anything", "data-file-type-unknown"),
        ("rows.json", '[{"instruction": "a", "output": "b"},', "data-source-unreadable"),
        ("rows.jsonl", "[1, 2]\n3", "data-source-unreadable"),
        ("rows.jsonl", "", "data-source-empty"),
        ("rows.jsonl", "\n\n  \n", "data-source-empty"),
        ("rows.csv", "instruction,output\na,b\nc,d,e\n", "data-source-unreadable"),
        ("rows.parquet", "no parquet", "data-source-unreadable"),
        ("rows.json", "[]", "data-source-empty"),
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
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    problem = source_refusal(tmp_path / name, tmp_path)
    assert (problem.code, problem.field, problem.value) == (
        code,
        "data.source",
        str(tmp_path / name),
    )


DEEP = f'{{"messages": {"[" * 5_000}1{"]" * 5_000}}}'
NINES = "9" * 5000


def nested(opening: str, closing: str, levels: int) -> str:
    return f'{GOOD}\n{GOOD}\n{{"messages": {opening * levels}1{closing * levels}}}\n'


@pytest.mark.parametrize(
    ("name", "content", "code", "row"),
    [
        ("rows.json", "not json at all", "data-row-not-json", 1),
        ("rows.jsonl", f'{GOOD}\n{GOOD}\n{{"instruction": "a"', "data-row-not-json", 3),
        ("rows.jsonl", f'{GOOD}\n{{"instruction": "a",\n{GOOD}\n', "data-row-not-json", 2),
        ("rows.jsonl.gz", f'{GOOD}\n{{"instruction": "a"', "data-row-not-json", 2),
        ("rows.jsonl", nested("[", "]", 3_000), "data-row-too-deep", 3),
        ("rows.jsonl", nested('{"a":', "}", 50_000), "data-row-too-deep", 3),
        ("rows.json", f"[{GOOD},\n{GOOD},\n{DEEP}]", "data-row-too-deep", None),
        ("rows.json.gz", f"[\n{DEEP}]", "data-row-too-deep", None),
        ("rows.jsonl", f'{{"messages": {NINES}}}\n', "data-row-unreadable", 1),
        ("rows.jsonl", json.dumps({"messages": f"[{NINES}]"}), "data-row-unreadable", 1),
        (
            "rows.jsonl",
            '{"instruction": "a", "output": 1}\n{"instruction": "a", "output": "x"}\n{"instruct',
            "data-row-not-json",
            3,
        ),
        (
            "rows.jsonl",
            f'{{"instruction": "a", "output": {NINES}}}\n{{"instruction"\n',
            "data-number-too-long",
            1,
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_row_that_is_no_json_or_too_deep_or_long_is_named(
    name: str, content: str, code: str, row: int | None, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    problem = source_refusal(path, tmp_path)
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


def test_rows_of_a_compressed_file_in_a_folder_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(f"{GOOD}\n{DEEP}\n".encode()))
    problem = source_refusal(folder, tmp_path)
    assert (problem.code, problem.value) == ("data-row-too-deep", f"{folder / 'b.jsonl.gz'}, row 2")


def test_rows_of_a_linked_folder_are_named_as_it_was_given(tmp_path: Path) -> None:
    folder = tmp_path / "far" / "away" / "rows"
    folder.mkdir(parents=True)
    (folder / "b.jsonl").write_text(f"{GOOD}\n{{\n")
    (tmp_path / "link").symlink_to(folder)
    problem = source_refusal(tmp_path / "link", tmp_path)
    assert (problem.code, problem.value) == (
        "data-row-not-json",
        f"{tmp_path / 'link' / 'b.jsonl'}, row 2",
    )


def test_a_small_compressed_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(40):
            file.write(bytes(1 << 20))
    assert source_refusal(tmp_path / "rows.jsonl.gz", tmp_path).code == "data-row-too-long"


def test_pipes_and_devices_are_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    assert source_refusal(tmp_path / "rows.jsonl", tmp_path).code == "data-source-not-a-file"
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    assert source_refusal(tmp_path / "zero.jsonl", tmp_path).code == "data-source-not-a-file"


@pytest.mark.parametrize(
    ("content", "row", "column"),
    [
        (f'{GOOD}\n{{"instruction": "a", "output": ["b"]}}', 2, "output"),
        ('{"instruction": {"a": 1}, "output": "b"}', 1, "instruction"),
        (NARRATOR, 2, "messages[0].role"),
        ('{"messages": [{"speaker": "a", "words": "b"}]}', 1, "messages[0]"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            1,
            "messages[0].content",
        ),
        (json.dumps(ROWS["messages"] | {"tools": "a"}), 1, "tools"),
        (f'{GOOD[:-1]}, "history": [["a"]]}}', 1, "history[0]"),
        ('{"messages": "a"}', 1, "messages"),
    ],
)
def test_an_unreadable_column_is_named(tmp_path: Path, content: str, row: int, column: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    problem = source_refusal(tmp_path / "rows.jsonl", tmp_path)
    assert (problem.code, problem.value) == (
        "data-row-unreadable",
        f"{tmp_path / 'rows.jsonl'}, row {row}",
    )
    assert problem.message.startswith(f"column {column}: ")


def test_in_a_folder_the_file_and_the_row_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "dataset_info.json").write_text('{\n "description": "what is in it"\n}')
    (folder / "a.jsonl").write_text(GOOD)
    (folder / "b.jsonl").write_text(f'{GOOD}\n{{"instruction": "a"')
    problem = source_refusal(folder, tmp_path)
    assert (problem.code, problem.value) == ("data-row-not-json", f"{folder}/b.jsonl, row 2")
    (folder / "b.jsonl").unlink()
    (folder / "a.jsonl").unlink()
    assert source_refusal(folder, tmp_path).code == "data-source-unreadable"


def test_an_unwritable_hub_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/none/datasets")
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    for variable, named in (("HF_HOME", "HF_HOME"), ("HF_HUB_CACHE", "XDG_CACHE_HOME")):
        monkeypatch.delenv("HF_HOME", raising=False)
        monkeypatch.setenv(variable, "/proc/none")
        problem = source_refusal(lines(tmp_path, [ROWS["alpaca"]]), tmp_path)
        assert (problem.code, problem.field, problem.value) == (
            "cache-unwritable",
            named,
            "/proc/none/datasets",
        )


def test_a_missing_path_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    problem = source_refusal(tmp_path / "absent.jsonl", tmp_path)
    assert problem.code == "data-source-missing"
    assert "Errno" not in problem.message
    (tmp_path / "empty").mkdir()
    assert source_refusal(tmp_path / "empty", tmp_path).code == "data-source-unreadable"


def test_a_model_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny().model.config))
    rows = lines(tmp_path, [ROWS["alpaca"]])
    problem = source_refusal(rows, tmp_path, model__tokenizer=str(tmp_path / "model"))
    assert (problem.code, problem.field) == ("tokenizer-files-missing", "model.tokenizer")
    assert (
        source_refusal(rows, tmp_path, model__tokenizer=str(tmp_path / "absent")).code
        == "tokenizer-folder-missing"
    )
