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
from tests.support.rows import ROWS, alpaca, lines, source_refusal

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
        ("rows.jsonl", "", "data-source-empty"),
        ("rows.jsonl", "\n\n  \n", "data-source-empty"),
        ("rows.csv", "instruction,output\na,b\nc,d,e\n", "data-source-unreadable"),
        ("rows.parquet", "no parquet", "data-source-unreadable"),
        ("rows.json", "[]", "data-source-empty"),
        ("rows.csv", "instruction,output\n", "data-source-empty"),
        ("rows.jsonl", f"{GOOD}\n{GOOD.replace('5', 'ü')}".encode("latin-1"), "data-not-utf8"),
        ("rows.jsonl.gz", gzip.compress(GOOD.encode() * 100)[:60], "data-source-unreadable"),
    ],
)
def test_an_unusable_file_is_named(
    tmp_path: Path, name: str, content: str | bytes, code: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    problem = source_refusal(path, tmp_path)
    assert (problem.code, problem.field, problem.value) == (code, "data.source", str(path))


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


def test_an_unwritable_hub_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/proc/none/datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    for variable, named in (("HF_HOME", "HF_HOME"), ("HF_HUB_CACHE", "XDG_CACHE_HOME")):
        monkeypatch.delenv("HF_HOME", raising=False)
        monkeypatch.setenv(variable, "/proc/none")
        problem = source_refusal(lines(tmp_path, [ROWS["alpaca"]]), tmp_path)
        assert (problem.code, problem.field, problem.value) == ("cache-unwritable", named, folder)


def test_a_missing_path_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    problem = source_refusal(tmp_path / "absent.jsonl", tmp_path)
    assert problem.code == "data-source-missing"
    assert "Errno" not in problem.message
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        assert source_refusal(tmp_path / "empty", tmp_path).code == "data-source-unreadable"
        (tmp_path / "empty" / "dataset_info.json").write_text('{"description": "no rows"}')


def test_a_model_folder_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(tiny().model.config))
    rows = lines(tmp_path, [ROWS["alpaca"]])
    for name, code in (("config", "files-missing"), ("absent", "folder-missing")):
        folder = str(tmp_path / name)
        problem = source_refusal(rows, tmp_path, model__tokenizer=folder)
        assert (problem.code, problem.field, problem.value) == (
            f"tokenizer-{code}",
            "model.tokenizer",
            folder,
        )
