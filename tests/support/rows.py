"""Rows of data sets in files, and the documents they become."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from so_tui.spec import Problem, RunSpec
from so_tui_trainer.data.documents import Documents, read
from so_tui_trainer.data.tokens import load_tokenizer, prepare
from tests.support.launching import tiny
from tests.support.problems import refusal


def turns(*contents: object, keys: str = "role content", roles: str = "user assistant") -> Any:
    """Return the turns of a conversation, by two roles in turn, with OpenAI's keys by default."""
    names = roles.split()
    return [
        dict(zip(keys.split(), (names[index % 2], content), strict=True))
        for index, content in enumerate(contents)
    ]


ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Add the numbers.", "input": "2 and 3", "output": "They make 5."},
    "prompt-completion": {"prompt": "Add 2 and 3.", "completion": "They make 5."},
    "messages": {"messages": turns("Add 2 and 3.", "They make 5.")},
    "sharegpt": {
        "conversations": turns("Add 2 and 3.", "They make 5.", keys="from value", roles="human gpt")
    },
}
"""A row of each layout, with the same meaning."""


def alpaca(*outputs: object, **columns: object) -> list[dict[str, Any]]:
    """Return an Alpaca row for each of these answers, with further columns."""
    return [ROWS["alpaca"] | columns | {"output": output} for output in outputs]


def lines(folder: Path, rows: Iterable[Mapping[str, Any]], name: str = "rows.jsonl") -> Path:
    """Write a JSONL file, in a folder that is made unless it exists."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
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
    tokenizer = load_tokenizer(tiny().model)
    part = slice(documents.offsets[index], documents.offsets[index + 1])
    ids, trained = documents.tokens[part], documents.trained[part]
    return str(tokenizer.decode(ids[~trained])), str(tokenizer.decode(ids[trained]))


def answers(folder: Path, source: object, **changes: str) -> list[str]:
    """Return the trained text of each document of a source, without the stop token."""
    found = documents_of(folder, source, **changes)
    said = [texts(found, index)[1] for index in range(len(found.lengths))]
    assert all(text.endswith("<|eos|>") for text in said)
    return [text.removesuffix("<|eos|>") for text in said]


def source_refusal(source: object, folder: Path, **changes: str) -> Problem:
    return refusal(lambda: documents_of(folder, source, **changes))
