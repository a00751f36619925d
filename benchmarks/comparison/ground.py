"""Common inputs of all trainers: the same rows, one tokenizer, and a folder with the model for
trainers that load one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.comparison.parts import Shape

_COLUMNS = ("instruction", "input", "output")


@dataclass(frozen=True)
class Ground:
    """Paths, and facts about the data."""

    rows: str
    """A JSONL file, by itself in its folder: ``datasets.load_dataset`` takes the folder like a hub
    id.
    """
    tokenizer: str
    model: str
    """A folder for the model, written by the first trainer that needs it."""
    stubs: str
    """Folder of modules that replace missing packages."""
    facts: dict[str, Any]

    @property
    def rows_folder(self) -> str:
        """Folder of the rows."""
        return str(Path(self.rows).parent)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def lay(folder: Path, rows_file: Path, shape: Shape) -> Ground:
    """Write rows, tokenizer and stubs into ``folder``, unless the same ones are there.

    Raises:
        ValueError: The file has no rows of instructions.
    """
    content = rows_file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    ground = Ground(
        rows=str(folder / "rows" / "train.jsonl"),
        tokenizer=str(folder / f"tokenizer-{shape.vocabulary}"),
        model=str(folder / f"model-{shape.preset}"),
        stubs=str(folder / "stubs"),
        facts={},
    )
    known = folder / f"facts-{shape.preset}.json"
    if known.exists() and (facts := json.loads(known.read_text()))["sha256"] == digest:
        return Ground(**asdict(ground) | {"facts": facts})
    rows = read_rows(content.decode("utf-8"))
    Path(ground.rows).parent.mkdir(parents=True, exist_ok=True)
    Path(ground.rows).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    facts = {
        "file": rows_file.name,
        "sha256": digest,
        "rows": len(rows),
        **_train_tokenizer(ground, shape),
    }
    _stub_wandb(Path(ground.stubs))
    known.write_text(json.dumps(facts))
    return Ground(**asdict(ground) | {"facts": facts})


def read_rows(text: str) -> list[dict[str, str]]:
    """Read rows in the Alpaca layout from JSON or JSONL.

    Raises:
        ValueError: Rows lack a column.
    """
    found: Sequence[Mapping[str, Any]]
    found = (
        json.loads(text)
        if text.lstrip().startswith("[")
        else [json.loads(line) for line in text.splitlines() if line.strip()]
    )
    if not found or any("instruction" not in row or "output" not in row for row in found):
        raise ValueError("the rows need `instruction` and `output`, as in Alpaca")
    return [{column: str(row.get(column) or "") for column in _COLUMNS} for row in found]


def _train_tokenizer(ground: Ground, shape: Shape) -> dict[str, Any]:
    """Train a tokenizer on the rows: nothing is downloaded, and its vocabulary size gives pieces of
    realistic length.
    """
    from tools.tiny_tokenizer import row_texts, trained, write

    texts = list(row_texts(Path(ground.rows)))
    tokenizer = trained(iter(texts), shape.vocabulary)
    write(tokenizer, Path(ground.tokenizer), longest=shape.sequence_length)
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    return {
        "vocabulary": tokenizer.get_vocab_size(),
        "tokens_per_row": tokens / len(texts),
        "tokens_per_word": tokens / sum(len(text.split()) for text in texts),
    }


def _stub_wandb(folder: Path) -> None:
    """Write an empty module for wandb if it is missing: the original imports it, but uses it only
    on request.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if find_spec("wandb") is None:
        (folder / "wandb.py").write_text(
            '"""Stands in for a package that is imported and not used."""\n'
        )
