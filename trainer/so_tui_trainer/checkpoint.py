"""Save and load checkpoints, on all ranks together.

All ranks write into ``step-000060.partial``. One rename makes it valid, and older checkpoints are
removed once it is proven readable. What the engine has copied is written by a thread of each rank
while training goes on; rank 0's also renames, verifies and removes. The ranks agree in their
training threads only, between two steps.

A checkpoint has the fp32 master weights, moments and counters of the optimizer (the bf16 weights
are a cast of the master weights), torch's random number generators of every rank, and a description
of the data. The learning rate follows from the step. ``checkpoint_folder`` has the files.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import superoffload
from so_tui.model.sharding import partition_numel
from so_tui.runs import RunDirectory, read_state
from so_tui.runs.directory import checkpoints_folder, missing_checkpoints, run_id
from so_tui.runs.records import CheckpointRecord
from so_tui.runs.state import FULL
from so_tui.spec import RunSpec
from so_tui.trust.files import read_bounded
from so_tui.units import thousands
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import (
    Damage,
    Found,
    Manifest,
    claim,
    newest,
    optimizer_folder,
    own_checkpoint,
    set_all_aside,
    set_aside,
)
from so_tui_trainer.engine_settings import states_format
from so_tui_trainer.failures import SUPERSEDED, TrainingError, engine_failure
from so_tui_trainer.ranks import Ranks
from superoffload.checkpoint import Rounded, sync

Result = TypeVar("Result")
_Problem = tuple[str, str, str]
"""Code, reason and suggestion of an error, as the ranks exchange it."""
_NOT_WRITTEN = "the checkpoint could not be written"
_LARGEST_RANDOM_BYTES = 1 << 20
_STATE_BYTES = 12
"""Bytes per parameter: fp32 master weight and two moments."""


def make_room(engine: Any, folder: Path, spec: RunSpec, ranks: Ranks) -> None:
    """Check, together with the other ranks, that a checkpoint fits on the disk.

    Args:
        engine: The DeepSpeed engine.
        folder: The folder of the run's checkpoints.
        spec: The run's spec.
        ranks: The process group.

    Raises:
        TrainingError: It does not fit; raised on all ranks.
    """
    parameters = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    share = sum(
        partition_numel(getattr(parameter, "ds_numel", parameter.numel()), ranks.size)
        for parameter in parameters
    )
    field = "checkpoint.folder" if spec.checkpoint.folder else "--runs-dir"
    with _all_ranks(ranks, "no checkpoint can be written"):
        if ranks.first:
            checkpoint_folder.make_room(folder, _STATE_BYTES * share * ranks.size, field)


class Saving:
    """A checkpoint that is being written, on all ranks together. Checkpoints beyond
    ``checkpoint.keep`` are removed at its end.

    Every rank must make it, and call each method, after the same step. Training may go on in
    between.

    Args:
        engine: The DeepSpeed engine.
        manifest: What the checkpoint belongs to.
        folder: The folder of the run's checkpoints.
        ranks: The process group.
        attempt: The run's attempt, for the record.
        background: Have the states copied, as far as there is memory for it, and write them
            afterwards. Otherwise they are written at once.
        due_step: When it fell due, if that was before its step; for the record.
        check: Called on rank 0 before the checkpoint is made valid, in a thread. Raises
            TrainingError if it must not be.

    Attributes:
        step: The step that it saves.

    Raises:
        TrainingError: It does not fit, or a rank cannot write; raised on all ranks, by the methods
            too. Earlier checkpoints stay.
    """

    def __init__(
        self,
        engine: Any,
        manifest: Manifest,
        folder: Path,
        ranks: Ranks,
        attempt: int,
        *,
        background: bool,
        due_step: int | None,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._began, self.step = time.monotonic(), manifest.step
        self._manifest = manifest
        self._ranks = ranks
        self._attempt = attempt
        self._due_step = due_step
        make_room(engine, folder, manifest.spec, ranks)
        with _all_ranks(ranks, "the checkpoint cannot be started"):
            made = checkpoint_folder.begin(folder, manifest.step) if ranks.first else None
        self._partial = partial = ranks.broadcast(made, Path)
        rest: superoffload.Save | None = None
        with _all_ranks(ranks, _NOT_WRITTEN, cleanup=partial):
            random_file = _random_file(partial, ranks.rank)
            random_file.write_bytes(msgspec.msgpack.encode(_random_state()))
            sync(random_file)
            rest = superoffload.begin_save(engine, optimizer_folder(partial), copying=background)
        assert rest is not None
        self._written = _in_thread(rest.finish)
        self._bytes, self._written_s = 0, 0.0
        self._completed: Future[tuple[Path | None, float]] | None = None
        """The folder, on rank 0, and when it was complete."""
        self._vote: tuple[Tensor, dist.Work] | None = None
        self._paused_s = time.monotonic() - self._began

    def poll(self) -> CheckpointRecord | None:
        """Return the record of the checkpoint once it is complete on all ranks; None before. Waits
        for no disk.
        """
        # The ranks answer while a step computes, so none waits for another here.
        if self._vote is not None:
            ready, answered = self._vote
            answered.wait()
            if ready.item():
                self._vote = None
                return self._go_on()
        ready = torch.tensor([(self._completed or self._written).done()], dtype=torch.uint8)
        self._vote = (
            ready,
            dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=self._ranks.group, async_op=True),
        )
        return None

    def wait(self) -> CheckpointRecord:
        """Wait until the checkpoint is complete on all ranks, and return its record."""
        waiting = time.monotonic()
        if self._vote is not None:
            self._vote[1].wait()
        record = None
        while record is None:
            record = self._go_on()
        waited_s = self._paused_s + time.monotonic() - waiting
        return msgspec.structs.replace(record, paused_s=min(record.seconds, waited_s))

    def _go_on(self) -> CheckpointRecord | None:
        """End the part in progress on all ranks, and begin the next one: rank 0 makes valid what
        all have written.
        """
        ranks, partial = self._ranks, self._partial
        if self._completed is None:
            written = 0
            with _all_ranks(ranks, _NOT_WRITTEN, cleanup=partial):
                written = self._written.result()
            self._bytes = int(sum(row[0] for row in ranks.all_gather_row([float(written)])))
            self._written_s = time.monotonic() - self._began

            def complete() -> tuple[Path | None, float]:
                final = None
                if ranks.first:
                    self._check()
                    final = checkpoint_folder.complete(partial, self._manifest)
                return final, time.monotonic()

            self._completed = _in_thread(complete)
            return None
        final, ended = None, 0.0
        with _all_ranks(ranks, "the checkpoint could not be finished", cleanup=partial):
            final, ended = self._completed.result()
        return CheckpointRecord(
            attempt=self._attempt,
            time=time.time(),
            step=self.step,
            path=str(ranks.broadcast(final, Path)),
            bytes=self._bytes,
            seconds=ended - self._began,
            paused_s=self._paused_s,
            written_s=self._written_s,
            due_step=self._due_step,
        )


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Run a function in a thread that ends with the process, whatever it is doing: what it leaves
    unfinished is no checkpoint.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _load(engine: Any, checkpoint: Path, manifest: Manifest, ranks: Ranks) -> Rounded:
    """Restore the state of a checkpoint, which any number of ranks may have written.

    With another number of ranks the random number generators stay as seeded; only some routers use
    them in training (Phi-3.5-MoE, noise in Mixtral). So they do with the files of earlier versions,
    which were pickles: loading one can run any code.

    Returns:
        What ``superoffload.load_state`` returns, summed over all ranks.

    Raises:
        TrainingError: A rank cannot load it; raised on all ranks.
    """
    with _all_ranks(ranks, f"{checkpoint} could not be loaded"), own_checkpoint(checkpoint) as at:
        rounded = superoffload.load_state(engine, optimizer_folder(at))
        path = _random_file(at, ranks.rank)
        if manifest.ranks == ranks.size and path.exists():
            _restore_random_state(
                msgspec.msgpack.decode(read_bounded(path, _LARGEST_RANDOM_BYTES), type=_RandomState)
            )
    rows = ranks.all_gather_row([float(count) for count in rounded])
    return Rounded(*(int(sum(counts)) for counts in zip(*rows, strict=True)))


def _random_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"random.rank{rank}.msgpack"


@contextmanager
def _all_ranks(ranks: Ranks, what: str, cleanup: Path | None = None) -> Iterator[None]:
    """Run a block on every rank and agree on whether it worked: an error of one rank is raised on
    all.

    Args:
        ranks: The process group.
        what: Start of the reason.
        cleanup: A folder that rank 0 removes after an error.
    """
    error: Exception | None = None
    problem: _Problem | None = None
    try:
        yield
    except (
        OSError,
        RuntimeError,
        ValueError,
        msgspec.DecodeError,
        TrainingError,
        superoffload.OffloadError,
    ) as caught:
        error, found = caught, _explained(caught)
        problem = found.code, found.reason, found.suggestion
    problems = list(filter(None, ranks.all_gather(problem, _Problem | None)))
    if not problems:
        return
    code, reason, suggestion = next(
        (problem for problem in problems if problem[0] == SUPERSEDED), problems[0]
    )
    # If superseded, a newer attempt may be writing a folder of that name.
    if cleanup is not None and ranks.first and code != SUPERSEDED:
        shutil.rmtree(cleanup, ignore_errors=True)
    raise TrainingError(code, f"{what}: {reason}", suggestion) from error


def _explained(error: Exception) -> TrainingError:
    if isinstance(error, TrainingError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return TrainingError(
            "disk-full",
            str(error),
            "Free some space there, then resume. Earlier checkpoints are unchanged.",
        )
    if isinstance(error, superoffload.OffloadError):
        return engine_failure(error)
    return TrainingError(
        "checkpoint-failed",
        str(error),
        "Check the disk and the permissions of the folder. Earlier checkpoints are unchanged.",
    )


class _RandomState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank's random number generators: torch's, the only ones that a step draws from."""

    torch: bytes
    cuda: bytes | None = None


def _random_state() -> _RandomState:
    return _RandomState(
        torch=bytes(torch.get_rng_state().tolist()),
        cuda=bytes(torch.cuda.get_rng_state().tolist()) if torch.cuda.is_available() else None,
    )


def _restore_random_state(state: _RandomState) -> None:
    torch.set_rng_state(torch.tensor(list(state.torch), dtype=torch.uint8))
    if state.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(state.cuda), dtype=torch.uint8))


# Warnings of a resume that rounds Adam's moments or begins them anew: the run goes on, though not
# bit for bit.


Warn = Callable[[str, str, str], None]
"""Records a warning: its code, message and suggestion."""


def _warn_of_rounding(saved: Manifest, now: RunSpec, rounded: Rounded, warn: Warn) -> None:
    """Warn of moments that the run continues with, but not bit for bit.

    Args:
        saved: The checkpoint's manifest.
        now: The spec of the run that loaded it.
        rounded: What ``_load`` returned.
        warn: Records a warning.
    """
    before, after = states_format(saved.spec), states_format(now)
    if rounded.restarted:
        warn(
            "moments-restarted",
            "DeepSpeed's own SuperOffload keeps Adam's moments out of reach: the weights are those "
            "of the checkpoint, the moments are zero",
            'Train with offload.engine = "so-tui", which saves them.',
        )
        return
    if before != after:
        warn(
            "states-format-changed",
            f"the checkpoint's moments are {before} and this run's are {after}: what the new "
            "format cannot hold is rounded",
            f'Resume with offload.states = "{before}" to continue bit for bit.',
        )
        return
    if rounded.numel:
        warn(
            "moments-rounded",
            f"the moments of {thousands(rounded.numel)} parameters were fp32 on the GPUs and are "
            f"rounded to {after} in host memory",
            f"Resume on {saved.ranks} GPUs with the same offload.ratio and offload.sub_group_size "
            "to continue bit for bit.",
        )
    if rounded.blocks:
        warn(
            "blocks-rounded-again",
            f"{thousands(rounded.blocks)} blocks of 128 8-bit moments had been cut by other shards "
            "and are rounded once more",
            f"Resume on {saved.ranks} GPUs to continue bit for bit.",
        )


# The checkpoint from which an attempt resumes: which one it is, and restoring it. What differs
# from before is told in warnings.


def newest_to_resume(
    run: RunDirectory, spec: RunSpec, warn: Warn, *, start_over: bool
) -> Found | None:
    """Return the checkpoint to resume from. Newer ones that cannot be used are renamed or left,
    with a warning.

    Args:
        run: The run.
        spec: Its spec.
        warn: Records a warning.
        start_over: Set all checkpoints aside and return None.

    Raises:
        TrainingError: The folder of checkpoints is another run's, or what the run saved is missing
            or unreadable.
    """
    folder = checkpoints_folder(run, spec)
    if spec.checkpoint.saves or folder.exists():
        claim(run, spec)
    if start_over:
        set_all_aside(folder, run_id(run))
        return None
    found = newest(folder, run_id(run), run.name, own=True)
    saved = read_state(run)
    if found is None:
        if (missing := missing_checkpoints(run, spec, saved)) is not None:
            raise TrainingError(missing.code, missing.message, missing.remedy)
        return None
    for damage in found.damaged:
        _set_aside(damage, found, warn)
    if (
        saved.saved_step is not None
        and found.manifest.step < saved.saved_step
        and not found.damaged
    ):
        gone = f"the run saved step {thousands(saved.saved_step)}, which is no longer in {folder}"
        warn(
            "checkpoint-missing", f"{gone}; resuming from step {thousands(found.manifest.step)}", ""
        )
    return found


def _set_aside(damage: Damage, found: Found, warn: Warn) -> None:
    """Rename a checkpoint that cannot be read, but not one that is whole and does not belong
    here.
    """
    if damage.code in ("other-run", "misnamed"):
        warn(
            "checkpoint-not-used",
            f"{damage.path.name} is not used ({damage.reason}); resuming from {found.path.name}",
            "It was left as it is. Move it away if you do not need it here.",
        )
        return
    moved_to = set_aside(damage.path)
    warn(
        "checkpoint-damaged",
        f"{damage.path.name} cannot be read ({damage.reason}); resuming from {found.path.name}",
        f"It was renamed to {moved_to}. Delete it if you do not need it.",
    )


def restore(
    found: Found, engine: Any, spec: RunSpec, fingerprint: str, ranks: Ranks, warn: Warn
) -> None:
    """Load a checkpoint's states into the engine, on all ranks together.

    Args:
        found: The checkpoint.
        engine: The DeepSpeed engine.
        spec: The spec as it is now.
        fingerprint: Of the documents as they are now.
        ranks: The process group.
        warn: Records a warning.

    Raises:
        TrainingError: A rank cannot load it; raised on all ranks.
    """
    manifest = found.manifest
    if manifest.data != fingerprint or _order(manifest.spec) != _order(spec):
        warn(
            "data-changed",
            "the data or their order changed since the checkpoint; continuing at sequence "
            f"{manifest.consumed_sequences + 1}",
            "Resume with the same data, weights, seed, sequence length and packing to neither skip "
            "nor repeat sequences.",
        )
    rounded = _load(engine, found.path, manifest, ranks)
    _warn_of_rounding(manifest, spec, rounded, warn)


def _order(spec: RunSpec) -> tuple[int, int, bool, tuple[float, ...]]:
    """Return the settings that determine the order of the sequences, besides the documents."""
    weights = [source.weight for source in spec.data.sources]
    shares = tuple(weight / weights[0] for weight in weights)
    return spec.train.seed, spec.data.sequence_length, spec.data.packing, shares
