"""Conversations -> documents: token ids, and for each token whether the loss counts it. Tokenised once, by one process and its helpers.

The first token of a document is never a target, and padding does not exist here. A row that is longer than a sequence loses its end; plain
text is cut into several documents instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from so_tui.plan import workload
from so_tui.plan.types import Workload
from so_tui.spec import InputError, Problem, RunSpec, first_line, resolve_source
from so_tui.spec.types import DataSpec, LossOn
from so_tui_trainer.binding import die_with_parent
from so_tui_trainer.data import cache
from so_tui_trainer.data.chat import Chat, Segment, TemplateError, chat_of, segments
from so_tui_trainer.data.documents import Counts, Documents
from so_tui_trainer.data.rows import TEXT, bad_row
from so_tui_trainer.data.sources import Opened, open_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_ROWS = 1000
_TASK_ROWS = 10_000
_ROWS_PER_PROCESS = 4_000
"""Fewer rows are tokenised before another process has imported what it needs."""
_MOST_PROCESSES = 32

Progress = tuple[int, int]
"""How many rows of how many are tokenised."""
Tokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Ids, and for each whether it is trained."""


_NO_FILES = "Name one in `model.tokenizer`, or put the model's tokenizer files into that folder."


def load_tokenizer(spec: RunSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of the spec. Raises InputError when it cannot be had."""
    from transformers import AutoTokenizer

    name = resolve_source(spec.model.tokenizer or spec.model.id)
    field, revision = ("model.tokenizer", "main") if spec.model.tokenizer else ("model.id", spec.model.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=spec.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        remedy = "Check the name and the network, log in with `hf auth login` if it is gated, or fetch it first with `so-tui fetch`."
        if Path(name).is_dir():
            reason, remedy = "transformers finds none in that folder", _NO_FILES
        elif name.startswith(("/", ".", "~")):
            reason, remedy = "there is no such folder", "Name a folder with a tokenizer, or a model on the hub (owner/name)."
        raise InputError([Problem(field=field, value=name, message=f"no tokenizer ({reason})", remedy=remedy)]) from error
    if not tokenizer("a text", add_special_tokens=False)["input_ids"]:
        # What transformers makes of a folder with weights and config.json only.
        raise InputError(
            [Problem(field=field, value=name, message="has no tokenizer files: its tokenizer knows no tokens", remedy=_NO_FILES)]
        )
    return tokenizer


def prepare(spec: RunSpec, cache_dir: Path | None = None, on_progress: Callable[[int, int], None] | None = None) -> Path:
    """``preparing`` to its end; ``tell`` is told its progress."""
    steps = preparing(spec, cache_dir)
    while True:
        try:
            rows = next(steps)
        except StopIteration as end:
            folder: Path = end.value
            return folder
        if on_progress is not None:
            on_progress(*rows)


def preparing(spec: RunSpec, cache_dir: Path | None = None) -> Generator[Progress, None, Path]:
    """Folder with the documents of the spec's data (``cache.read`` it), tokenised now unless that was done before.

    Raises InputError: data or tokenizer cannot be read, a row is malformed, or a source has no trained token.
    """
    tokenizer = load_tokenizer(spec)
    sources = open_sources(spec.data)
    folder = (cache_dir or cache.default_folder()) / cache.fingerprint(sources, tokenizer, spec)
    if not cache.intact(folder):
        yield from _tokenise(sources, Encoder(chat_of(tokenizer), spec.data.loss, spec.data.sequence_length), folder)
    _store_workload(spec, folder)
    return folder


def _store_workload(spec: RunSpec, folder: Path) -> None:
    """What these data are, for the plans of later runs. Looked at once: the flags of all tokens are read for it."""
    known = workload.seen(spec)
    if known is None or known.fingerprint != folder.name:
        found = workload.Seen(fingerprint=folder.name, workload=workload_of(cache.read(folder, spec.data), spec.data))
        with suppress(OSError):  # a folder that cannot be written only leaves plans as they were
            workload.remember(spec, found)


def workload_of(documents: Documents, data: DataSpec) -> Workload:
    """What of the documents decides how long a step takes. Packed sequences count as full, which they nearly are."""
    lengths = documents.lengths.astype(np.float64)
    tokens = float(lengths.sum())
    useful = 1.0 if data.packing else tokens / (len(lengths) * data.sequence_length)
    return Workload(
        attended_tokens=float(np.square(lengths).sum()) / tokens,
        trained_share=useful * float(np.count_nonzero(documents.trained)) / tokens,
        useful_share=useful,
    )


@dataclass(frozen=True)
class Encoder:
    """Turns conversations into documents; goes to other processes whole."""

    chat: Chat
    loss: LossOn
    sequence_length: int

    def encode(self, batch: Sequence[Sequence[Segment]]) -> list[Tokens]:
        """Ids and trained flags of each conversation.

        Segments are encoded apart, as the prompt is when the model is asked: no token spans the border of what is trained. Tokenizers
        that put a space before every text they are given get it whole instead, and the token at the border counts as what it ends in.
        """
        return self._encode_segments(batch) if encodes_segments_apart(self.chat.tokenizer) else self._encode_joined(batch)

    def _encode_segments(self, batch: Sequence[Sequence[Segment]]) -> list[Tokens]:
        texts = [segment.text for parts in batch for segment in parts]
        encoded = iter(self.chat.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
        found = []
        for parts in batch:
            pieces = list(islice(encoded, len(parts)))
            flags = np.repeat([part.trained for part in parts], [len(piece) for piece in pieces])
            found.append((np.array([token for piece in pieces for token in piece], dtype=np.int32), flags.astype(np.bool_)))
        return found

    def _encode_joined(self, batch: Sequence[Sequence[Segment]]) -> list[Tokens]:
        texts = ["".join(segment.text for segment in parts) for parts in batch]
        encoded = self.chat.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found = []
        for parts, ids, places in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            ends = np.cumsum([len(part.text) for part in parts])
            trained = np.array([part.trained for part in parts])
            last = np.array([end - 1 for _, end in places])
            segment = np.minimum(np.searchsorted(ends, last, side="right"), len(parts) - 1)
            empty = np.array([start == end for start, end in places], dtype=np.bool_)
            found.append((np.array(ids, dtype=np.int32), trained[segment] & ~empty))
        return found

    def documents(self, opened: Opened, first: int, last: int) -> Iterator[Encoded]:
        """Rows ``first`` to ``last`` of a source, each as the documents it became: none when it was dropped. Raises InputError."""
        rows = opened.conversations(first, last)
        leading = leading_ids(self.chat.tokenizer)
        number = first
        while batch := list(islice(rows, _BATCH_ROWS)):
            parts = []
            for conversation in batch:
                number += 1
                try:
                    parts.append(segments(self.chat, conversation, self.loss))
                except TemplateError as error:
                    raise bad_row(opened.source.source, number, f"the chat template refuses it: {error}") from error
            for index, (conversation, tokens) in enumerate(zip(batch, self.encode(parts), strict=True), number - len(batch) + 1):
                bare = bool(conversation) and conversation[0].role == TEXT
                yield self._fit(index, leading if bare or not self.chat.templated else [], tokens, bare=bare)

    def _fit(self, row: int, leading: Sequence[int], tokens: Tokens, *, bare: bool) -> Encoded:
        """What of a row lies within a sequence; nothing behind the last trained token, which no other token learns from."""
        limit = self.sequence_length
        ids = np.concatenate((np.array(leading, dtype=np.int32), tokens[0]))
        trained = np.concatenate((np.zeros(len(leading), dtype=np.bool_), tokens[1]))
        ids, trained = ids[: _end(trained)], trained[: _end(trained)]
        pieces = [(ids[at : at + limit], trained[at : at + limit].copy()) for at in range(0, len(ids), limit)]
        documents = []
        for piece, flags in pieces if bare else pieces[:1]:
            if len(flags):
                flags[0] = False
            if end := _end(flags):
                documents.append((piece[:end], flags[:end]))
        longer = len(ids) > limit
        return Encoded(
            row, documents, truncated=longer and not bare and bool(documents), too_long=longer and not documents, cut=len(documents) > 1
        )


class Encoded(NamedTuple):
    """The documents of one row."""

    row: int
    documents: list[Tokens]
    truncated: bool
    too_long: bool
    cut: bool

    @property
    def counts(self) -> Counts:
        return Counts(1, int(self.truncated), int(not self.documents), int(self.too_long), int(self.cut))


def _end(flags: npt.NDArray[np.bool_]) -> int:
    """One past the last true flag; 0 without one."""
    found = np.flatnonzero(flags)
    return int(found[-1]) + 1 if len(found) else 0


def encodes_segments_apart(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether texts that are encoded apart are, end to end, the text encoded whole, as far as words go."""
    one, other, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a\n", "b", "a\nb"))
    return bool([*one, *other] == both) or not tokenizer.is_fast


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text (a BOS token, or nothing)."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first and first[0] == tokenizer.bos_token_id else []


# The work, shared among processes.


class _Task(NamedTuple):
    source: int
    first: int
    last: int


class _Done(NamedTuple):
    task: _Task
    stem: Path
    """Of its files: ``.tokens`` and ``.trained``, raw."""
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    counts: Counts


def processes_for(rows: int) -> int:
    """How many processes share the work: of the cores this process may use, as many as pay for their start."""
    return max(1, min(len(os.sched_getaffinity(0)), rows // _ROWS_PER_PROCESS, _MOST_PROCESSES))


def _tokenise(sources: Sequence[Opened], encoder: Encoder, folder: Path) -> Iterator[Progress]:
    """Write the entry. Raises InputError."""
    total = sum(len(opened.rows) for opened in sources)
    tasks = [
        _Task(index, first, min(first + _TASK_ROWS, len(opened.rows)))
        for index, opened in enumerate(sources)
        for first in range(0, len(opened.rows), _TASK_ROWS)
    ]
    counts = [Counts(0, 0, 0)] * len(sources)
    documents = [0] * len(sources)
    with cache.Writer(folder) as writer, ExitStack() as stack:
        worker = _Worker(encoder, tuple(sources), writer.partial)
        position = rows = 0
        writer.append("offsets", np.zeros(1, dtype=np.int64))
        for done in _run_tasks(worker, tasks, processes_for(total), stack):
            ends = position + np.cumsum(done.lengths)
            position = int(ends[-1]) if len(ends) else position
            writer.take("tokens", done.stem.with_suffix(".tokens"))
            writer.take("trained", done.stem.with_suffix(".trained"))
            writer.append("offsets", ends)
            writer.append("rows", done.rows)
            counts[done.task.source] += done.counts
            documents[done.task.source] += len(done.lengths)
            rows += done.counts.rows
            yield rows, total
        for opened, count, found in zip(sources, counts, documents, strict=True):
            if not found:
                raise _no_trained_tokens(opened, count, encoder.sequence_length)
        tallies = tuple(cache.Tally(o.layout.name, n, c) for o, n, c in zip(sources, documents, counts, strict=True))
        writer.close(tallies, (*(warning for opened in sources for warning in opened.warnings), *encoder.chat.warnings))


class _Worker(NamedTuple):
    encoder: Encoder
    sources: tuple[Opened, ...]
    folder: Path

    def work(self, task: _Task) -> _Done:
        """Tokenise a task's rows into files of its own. Memory: a batch of rows."""
        stem = self.folder / f"{task.source}-{task.first}"
        lengths, rows, counts = [], [], Counts(0, 0, 0)
        with stem.with_suffix(".tokens").open("wb") as tokens, stem.with_suffix(".trained").open("wb") as trained:
            for encoded in self.encoder.documents(self.sources[task.source], task.first, task.last):
                counts += encoded.counts
                for ids, flags in encoded.documents:
                    tokens.write(ids.data)
                    trained.write(flags.data)
                    lengths.append(len(ids))
                    rows.append(encoded.row)
        return _Done(task, stem, np.array(lengths, dtype=np.int64), np.array(rows, dtype=np.int64), counts)


def _run_tasks(worker: _Worker, tasks: Sequence[_Task], processes: int, stack: ExitStack) -> Iterator[_Done]:
    """The tasks' results, in order; ``stack`` ends the processes. Raises InputError."""
    if processes == 1:
        yield from map(worker.work, tasks)
        return
    # Not by fork: this process may have threads, and a CUDA context.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start, initargs=(worker,))
    stack.callback(pool.shutdown, cancel_futures=True)
    yield from pool.map(_work, tasks)


_process_state: dict[str, Any] = {}
"""What this process was started for, where it is one of a pool."""


def _start(worker: _Worker) -> None:
    die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _process_state["worker"] = worker


def _work(task: _Task) -> _Done:
    done: _Done = _process_state["worker"].work(task)
    return done


def _no_trained_tokens(opened: Opened, counts: Counts, limit: int) -> InputError:
    message = f"none of its {counts.rows} rows has a trained token within {limit} tokens"
    if counts.dropped_too_long:
        remedy = f"The prompt alone of {counts.dropped_too_long} rows is longer: raise `data.sequence_length`."
    else:
        remedy = "Check the columns: the answers are empty."
    return InputError([Problem(field="data.source", value=opened.source.source, message=message, remedy=remedy)])
