"""Conversations -> documents: token ids, and for each token whether the loss counts it. Tokenised once, cached by content.

The loss is on the assistant's tokens and their stop token; the first token of a document is never a target, padding does not exist here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from so_tui.spec import InputError, Problem, RunSpec, resolve_source
from so_tui_trainer.rows import Message, conversations, open_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_CACHE_VERSION = 1


class Segment(NamedTuple):
    text: str
    trained: bool


class Counts(Struct, frozen=True):
    """What became of the rows; ``truncated`` ones lost their end, ``dropped`` ones had no trained token left."""

    rows: int
    truncated: int
    dropped: int


class Documents(NamedTuple):
    """Tokenised rows, end to end: document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``."""

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    """Per token: whether predicting it counts in the loss."""
    offsets: npt.NDArray[np.int64]
    counts: Counts
    fingerprint: str
    """Hash of the rows, the tokenizer and the options: equal data has an equal fingerprint."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def trained_lengths(self) -> npt.NDArray[np.int64]:
        """Trained tokens of each document."""
        totals = np.concatenate(([0], np.cumsum(self.trained, dtype=np.int64)))
        return np.diff(totals[self.offsets])


def load_tokenizer(spec: RunSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of the spec. Raises InputError when it cannot be had."""
    from transformers import AutoTokenizer

    name = resolve_source(spec.model.tokenizer or spec.model.id)
    try:
        return AutoTokenizer.from_pretrained(name, revision=spec.model.revision, trust_remote_code=spec.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        field = "model.tokenizer" if spec.model.tokenizer else "model.id"
        remedy = "Check the name and the network, log in with `hf auth login` if it is gated, or fetch it first with `so-tui fetch`."
        raise InputError([Problem(field=field, value=name, message=f"no tokenizer ({reason})", remedy=remedy)]) from error


def prepare(spec: RunSpec, cache_dir: Path | None = None) -> Path:
    """Folder with the documents of the spec's data (``read`` it); tokenised now unless the same rows were tokenised the same way before.

    Raises InputError: data or tokenizer cannot be read, or no row has a trained token.
    """
    tokenizer = load_tokenizer(spec)
    rows = open_rows(spec.data, spec.train.seed)
    fingerprint = _fingerprint(rows, tokenizer, spec)
    folder = (cache_dir or default_cache_dir()) / fingerprint
    if not folder.is_dir():
        _write(folder, _tokenise(rows, tokenizer, spec, fingerprint))
    return folder


def default_cache_dir() -> Path:
    """Folder of tokenised data, by the XDG rules."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "so-tui" / "data"


def read(folder: Path) -> Documents:
    """Documents that ``prepare`` cached, memory-mapped: ranks of one host share the pages."""
    info = json.loads((folder / "info.json").read_text())
    tokens, trained, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "trained", "offsets"))
    return Documents(tokens, trained, offsets, Counts(**info), folder.name)


def segments(tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message]) -> list[Segment]:
    """A conversation as text, cut where training starts and stops: by the chat template, or in the Alpaca layout without one."""
    if len(conversation) == 1 and conversation[0].role == "assistant":
        return [Segment(conversation[0].content, True)]
    if tokenizer.chat_template:
        return _templated(tokenizer, conversation)
    parts = []
    for message in conversation:
        if message.role == "assistant":
            parts += [Segment("### Response:\n", False), Segment(message.content, True)]
        elif message.role == "system":
            parts.append(Segment(f"{message.content}\n\n", False))
        else:
            parts.append(Segment(f"### Instruction:\n{message.content}\n\n", False))
    return parts


def _templated(tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message]) -> list[Segment]:
    """Each assistant turn is what the template adds to the prompt that asks for it.

    Templates may render an earlier turn differently once later ones follow (they drop its reasoning, say); where the prompt of a turn is
    not a prefix of the whole text, that turn is context only.
    """
    messages = [message._asdict() for message in conversation]

    def render(count: int, *, ask: bool) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=ask))

    whole = render(len(messages), ask=False)
    parts, position = [], 0
    for index, message in enumerate(conversation):
        if message.role != "assistant":
            continue
        last = index == len(conversation) - 1
        until = render(index + 1, ask=False) if not last else whole
        prompt = render(index, ask=True)
        start, end = _common_prefix(prompt, whole), len(until)
        if not whole.startswith(until) or start < position or (start < len(prompt) and not last):
            continue
        parts += [Segment(whole[position:start], False), Segment(whole[start:end], True)]
        position = end
    return [*parts, Segment(whole[position:], False)] if position < len(whole) else parts


def _common_prefix(first: str, second: str) -> int:
    """Characters that two texts have in common at their start."""
    return next(
        (index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second))
    )


def _tokenise(rows: Dataset, tokenizer: PreTrainedTokenizerBase, spec: RunSpec, fingerprint: str) -> Documents:
    limit, total, truncated, dropped = spec.data.sequence_length, 0, 0, 0
    ids: list[npt.NDArray[np.int32]] = []
    flags: list[npt.NDArray[np.bool_]] = []
    for batch in conversations(rows, spec.data):
        total += len(batch)
        for document, trained in _encode(tokenizer, [segments(tokenizer, conversation) for conversation in batch]):
            truncated += len(document) > limit
            if not trained[1:limit].any():
                dropped += 1
                continue
            ids.append(document[:limit])
            flags.append(trained[:limit])
            flags[-1][0] = False
    if not ids:
        message = f"none of its {total} rows has a trained token within {limit} tokens"
        remedy = "Check the columns, or raise `data.sequence_length`."
        raise InputError([Problem(field="data.source", value=str(spec.data.source), message=message, remedy=remedy)])
    offsets = np.concatenate(([0], np.cumsum([len(document) for document in ids], dtype=np.int64)))
    return Documents(np.concatenate(ids), np.concatenate(flags), offsets, Counts(total, truncated, dropped), fingerprint)


def _encode(
    tokenizer: PreTrainedTokenizerBase, batch: Sequence[Sequence[Segment]]
) -> Iterable[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
    """Token ids and trained flags of each conversation.

    Segments are encoded apart, as the prompt is when the model is asked: no token spans the border of what is trained.
    """
    texts = [segment.text for parts in batch for segment in parts]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    bos = _leading_ids(tokenizer)
    stop = tokenizer.eos_token_id
    for parts in batch:
        ids, flags = ([], []) if tokenizer.chat_template and len(parts) > 1 else (list(bos), [False] * len(bos))
        for segment in parts:
            piece = next(encoded)
            if segment.trained and stop is not None and stop not in piece[-3:]:
                piece = [*piece, stop]
            ids += piece
            flags += [segment.trained] * len(piece)
        yield np.array(ids, dtype=np.int32), np.array(flags, dtype=np.bool_)


def _leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text (a BOS token, or nothing)."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first and first[0] == tokenizer.bos_token_id else []


def _fingerprint(rows: Dataset, tokenizer: PreTrainedTokenizerBase, spec: RunSpec) -> str:
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
        for part in batch.to_batches():
            digest.update(part.serialize())
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    digest.update(rules.encode())
    options: list[Any] = [_CACHE_VERSION, tokenizer.chat_template, tokenizer.eos_token_id, spec.data.format, spec.data.sequence_length]
    digest.update(json.dumps(options, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _write(folder: Path, documents: Documents) -> None:
    """Write to a neighbour, then rename: a cache entry is whole or absent, whoever else writes the same one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for name in ("tokens", "trained", "offsets"):
            np.save(partial / f"{name}.npy", getattr(documents, name))
        counts = {name: int(getattr(documents.counts, name)) for name in Counts.__struct_fields__}
        (partial / "info.json").write_text(json.dumps(counts))
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # not just another run that was quicker
            raise
