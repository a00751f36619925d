"""A typed preview of the data as the model will see it, made by a helper process."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from so_tui.folders import user_folder
from so_tui.launch.helper import Tell, ToolProcess, call_tool, stream_tool
from so_tui.launch.launch import visible_machine
from so_tui.launch.supervisor import host_check
from so_tui.machine.types import Machine
from so_tui.plan.binding import bind_ranks, by_core
from so_tui.plan.measured import Rates, store
from so_tui.runs import RunDirectory, create_run, delete_run, find_run, read_spec
from so_tui.runs.liveness import EXIT_CODES
from so_tui.runs.records import OutcomeCode, RunState
from so_tui.runs.state import write_state_even_if_full
from so_tui.spec import (
    InputError,
    RunSpec,
    check_tree,
    generation,
    load_catalog,
    spec_tree,
    with_values,
)
from so_tui.spec.check import exists, is_folder, path_fault
from so_tui.spec.consents import NOT_TRUSTED, Code
from so_tui.spec.data_notes import (
    UNPROVEN,
    Dropped,
    DropReason,
    Found,
    Outcome,
    dropped_sentences,
    sentence,
    sentences,
    why_dropped,
)
from so_tui.spec.errors import SoTuiError, refuse, reject
from so_tui.spec.generation import Ask, Device, Event, LoadModel, Prompt, Sampling
from so_tui.spec.model_table import layer_kinds, packing_problem
from so_tui.spec.presets import BUILTIN, absolute_source, with_absolute_paths
from so_tui.trust.decoding import Tree, prepare
from so_tui.units import disk_size, plural, thousands

# Measuring a machine's rates in helper processes, for ``calibrate`` and ``validate``.


def measure_rates(
    machine: Machine, tell: Tell, *, timeout_s: float = threading.TIMEOUT_MAX
) -> tuple[Rates, Path]:
    """Measure this machine and store its rates, which plans use from then on.

    Args:
        machine: This machine.
        tell: Receives what was measured, in words.
        timeout_s: How long it may take.

    Returns:
        The rates, and the file that has them now.

    Raises:
        Refused, ToolError: As for ``measure_alone``.
    """
    answer = measure_alone("calibrate", machine, "calibrate", tell, timeout_s)
    rates = msgspec.convert(answer["rates"], Rates)
    return rates, store(machine, rates=rates)


def measure_alone(tool: str, machine: Machine, by: str, tell: Tell, timeout_s: float) -> Tree:
    """Return what a helper measures of this machine while ``by`` holds its GPUs, so that no run
    begins beside it.

    Raises:
        Refused: A run uses a GPU (code ``gpu-in-use``).
        ToolError: A measurement failed, or took too long.
    """
    mine = visible_machine(machine, os.environ)
    try:
        held = host_check.take_gpus(mine.gpus, by)
    except host_check.LockTakenError as error:
        raise refuse(
            "gpu-in-use",
            f"{error}. A run and a calibration would disturb each other; wait until the run has "
            "ended",
        ) from error
    try:
        return call_tool(tool, _request_of(mine), tell, timeout_s=timeout_s)
    finally:
        for lock in held:
            lock.release()


def _request_of(machine: Machine) -> Tree:
    """Return the helper's request: the usable cores of each NUMA node, and each GPU with its node,
    the node's cores and its rank's.

    The hardware threads of a core are adjacent, as in the cores that ranks and their Adam workers
    get, so that the first n represent n cores of a rank.
    """
    allowed = set(machine.allowed_cpus)
    home = machine.gpus[0].numa_node if machine.gpus else None
    # The curve over core counts is measured on the node of the first GPU.
    nodes = sorted(machine.cpu_nodes, key=lambda node: node.id != home)
    shares = _cores_of_ranks(machine)
    near = {gpu.index: [cpu for cpu in gpu.cpus if cpu in allowed] for gpu in machine.gpus}
    return {
        "nodes": [
            {"id": node.id, "cpus": [*by_core(machine, cpus)]}
            for node in nodes
            if (cpus := [cpu for cpu in node.cpus if cpu in allowed])
        ],
        "gpus": [
            {
                "index": gpu.index,
                "node": gpu.numa_node,
                "cpus": near[gpu.index],
                "rank_cpus": shares.get(gpu.index, near[gpu.index]),
            }
            for gpu in machine.gpus
        ],
    }


def _cores_of_ranks(machine: Machine) -> dict[int | None, list[int]]:
    """Return the cores of each GPU's rank when all GPUs train; empty if they cannot, which must not
    prevent the measurement.
    """
    if not machine.gpus:
        return {}
    try:
        ranks = bind_ranks(
            machine, tuple(gpu.index for gpu in machine.gpus), cpu_adam_cores_fraction=0.0
        )
    except InputError:
        return {}
    return {rank.gpu: list(rank.cpus) for rank in ranks}


# Checkpoints converted between ours and DeepSpeed's, in a helper process.


def from_deepspeed(source: Path, spec: RunSpec, runs_dir: Path | None, tell: Tell) -> RunDirectory:
    """Make a run that has stopped where DeepSpeed's ZeRO-3 saved a checkpoint, so that ``resume``
    continues from there.

    Args:
        source: The folder given to DeepSpeed's ``save_checkpoint``, or that of a step in it.
        spec: What the run trains; of the model of the checkpoint.
        runs_dir: Folder of the run; the default folder if absent.
        tell: Receives what is done, in words.

    Raises:
        InputError: The folder has no such checkpoint, or one of another model; no run is left
            behind.
        ToolError: It cannot be read or written; no run is left behind.
    """
    run = create_run(spec, runs_dir)
    try:
        request = {"deepspeed": str(source), "run": str(run.path)}
        step = int(call_tool("convert", request, tell)["step"])
    except BaseException:
        delete_run(run)
        raise
    now = time.time()
    write_state_even_if_full(
        run,
        RunState(
            name=run.name,
            state="stopped",
            code=OutcomeCode.STOPPED,
            exit_code=EXIT_CODES["stopped"],
            step=step,
            total_steps=spec.train.steps,
            saved_step=step,
            saved_at=now,
            started=now,
            ended=now,
        ),
    )
    return run


LOSS_WORDS = {
    "assistant": "every answer of the assistant is trained",
    "last-turn": "the last answer of each row is trained",
    "all": "every token is trained, prompts too",
    "padded": "every token is trained, prompts and padding too",
}

_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
)


class Progress(Struct, frozen=True):
    """The helper's progress. ``total_rows`` is 0 until the rows are counted."""

    message: str
    done_rows: int = 0
    total_rows: int = 0


class Sample(Struct, frozen=True):
    """A document as pieces of text, each with whether it is trained."""

    source: str
    row: int
    tokens: int
    trained_tokens: int
    pieces: tuple[tuple[str, bool], ...]
    answers: tuple[int, ...] = ()
    """Trained tokens of each answer, in order."""
    dropped: DropReason | Literal[""] = ""
    """Why the row has no document; empty where it has."""
    document: int = 1
    """Which of the row's documents this is, where all of them are shown."""
    documents: int = 1

    @property
    def counted(self) -> str:
        """Its tokens in words: ``document 1 of 2: 80 tokens, 12 trained (5 + 7)``."""
        if self.dropped:
            return f"dropped: {why_dropped(self.dropped)}"
        each = f" ({' + '.join(map(thousands, self.answers))})" if len(self.answers) > 1 else ""
        which = f"document {self.document} of {self.documents}: " if self.documents > 1 else ""
        counts = f"{thousands(self.tokens)} tokens, {thousands(self.trained_tokens)} trained"
        return f"{which}{counts}{each}"

    @property
    def visible(self) -> Iterator[tuple[str, bool]]:
        """The pieces with symbols in place of control characters, which a terminal would obey."""
        return ((text.translate(_PICTURES), trained) for text, trained in self.pieces)


class Bin(Struct, frozen=True):
    """The documents of ``first`` to ``last`` tokens, and their tokens in total."""

    first: int = field(name="from")
    last: int = field(name="to")
    documents: int
    tokens: int

    @property
    def label(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


class _Tally(Struct, frozen=True, kw_only=True):
    """What became of the rows of a source, or of all sources."""

    rows: int
    documents: int
    tokens: int
    trained_tokens: int
    truncated: int
    dropped: int
    dropped_too_long: int
    cut: int
    kinds: dict[str, Found] = {}
    """What is not trained as the rows have it."""
    dropped_rows: dict[DropReason, Dropped] = {}
    """Dropped rows by reason."""


_MOST_COLUMNS = 20
"""Unused columns that are named."""


class SourceView(_Tally, frozen=True, kw_only=True):
    """A source of the mixture. It is the fraction ``share`` of an epoch, which repeats each of its
    documents ``times_an_epoch``.
    """

    source: str
    format: str
    weight: float
    share: float
    times_an_epoch: float
    unused_columns: tuple[str, ...] = ()
    """Columns that its layout does not read."""

    @property
    def unused(self) -> str:
        """The first of these columns, in a sentence; empty without any."""
        named = ", ".join(self.unused_columns[:_MOST_COLUMNS])
        more = len(self.unused_columns) - _MOST_COLUMNS
        return f"unused columns: {named}{f' and {more} more' if more > 0 else ''}" if named else ""


class Held(Struct, frozen=True):
    """A document in a packed sequence."""

    source: str
    row: int
    tokens: int


class PackedSequence(Struct, frozen=True):
    documents: tuple[Held, ...]
    tokens: int


class DataPreview(_Tally, frozen=True, kw_only=True):
    held_out: int
    """Documents for evaluation; the counts include them."""
    longest: int
    mean_length: float
    sequence_length: int
    packing: bool
    sequences: int
    packing_efficiency: float
    layout: str
    loss: str
    histogram: tuple[Bin, ...]
    sources: tuple[SourceView, ...]
    sequence: PackedSequence
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """What to know of the data, in sentences."""
        if len(self.sources) == 1:
            return [*self.warnings, *sentences(self.kinds), *dropped_sentences(self.dropped_rows)]
        return [
            *self.warnings,
            *(
                f"{part.source}: {said}"
                for part in self.sources
                for said in (*sentences(part.kinds), *dropped_sentences(part.dropped_rows))
            ),
        ]

    @property
    def how(self) -> str:
        """How rows become text, and which part of it is trained."""
        return f"{self.layout}; {LOSS_WORDS[self.loss]}"

    def facts(self) -> list[tuple[str, str, str]]:
        """Return name, figure and meaning of each count."""
        share = self.trained_tokens / self.tokens
        used = self.rows - self.dropped
        split = "turns-split" in self.kinds and f", in {thousands(self.documents)} documents"
        met = sum(part.documents * part.times_an_epoch for part in self.sources)
        held = f"{met / self.sequences:.1f} documents each" if self.packing else "one document each"
        filled = f"{100 * self.packing_efficiency:.1f} % full"
        purpose = "have trained tokens" if self.held_out else "are trained on"
        facts = [
            ("rows", self.rows, f"{thousands(used)} {purpose}{split or ''}"),
            ("held out", self.held_out, "documents for evaluation; the others are trained on"),
            (
                "tokens",
                self.tokens,
                f"{thousands(self.trained_tokens)} of them trained ({100 * share:.0f} %)",
            ),
            (
                "lengths",
                round(self.mean_length),
                f"tokens on average, {thousands(self.longest)} the longest",
            ),
            (
                "sequences",
                self.sequences,
                f"of {thousands(self.sequence_length)} tokens, {filled}, {held}",
            ),
            ("truncated", self.truncated, "rows longer than a sequence, which lose their end"),
            ("dropped", self.dropped, "rows without a trained token"),
            ("cut", self.cut, "rows of plain text that became several documents"),
        ]
        return [
            (name, thousands(count), meaning)
            for name, count, meaning in facts
            if count or name not in ("held out", "cut")
        ]

    @property
    def padding(self) -> int:
        """Padding tokens of the shown sequence."""
        return self.sequence_length - self.sequence.tokens

    def sequence_cells(self, width: int) -> list[int]:
        """Return the cells of each document of the shown sequence, and of its padding, in a bar of
        ``width`` cells.
        """
        ends = list(accumulate(document.tokens for document in self.sequence.documents))
        edges = [0, *(round(end * width / self.sequence_length) for end in ends), width]
        return [stop - start for start, stop in pairwise(edges)]

    def sequence_words(self) -> str:
        """Return a heading: ``a packed sequence: 3 documents that do not see each other``."""
        count = len(self.sequence.documents)
        return (
            "a packed sequence: "
            f"{plural(count, 'document')}{' that do not see each other' if count > 1 else ''}"
        )

    def sequence_sum(self) -> str:
        """Return a sum: ``44 + 36 + 12 padding = 92 tokens``."""
        parts = [thousands(document.tokens) for document in self.sequence.documents]
        padding = [f"{thousands(self.padding)} padding"] if self.padding else []
        return f"{' + '.join([*parts, *padding])} = {thousands(self.sequence_length)} tokens"

    def histogram_cells(self, width: int) -> list[int]:
        """Return the cells of each bin's bar: ``width`` for the fullest, and at least one for any
        that is not empty.
        """
        most = max(entry.documents for entry in self.histogram)
        return [
            max(1, round(width * entry.documents / most)) if entry.documents else 0
            for entry in self.histogram
        ]


class KindVerdict(Struct, frozen=True, kw_only=True):
    """What happens to what a kind names."""

    kind: str
    rows: int
    first: int
    """The first row, from 1."""
    outcome: Outcome
    detail: str

    @property
    def sentence(self) -> str:
        return sentence(self.kind, self.detail, "these rows")


class SourceVerdict(Struct, frozen=True, kw_only=True):
    """What happens to the rows of a source."""

    source: str
    format: str
    rows: int
    documents: int
    truncated: int
    kinds: tuple[KindVerdict, ...]
    dropped_rows: dict[DropReason, Dropped]

    @property
    def proven(self) -> int:
        """Rows whose answers are all proven."""
        unproven = sum(kind.rows for kind in self.kinds if kind.kind == UNPROVEN)
        answerless = (one.rows for why, one in self.dropped_rows.items() if why != UNPROVEN)
        return max(0, self.rows - unproven - sum(answerless))


class DataCheck(Struct, frozen=True, kw_only=True):
    """The verdict on all rows. ``refused``: some are not proven, and ``data.unproven`` refuses."""

    layout: str
    loss: str
    refused: bool
    sources: tuple[SourceVerdict, ...]
    warnings: tuple[str, ...]


prepare(Progress, DataPreview, DataCheck)


def preview_data(
    spec: RunSpec,
    rows: int,
    cancel: threading.Event | None = None,
    *,
    numbers: Sequence[int] = (),
) -> Iterator[Progress | DataPreview]:
    """Yield progress, then the preview with the rows of these numbers, and the first ``rows``.

    A cancelled preview just ends. Raises the errors of ``stream_tool``.
    """
    request = {
        "spec": spec_tree(with_absolute_paths(spec)),
        "rows": rows,
        "numbers": list(numbers),
    }
    for answer in stream_tool("data", request, cancel):
        if answer.get("done"):
            yield msgspec.convert(answer, DataPreview)
        else:
            yield msgspec.convert(answer, Progress)


def check_data(spec: RunSpec) -> Iterator[Progress | DataCheck]:
    """Yield progress, then the verdict. Raises the errors of ``stream_tool``."""
    request = {"spec": spec_tree(with_absolute_paths(spec)), "check": True}
    for answer in stream_tool("data", request):
        if answer.get("done"):
            yield msgspec.convert(answer, DataCheck)
        else:
            yield msgspec.convert(answer, Progress)


# The model of a run's newest checkpoint, exported as a Hugging Face folder by a helper process,
# with its progress.


class ExportProgress(Struct, frozen=True, kw_only=True):
    """How far an export is. First every tensor is read, then the files are written."""

    doing: Literal["reading", "writing"]
    done_bytes: int
    total_bytes: int
    done_tensors: int = 0
    total_tensors: int = 0
    """0 while files are written."""

    def __str__(self) -> str:
        sizes = f"{disk_size(self.done_bytes)} of {disk_size(self.total_bytes)}"
        if self.doing == "writing":
            return f"wrote {sizes}"
        return (
            f"read {thousands(self.done_tensors)} of {thousands(self.total_tensors)} tensors, "
            f"{sizes}"
        )


def export_model(run: RunDirectory, folder: Path | str) -> Iterator[ExportProgress | str]:
    """Export a run's newest checkpoint, and yield how far it is, and what is worth saying, in
    words.

    Raises:
        InputError: The run has no checkpoint, or the folder holds something else.
        ToolError: It cannot be read or written.
    """
    for event in stream_tool("export", {"run": str(run.path), "to": str(folder)}):
        if progress := event.get("progress"):
            yield msgspec.convert(progress, ExportProgress)
        elif message := event.get("message"):
            yield str(message)


def in_steps(events: Iterator[ExportProgress | str], parts: int) -> Iterator[ExportProgress | str]:
    """Leave out progress within the same one of ``parts`` equal parts of reading, or of writing, as
    the one before.
    """

    def part(event: ExportProgress | str) -> object:
        if isinstance(event, str):
            return event
        return event.doing, event.done_bytes * parts // max(1, event.total_bytes)

    return (next(same) for _, same in groupby(events, part))


# Presets for any model: a helper process reads the model's shape, and the other settings get
# sensible values.


_LONGEST_SEQUENCE = 4096
_TIMEOUT_S = 300.0


def code_of(name: str) -> Code:
    """Return the Python code of a source, copied and hashed by a helper process that runs none of
    it.

    Args:
        name: A hub id, ``ID@REVISION`` or a folder.

    Raises:
        InputError: There is no such source, or its files cannot be copied.
        Refused: The training software is not installed.
    """
    return msgspec.convert(call_tool("describe_code", {"name": name}, timeout_s=_TIMEOUT_S), Code)


def refused_code(error: SoTuiError) -> tuple[Code, ...]:
    """Return the code that an error refused because the user has not allowed it. Raises as
    ``code_of``.
    """
    problems = error.problems if isinstance(error, InputError) else ()
    names = dict.fromkeys(problem.value for problem in problems if problem.code == NOT_TRUSTED)
    return tuple(map(code_of, names))


def describe_model(
    model: str,
    *,
    name: str | None = None,
    revision: str = "main",
    trust_remote_code: bool = False,
    changes: dict[str, str] | None = None,
) -> tuple[RunSpec, tuple[str, ...]]:
    """Return an unsaved spec of a model, and notes about the model. Takes seconds, in a helper
    process that downloads at most config.json.

    Args:
        model: A hub id or a local folder.
        name: The preset's name; by default made from the model's.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the Python code that comes with the model.
        changes: Dotted keys and values, as for ``--set``.

    Raises:
        InputError: There is no such model, it is gated, it is not a causal language model, there is
            no network ... Codes of this module are ``name-taken`` and ``read-from-the-model``.
        Refused: The training software is not installed.
    """
    chosen = name or _preset_name(model)
    # Refused before the model is read, which takes seconds.
    older = load_catalog().presets.get(chosen)
    taken = older.path if older else str(user_folder() / f"{chosen}.toml")
    if older or exists(Path(taken)):
        raise reject(
            "name-taken",
            "name",
            chosen,
            f"is taken by {taken}",
            "Use that preset, or give another name (--name).",
        )
    changes = changes or {}
    for key, value in changes.items():
        # After that the parameter table would belong to another model.
        if key.startswith(("model.config", "model.parameters")):
            raise reject(
                "read-from-the-model",
                key,
                value,
                "is read from the model",
                "Copy the folder, change its config.json, and add the copy; or use it with "
                "model.weights=random.",
            )
    request = {"model": model, "revision": revision, "trust_remote_code": trust_remote_code}
    asked = {name: changes.get(f"model.{name}", "") for name in ("tokenizer", "weights")}
    answer = call_tool("describe_model", request | asked, timeout_s=_TIMEOUT_S)
    return with_values(check_tree(_tree(answer, chosen)), changes), tuple(answer["notes"])


def _preset_name(model: str) -> str:
    """Return a preset name for a model: ``qwen3-14b`` for ``Qwen/Qwen3-14B``, and a folder's own
    name, even for ``.``.
    """
    folder = Path(model.strip()).expanduser()
    name = folder.resolve().name if is_folder(folder) else _last_part(model)
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:64] or "model"


def _tree(answer: Tree, name: str) -> Tree:
    """Return the preset as a tree. Keys that it lacks keep their defaults."""
    length = min(_LONGEST_SEQUENCE, answer["longest_sequence"] or _LONGEST_SEQUENCE)
    return {
        "name": name,
        "title": re.sub(r"[-_]+", " ", _last_part(answer["model"]["id"])),
        "model": {
            key: value for key, value in answer["model"].items() if value not in ("", [], {})
        },
        "data": {
            "source": "tatsu-lab/alpaca",
            "format": "auto",
            "sequence_length": length,
            "packing": packing_problem(layer_kinds(answer["model"]["config"])) is None,
        },
        "train": {"epochs": 1},
    }


def _last_part(model: str) -> str:
    return model.strip().rstrip("/").removeprefix(BUILTIN).rpartition("/")[2] or model.strip()


# Ask a model for text: what is named by a user, and the helper process that has the model.
#
# Problem codes: not-a-model: The folder is neither a run nor a model. invalid-path: The text
# cannot be a path.


_REMEDY = (
    "Name a run (`so-tui runs` lists them), its folder, or a folder that `so-tui export` wrote."
)


def named_model(
    text: str,
    runs_dir: Path | None = None,
    *,
    compare: bool = False,
    base: str = "",
    device: Device = "auto",
) -> LoadModel:
    """Return what to load for the text that a user typed: a run's name or folder, or a model's
    folder.

    Args:
        text: What the user typed.
        runs_dir: Folder of the runs.
        compare: Whether to load the base model too.
        base: The base model, as a folder or a hub id, if it is named.
        device: Where to load it.

    Raises:
        InputError: There is no such run or folder.
    """
    for argument, given in (("model", text), ("--base", base)):
        if fault := path_fault(given):
            raise reject("invalid-path", argument, given, fault, _REMEDY)
    wanted = LoadModel(compare=compare or bool(base), base=absolute_source(base), device=device)
    folder = Path(text).expanduser()
    model = exists(folder / "config.json")
    if (
        is_folder(folder)
        and not exists(folder / "spec.json")
        and os.access(folder, os.X_OK)
        and ("/" in text or model)
    ):
        if not model:
            raise reject(
                "not-a-model",
                "model",
                text,
                "is neither the folder of a run nor that of a model",
                _REMEDY,
            )
        return replace(wanted, folder=str(folder.absolute()))
    return replace(wanted, run=str(find_run(text, runs_dir).path.absolute()))


def _weights_bytes(load: LoadModel) -> int:
    """Return the size of the weights that a request loads. A base model counts as much as the tuned
    one.
    """
    if load.run:
        found = read_spec(RunDirectory(Path(load.run))).model.parameter_count * 2
    else:  # what is on the disk: a sparse file has any size
        found = sum(
            min(state.st_size, state.st_blocks * 512)
            for state in map(os.stat, Path(load.folder).glob("*.safetensors"))
        )
    return found * (2 if load.compare else 1)


class ModelProcess(ToolProcess):
    """A helper process that has a model, and its base model if that is asked for. Close it in the
    end.
    """

    def __init__(self, load: LoadModel, end: threading.Event | None = None) -> None:
        """Start loading.

        Args:
            load: Which model.
            end: Ends the process from another thread.
        """
        super().__init__("generate", end, _weights_bytes(load))
        self._asked = 0
        self.send(load)

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling) -> int:
        """Ask for answers, one of each model at most, and return the number by which events name
        them.
        """
        self._asked += 1
        self.send(Ask(number=self._asked, prompts=tuple(prompts), sampling=sampling))
        return self._asked

    def cancel(self) -> None:
        """End the answers to everything that was asked."""
        self.send(generation.Cancel(number=self._asked))

    def events(self) -> Iterator[Event]:
        """Yield what happens, until the process ends. Raises the errors of ``answers``."""
        for answer in self.answers():
            yield msgspec.convert(answer, type=Event)
