"""Rows of data sets in files, and the documents they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from so_tui.spec import Problem, RunSpec
from so_tui_trainer.data.documents import Documents, read
from so_tui_trainer.data.tokens import load_tokenizer, prepare
from tests.support.launching import tiny
from tests.support.problems import refusal

ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Add the numbers.", "input": "2 and 3", "output": "They make 5."},
    "prompt-completion": {"prompt": "Add 2 and 3.", "completion": "They make 5."},
    "messages": {
        "messages": [
            {"role": "user", "content": "Add 2 and 3."},
            {"role": "assistant", "content": "They make 5."},
        ]
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "Add 2 and 3."},
            {"from": "gpt", "value": "They make 5."},
        ]
    },
}
"""A row of each layout, with the same meaning."""


def lines(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    """Write a JSONL file."""
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def spec_of(source: object, **changes: str) -> RunSpec:
    """Return the tiny preset with another data source."""
    return tiny(**({"data__source": str(source), "data__format": "auto"} | changes))


def documents_of(folder: Path, source: object, **changes: str) -> Documents:
    """Tokenise a source, with a cache in ``folder``."""
    spec = spec_of(source, **changes)
    return read(prepare(spec, folder / "cache"), spec.data)


def texts(documents: Documents, index: int = 0) -> tuple[str, str]:
    """Return a document's context and its trained text."""
    tokenizer = load_tokenizer(tiny().model)
    part = slice(documents.offsets[index], documents.offsets[index + 1])
    ids, trained = documents.tokens[part], documents.trained[part]
    return str(tokenizer.decode(ids[~trained])), str(tokenizer.decode(ids[trained]))


def source_refusal(source: object, folder: Path, **changes: str) -> Problem:
    """Return the problem that tokenising a source raises."""
    return refusal(lambda: documents_of(folder, source, **changes))
