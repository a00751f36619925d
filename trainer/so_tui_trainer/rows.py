"""Rows of a data set as conversations: where they come from, which layout they have, what is wrong with them.

A conversation is a tuple of messages; plain text is one assistant message without a prompt, trained from its first token on.
Imports ``datasets`` only when rows are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from so_tui.spec import DataSource, DataSpec, InputError, Problem, resolve_source

if TYPE_CHECKING:
    from datasets import Dataset

Row = Mapping[str, Any]


class Message(NamedTuple):
    role: str
    content: str


class Layout(NamedTuple):
    """One layout of a row: its name in the spec, the columns it must have, and how a row becomes a conversation."""

    name: str
    columns: frozenset[str]
    read: Callable[[Row], tuple[Message, ...]]


def _alpaca(row: Row) -> tuple[Message, ...]:
    instruction, context = _text(row["instruction"]), _text(row.get("input"))
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    return Message("user", prompt), Message("assistant", _text(row["output"]))


def _prompt_completion(row: Row) -> tuple[Message, ...]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return Message("user", prompt), Message("assistant", _text(completion))
    return (*_messages_of(prompt), *_messages_of(completion))


def _sharegpt(row: Row) -> tuple[Message, ...]:
    roles = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
    return tuple(Message(roles.get(turn["from"], turn["from"]), _text(turn["value"])) for turn in row["conversations"])


def _messages_of(turns: Sequence[Row]) -> tuple[Message, ...]:
    return tuple(Message(turn["role"], _text(turn["content"])) for turn in turns)


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


LAYOUTS = (
    Layout("messages", frozenset({"messages"}), lambda row: _messages_of(row["messages"])),
    Layout("sharegpt", frozenset({"conversations"}), _sharegpt),
    Layout("alpaca", frozenset({"instruction", "output"}), _alpaca),
    Layout("prompt-completion", frozenset({"prompt", "completion"}), _prompt_completion),
    Layout("text", frozenset({"text"}), lambda row: (Message("assistant", _text(row["text"])),)),
)
_READERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}


def sources(spec: DataSpec) -> tuple[DataSource, ...]:
    """The sources of a data section, a single one with weight 1."""
    return (DataSource(source=spec.source),) if isinstance(spec.source, str) else spec.source


def open_rows(spec: DataSpec, seed: int) -> Dataset:
    """All rows of the mixture, every source in one column ``conversation``-ready layout (see ``conversations``).

    Raises InputError: a source that cannot be read, or columns that fit no layout.
    """
    import datasets

    parts = [(source, _open(source.source, spec)) for source in sources(spec)]
    if len(parts) == 1:
        return parts[0][1]
    weights = [source.weight for source, _ in parts]
    # Until every row of every source was met: the weights say how often, nothing is lost.
    return datasets.interleave_datasets(
        [_uniform(part, spec) for _, part in parts],
        probabilities=[weight / sum(weights) for weight in weights],
        seed=seed,
        stopping_strategy="all_exhausted",
    )


def layout_of(columns: Sequence[str], spec: DataSpec) -> Layout:
    """The layout that the columns have, or the one the spec demands. Raises InputError when they do not fit."""
    candidates = [layout for layout in LAYOUTS if spec.format in ("auto", layout.name)]
    for layout in candidates:
        if layout.columns <= set(columns):
            return layout
    known = "; ".join(f"{layout.name}: {', '.join(sorted(layout.columns))}" for layout in candidates)
    raise InputError(
        [
            Problem(
                field="data.format" if spec.format != "auto" else "data.source",
                value=spec.format if spec.format != "auto" else ", ".join(source.source for source in sources(spec)),
                message=f"the rows have the columns {', '.join(columns) or '(none)'}, which fit no known layout",
                remedy=f"Rename the columns to those of a layout ({known}).",
            )
        ]
    )


def conversations(rows: Dataset, spec: DataSpec, batch: int = 1000) -> Iterator[list[tuple[Message, ...]]]:
    """The rows in order, ``batch`` at a time. Raises InputError naming the first row that cannot be read."""
    layout = layout_of(rows.column_names, spec)
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        found = []
        for index in range(len(next(iter(part.values())))):
            row = {name: values[index] for name, values in part.items()}
            try:
                found.append(layout.read(row))
            except (KeyError, TypeError, AttributeError) as error:
                raise InputError([_bad_row(first + index, layout, error)]) from error
        yield found


def _bad_row(number: int, layout: Layout, error: Exception) -> Problem:
    return Problem(
        field="data.source",
        value=f"row {number}",
        message=f"cannot be read as {layout.name} ({type(error).__name__}: {error})",
        remedy="Mend or remove the row, or name another `data.format`.",
    )


def _uniform(part: Dataset, spec: DataSpec) -> Dataset:
    """A source in the ``messages`` layout, so that sources of different layouts mix."""
    layout = layout_of(part.column_names, spec)
    return part.map(
        lambda row: {"messages": [message._asdict() for message in layout.read(row)]}, remove_columns=part.column_names, desc="reading rows"
    )


def _open(source: str, spec: DataSpec) -> Dataset:
    import datasets
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # httpx's own, whichever httpx it is

    name = resolve_source(source)
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return datasets.load_dataset(_reader(path, source), data_files=str(path), split=spec.split)
        if not path.is_dir() and _looks_like_path(name):
            raise FileNotFoundError(2, "no such file or folder")
        return datasets.load_dataset(str(path) if path.is_dir() else name, split=spec.split)
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise InputError([_unreadable(source, spec, error)]) from error


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or Path(name).suffix in _READERS or name.count("/") > 1


def _reader(path: Path, source: str) -> str:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        message, remedy = f"files ending in {path.suffix or 'nothing'} are not known", f"Use one of {', '.join(_READERS)}."
        raise InputError([Problem(field="data.source", value=source, message=message, remedy=remedy)])
    return reader


def _unreadable(source: str, spec: DataSpec, error: Exception) -> Problem:
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    if "split" in reason.lower():
        return Problem(field="data.split", value=spec.split, message=reason, remedy=f"Name a split that {source} has.")
    if "gated" in reason.lower() or "401" in reason or "403" in reason:
        remedy = "Accept its terms on the hub, then log in with `hf auth login` (or set HF_TOKEN)."
    elif _looks_like_path(source):
        remedy = "Give the path of a JSON, JSONL, Parquet or CSV file, or of a folder of them."
    else:
        remedy = "Check the name on the hub and the network, or fetch it first with `so-tui fetch`."
    return Problem(field="data.source", value=source, message=f"cannot be read ({reason})", remedy=remedy)
