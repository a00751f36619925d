"""Load tokenizers, and tokenise the sources of a spec once, in one process and its helpers. The
result is cached.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from so_tui.folders import cache_home
from so_tui.plan import workload
from so_tui.plan.workload import Workload
from so_tui.spec import InputError, ModelSpec, RunSpec, first_line, resolve_source
from so_tui.spec.data_notes import UNPROVEN
from so_tui.spec.errors import reject
from so_tui.spec.run_spec import DataSpec
from so_tui.units import plural, thousands
from so_tui_trainer import step_limits
from so_tui_trainer.binding import die_with_parent
from so_tui_trainer.data import documents as cache
from so_tui_trainer.data.chat import chat_of
from so_tui_trainer.data.documents import Counts, Documents, Int64s, row_widths
from so_tui_trainer.data.encoder import Encoder, encoder_for
from so_tui_trainer.data.rows import unused_columns
from so_tui_trainer.data.sources import Opened, open_sources
from so_tui_trainer.foreign import own_entry, unwritable
from so_tui_trainer.pointers import refuse_pointers
from so_tui_trainer.remote_code import explained, load_arguments
from so_tui_trainer.step_limits import limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TASK_ROWS = 10_000
_ROWS_PER_PROCESS = 4_000
"""Another process pays off only beyond this many rows: importing its packages takes as long as
tokenising them.
"""
_MOST_PROCESSES = 32

Progress = tuple[int, int]
"""Rows tokenised so far, and all rows."""


_NO_FILES = "Name one in `model.tokenizer`, or put the model's tokenizer files into that folder."


def load_tokenizer(model: ModelSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        InputError: It cannot be loaded, or its folder has no tokenizer files.
    """
    from transformers import AutoTokenizer

    name = resolve_source(model.tokenizer or model.id)
    field: Literal["model.id", "model.tokenizer"] = (
        "model.tokenizer" if model.tokenizer else "model.id"
    )
    with (
        explained(model, partial(_no_tokenizer, name, field)),
        limited(f"the tokenizer of {name}", _files_bytes(name)),
    ):
        refuse_pointers(_files(Path(name)), field, name)
        tokenizer = AutoTokenizer.from_pretrained(**load_arguments(model, field))
    with limited(f"the tokenizer of {name}"):
        ids = tokenizer("a text", add_special_tokens=False)["input_ids"]
    if not ids:
        # transformers makes an empty tokenizer for a folder with only weights and config.json.
        raise reject(
            "tokenizer-files-missing",
            field,
            name,
            "has no tokenizer files: its tokenizer has no tokens",
            _NO_FILES,
        )
    return tokenizer


def _no_tokenizer(name: str, field: str, error: Exception) -> InputError:
    if not isinstance(error, OSError | ValueError):  # a damaged file raises whatever it leads to
        return reject(
            "tokenizer-unreadable",
            field,
            name,
            f"a damaged tokenizer ({first_line(error)})",
            "Copy or download its files again.",
        )
    if Path(name).is_dir():
        return reject(
            "tokenizer-files-missing",
            field,
            name,
            "no tokenizer (transformers finds none in that folder)",
            _NO_FILES,
        )
    if name.startswith(("/", ".", "~")):
        return reject(
            "tokenizer-folder-missing",
            field,
            name,
            "no tokenizer (there is no such folder)",
            "Name a folder with a tokenizer, or a model on the hub (owner/name).",
        )
    return reject(
        "tokenizer-unreadable",
        field,
        name,
        f"no tokenizer ({first_line(error)})",
        "Check the name and the network, log in with `hf auth login` if it is gated, or download "
        "it first with `so-tui fetch`.",
    )


def _files_bytes(name: str) -> int:
    """Return the size of a folder's files apart from weights; that of a large tokenizer for others,
    which may have to be downloaded.
    """
    if not (folder := Path(name)).is_dir():
        return 64 << 20
    return sum(file.stat().st_size for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    """Return a folder's files that a tokenizer may be read from, with its chat templates."""
    names = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*_templates/*.jinja")
    return [file for name in names for file in folder.glob(name)]


def prepare(
    spec: RunSpec,
    cache_dir: Path | None = None,
    on_progress: Callable[[int, int], object] = lambda *_: None,
) -> Path:
    """Run ``preparing`` to its end.

    Args:
        spec: The run's spec.
        cache_dir: Where entries are stored; the user's cache folder by default.
        on_progress: Called with the rows tokenised so far and all rows.

    Returns:
        The folder of the cache entry.
    """
    steps = preparing(spec, cache_dir)
    while True:
        try:
            rows = next(steps)
        except StopIteration as end:
            result: Path = end.value
            return result
        on_progress(*rows)


def preparing(
    spec: RunSpec, cache_dir: Path | None = None, *, refusing: bool = True
) -> Generator[Progress, None, Path]:
    """Tokenise the spec's data unless the cache has them already.

    Args:
        spec: The run's spec.
        cache_dir: Where entries are stored; the user's cache folder by default.
        refusing: Whether data that cannot be trained on are refused once they are tokenised.

    Yields:
        The progress.

    Returns:
        The folder of the cache entry, for ``cache.read``.

    Raises:
        InputError: Data or tokenizer cannot be read, a row is malformed, a source has no trained
            token, or answers that are not proven.
    """
    tokenizer = load_tokenizer(spec.model)
    sources = open_sources(spec.data)
    folder = own_entry(
        cache_dir or cache_home() / "data", cache.fingerprint(sources, tokenizer, spec)
    )
    if not cache.intact(folder):
        encoder = encoder_for(chat_of(tokenizer), spec.data)
        try:
            yield from _tokenise(sources, encoder, folder, cache.padding_of(tokenizer, spec.data))
        except OSError as error:  # nothing else is written or opened meanwhile
            raise unwritable(folder.parent, error) from error
    documents = cache.read(folder, spec.data)
    # What the data do to a step, for the plans of later runs. Done once for each data set, as it
    # reads the flags of all tokens.
    known = workload.seen(spec)
    if len(documents.tokens) and (known is None or known.fingerprint != folder.name):
        found = workload.Seen(
            fingerprint=folder.name,
            workload=_workload_of(documents, spec.data),
            kinds=documents.counts.kinds,
        )
        with suppress(
            OSError
        ):  # If the folder cannot be written, plans keep their default workload.
            workload.remember(spec, found)
    for part in documents.parts if refusing else ():
        if spec.data.unproven == "refuse":
            refuse_unproven(part.source, part.counts)
        if not part.documents:
            raise _no_trained_tokens(part, spec.data.sequence_length)
    return folder


def _workload_of(documents: Documents, data: DataSpec) -> Workload:
    """Return what of the documents decides the time of a step. Packed sequences count as full,
    which they nearly are; padded rows are, and all of that is trained.
    """
    lengths = documents.lengths.astype(np.float64)
    tokens = float(lengths.sum())
    useful = 1.0 if data.packing else tokens / (len(lengths) * data.sequence_length)
    full = data.packing or documents.padding is not None
    return Workload(
        attended_tokens=float(np.square(lengths).sum()) / tokens,
        trained_share=useful * float(documents.trained_lengths.sum()) / tokens,
        useful_share=useful,
        row_shares=() if full else _row_shares(documents.lengths, data.sequence_length),
    )


def _row_shares(lengths: Int64s, sequence_length: int) -> tuple[tuple[int, float], ...]:
    """Return (micro-batch, its expected width as a share of the sequence length) of documents that
    are a row each.

    Of n documents, the i-th shortest is the longest of m drawn ones with a probability of (i /
    n)^m - ((i - 1) / n)^m.
    """
    widths = row_widths(np.sort(lengths), sequence_length) / sequence_length
    below = np.arange(len(widths) + 1) / len(widths)
    return tuple((size, float(np.diff(below**size) @ widths)) for size in workload.MICRO_BATCHES)


# Tokenising in several processes.


class _Task(NamedTuple):
    """Rows ``first`` to ``last`` (exclusive) of a source."""

    source: int
    first: int
    last: int


class _Done(NamedTuple):
    """The result of a task."""

    task: _Task
    stem: Path
    """Path of the task's files without their endings ``.tokens`` and ``.trained`` (raw arrays)."""
    lengths: Int64s
    """Tokens of each document, [documents]."""
    rows: Int64s
    """Row of each document, from 1, [documents]."""
    counts: Counts


def _processes_for(rows: int) -> int:
    """Return how many processes share the work: at most the usable cores, and only as many as pay
    for their start.
    """
    return max(1, min(len(os.sched_getaffinity(0)), rows // _ROWS_PER_PROCESS, _MOST_PROCESSES))


def _tokenise(
    sources: Sequence[Opened],
    encoder: Encoder,
    folder: Path,
    padding: cache.Padding | None,
) -> Iterator[Progress]:
    """Write a cache entry.

    Raises:
        InputError: A row cannot be read.
    """
    total = sum(len(opened.rows) for opened in sources)
    tasks = [
        _Task(index, first, min(first + _TASK_ROWS, len(opened.rows)))
        for index, opened in enumerate(sources)
        for first in range(0, len(opened.rows), _TASK_ROWS)
    ]
    parts = [
        cache.SourcePart(
            opened.layout.name,
            0,
            Counts(0, 0, 0),
            unused=unused_columns(opened.columns, opened.layout),
        )
        for opened in sources
    ]
    with ExitStack() as stack:
        writer = cache.Writer(folder)
        stack.callback(shutil.rmtree, writer.partial, ignore_errors=True)
        work = partial(_tokenised, encoder, tuple(sources), writer.partial)
        position = rows = 0
        writer.append("offsets", np.zeros(1, dtype=np.int64))
        for done in _run_tasks(work, tasks, _processes_for(total), stack):
            ends = position + np.cumsum(done.lengths)
            position = int(ends[-1]) if len(ends) else position
            writer.take("tokens", done.stem.with_suffix(".tokens"))
            writer.take("trained", done.stem.with_suffix(".trained"))
            writer.append("offsets", ends)
            writer.append("rows", done.rows)
            part = parts[done.task.source]
            parts[done.task.source] = replace(
                part,
                documents=part.documents + len(done.lengths),
                counts=part.counts + done.counts,
            )
            rows += done.counts.rows
            yield rows, total
        warnings = [warning for opened in sources for warning in opened.warnings]
        writer.publish(tuple(parts), (*warnings, *encoder.chat.warnings), padding)


def _tokenised(encoder: Encoder, sources: tuple[Opened, ...], folder: Path, task: _Task) -> _Done:
    """Tokenise a task's rows into files of its own, holding one batch of rows in memory.

    Raises:
        InputError: A row cannot be read.
        OSError: The files cannot be written.
    """
    stem = folder / f"{task.source}-{task.first}"
    lengths, rows, counts = [], [], Counts(0, 0, 0)
    with (
        stem.with_suffix(".tokens").open("wb") as tokens,
        stem.with_suffix(".trained").open("wb") as trained,
    ):
        for encoded in encoder.documents(sources[task.source], task.first, task.last):
            counts += encoded.counts
            for ids, flags in encoded.documents:
                tokens.write(ids.data)
                trained.write(flags.data)
                lengths.append(len(ids))
                rows.append(encoded.row)
    return _Done(
        task, stem, np.array(lengths, dtype=np.int64), np.array(rows, dtype=np.int64), counts
    )


def _run_tasks(
    work: Callable[[_Task], _Done], tasks: Sequence[_Task], processes: int, stack: ExitStack
) -> Iterator[_Done]:
    """Yield the tasks' results in order; ``stack`` ends the processes.

    Raises:
        InputError: A row cannot be read.
    """
    if processes == 1:
        yield from map(work, tasks)
        return
    # Spawned, not forked: this process may have threads and a CUDA context.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(work, step_limits.row_seconds()),
    )
    stack.callback(pool.shutdown, cancel_futures=True)
    done = 0
    try:
        for result in pool.map(_work, tasks):
            done += 1
            yield result
    except BrokenProcessPool:
        if not step_limits.row_seconds():
            raise
        # The row that takes too long ends this process, too, which can name it.
        yield from map(work, tasks[done:])


_process_state: dict[str, Callable[[_Task], _Done]] = {}
"""What tokenises a task in this process, if it belongs to a pool."""


def _start(work: Callable[[_Task], _Done], row_s: float) -> None:
    """Initialise a process of the pool."""
    die_with_parent()
    step_limits.begin_further(row_s)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _process_state["work"] = work


def _work(task: _Task) -> _Done:
    return _process_state["work"](task)


def refuse_unproven(source: str, counts: Counts) -> None:
    """Refuse a source with answers that are not proven (``data.unproven``).

    Raises:
        InputError: It has some.
    """
    if (found := counts.kinds.get(UNPROVEN)) is not None:
        raise reject(
            "data-unproven",
            "data.source",
            f"{source}, row {thousands(found.first)}",
            f"{found.detail}; what the model would write cannot be proven in "
            f"{thousands(found.rows)} of the {plural(counts.rows, 'row')} read",
            "Use a tokenizer whose chat template writes these turns, or set "
            "`data.unproven=context` to train only the other answers.",
        )


def _no_trained_tokens(part: cache.SourcePart, limit: int) -> InputError:
    counts = part.counts
    code, remedy = "data-nothing-trained", "Check the columns: the answers are empty."
    if (unproven := counts.kinds.get(UNPROVEN)) is not None:
        remedy = (
            "Use a tokenizer whose chat template writes these turns: no answer is proven (row "
            f"{thousands(unproven.first)}: {unproven.detail})."
        )
    if counts.dropped_too_long:
        code, remedy = (
            "data-prompts-too-long",
            f"The prompts of {thousands(counts.dropped_too_long)} rows are longer than a sequence: "
            "raise `data.sequence_length`.",
        )
    return reject(
        code,
        "data.source",
        part.source,
        f"none of its {thousands(counts.rows)} rows has a trained token within {thousands(limit)} "
        "tokens",
        remedy,
    )
