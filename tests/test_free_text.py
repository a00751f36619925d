"""Free text to pretrain on, collected from documentation."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.free_text import write_text

TEXT = (
    "The reader of this page is told in plain words of the animals that live in the garden, and of "
    "the way in which a friend of the house cares for them in the evening, when the light of the "
    "day is gone and the rain of the night has not begun.\n\n"
)


def test_a_damaged_file_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, rows = gzip.compress(TEXT.encode()), tmp_path / "rows.jsonl"
    damaged = {
        "NEWS.gz": packed[:-20],
        "TODO.gz": b"no archive",
        "FAQ.gz": packed[:12] + b"\xff\xff\xff" + packed[15:],
    }
    for name, content in ({"README.gz": packed} | damaged).items():
        (tmp_path / name).write_bytes(content)
    assert write_text(rows, tmp_path, 1e6) == len(TEXT.strip())
    assert [json.loads(line)["text"] for line in rows.read_text().splitlines()] == [TEXT.strip()]
    *each, count = capsys.readouterr().err.splitlines()
    assert {Path(line.partition(" ")[0]).name for line in each} == damaged.keys()
    assert count.startswith("3 ")
