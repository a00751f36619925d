"""One rank of one attempt, from its plan to its last record."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

import superoffload.api
from so_tui.model.flops import peak_flops
from so_tui.plan.notes import OneCheckpointKept
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory
from so_tui.runs import state as run_control
from so_tui.runs.directory import checkpoints_folder
from so_tui.runs.records import (
    ENDING,
    BindingRecord,
    EndRecord,
    RankBindingReport,
    ResumedRecord,
    StartRecord,
)
from so_tui.spec import RunSpec
from so_tui.spec.data_notes import dropped_sentences, sentences
from so_tui.spec.errors import reject
from so_tui.spec.model_table import REGENERATE
from so_tui.trust.folders import is_shared
from so_tui.units import memory_size, thousands
from so_tui_trainer import binding, checkpoint, failures
from so_tui_trainer.checkpoint_folder import Found
from so_tui_trainer.data import documents as cache
from so_tui_trainer.data import tokens
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.documents import Documents
from so_tui_trainer.engine_settings import engine_settings
from so_tui_trainer.evaluation import divide, evaluation_spec, trained_fingerprint
from so_tui_trainer.failures import SUPERSEDED, TrainingError
from so_tui_trainer.generation import Prompts
from so_tui_trainer.loop import Control, Loop, Outcome, StoppedEarlyError
from so_tui_trainer.metrics import Metrics, record_network_rate
from so_tui_trainer.model.attention import takes_boundaries
from so_tui_trainer.model.build import build
from so_tui_trainer.model.kernels import replace_slow_matmuls
from so_tui_trainer.model.trained import TrainedModel, parameter_count, parameter_groups
from so_tui_trainer.ranks import Ranks, join
from so_tui_trainer.recorder import Recorder, trackers_of
from superoffload.settings import Settings

# Signal handling of a rank that also works while its main thread waits in a collective.


def _install_handlers(on_warning: Callable[[], None], on_terminate: Callable[[], None]) -> None:
    """Handle SIGUSR1 and SIGTERM in a thread.

    Python runs signal handlers only in the main thread, between two of its instructions, so they
    would wait for a collective. The wake-up descriptor, which its C code writes to, can be read by
    any thread.

    Args:
        on_warning: Called on SIGUSR1, a scheduler's warning.
        on_terminate: Called on SIGTERM; then the process exits with 143.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while (received := os.read(reading, 1)[0]) != signal.SIGTERM:
            if received == signal.SIGUSR1:
                _call(on_warning)
        _call(on_terminate)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _call(action: Callable[[], None]) -> None:
    """Call a handler. Its error is shown and ends nothing: without the thread that calls it,
    SIGTERM would not end the process.
    """
    try:
        action()
    except Exception:  # noqa: BLE001 -- whatever it is, later signals must be obeyed
        traceback.print_exc()
        sys.stderr.flush()


# Read what a rank trains and evaluates on, from the cache that rank 0 fills.


def _read_training_data(
    spec: RunSpec, ranks: Ranks, recorder: Recorder
) -> tuple[Documents, Batches, Batches | None]:
    """Read the spec's data; rank 0 tokenises them if needed.

    Returns:
        All documents, and the batches to train on and to evaluate.

    Raises:
        InputError: They cannot be read, or nothing would be left to train on.
    """
    documents = _documents(spec, ranks, recorder)
    training, held_out = divide(documents, spec)
    other = evaluation_spec(spec)
    evaluated = documents if other is None else _documents(other, ranks, recorder)
    members = held_out if other is None else np.arange(len(evaluated.lengths))
    pin, epoch = ranks.device.type == "cuda", documents.epoch(spec.train.seed, training)
    return (
        documents,
        Batches(documents, spec, ranks.rank, members=epoch, pin=pin),
        Batches(evaluated, spec, ranks.rank, members=members, pin=pin) if len(members) else None,
    )


def _check_sizes(config: Any, documents: Documents, spec: RunSpec, recorder: Recorder) -> None:
    """Compare the documents with the model's shape.

    Args:
        config: The model's configuration.
        documents: The tokenised data.
        spec: The run's spec.
        recorder: Gets a warning if documents are longer than the model's positions.

    Raises:
        InputError: A token id exceeds the model's vocabulary.
    """
    largest = int(documents.tokens.max())
    if largest >= config.vocab_size:
        raise reject(
            "tokenizer-too-large",
            "model.tokenizer",
            spec.model.tokenizer,
            f"has ids up to {largest}, but the model's vocabulary has {config.vocab_size} tokens",
            "Use the model's own tokenizer.",
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and int(documents.lengths.max()) > positions:
        recorder.warn(
            "documents-exceed-positions",
            f"some documents are longer than the {thousands(positions)} positions that the model "
            "supports",
            "Scale its positions (`model.rope_scaling`), or lower `data.sequence_length`.",
        )


def _warn_of_dropout(model: TrainedModel, recorder: Recorder) -> None:
    if model.dropouts:
        named = ", ".join(f"{name} = {share:g}" for name, share in model.dropouts.items())
        recorder.warn(
            "dropout-off",
            f"the model's config.json asks for dropout ({named}), and it is trained without",
            "Nothing is needed: the kernels for packed documents have no dropout.",
        )


def _check_table(spec: RunSpec, parameters: int) -> None:
    """Raise InputError if the plan was made for a model of another size than the one built."""
    planned = spec.model.parameter_count
    if parameters != planned:
        raise reject(
            "table-stale",
            "model.parameters",
            f"{thousands(planned)} parameters",
            f"was generated for another architecture: the model has {thousands(parameters)}",
            f"Make a preset of this model with `so-tui presets add`, or: {REGENERATE}",
        )


def _documents(spec: RunSpec, ranks: Ranks, recorder: Recorder) -> Documents:
    """Tokenise on rank 0, and read on all ranks.

    Raises:
        TrainingError: This rank is on another host than rank 0 and does not see its cache (code
            ``cache-not-shared``).
    """

    def progress(rows: int, total: int) -> None:
        doing = f"tokenising the data, {thousands(rows)} of {thousands(total)} rows"
        recorder.phase("loading", doing, stage="data")

    folder = ranks.broadcast(
        tokens.prepare(spec, on_progress=progress) if ranks.first else None, Path
    )
    if not folder.is_dir():
        raise TrainingError(
            "cache-not-shared",
            f"the tokenised data in {folder} cannot be seen on {socket.gethostname()}",
            "Set XDG_CACHE_HOME to a folder that all nodes share, in the site profile.",
        )
    documents = cache.read(folder, spec.data)
    counts = documents.counts
    notes = (*sentences(counts.kinds), *dropped_sentences(counts.dropped_rows))
    for warning in (*documents.warnings, *notes):
        recorder.warn("data", warning)
    return documents


LoadStage = Literal["ranks", "data", "weights", "optimizer", "checkpoint"]


@dataclass(eq=False)
class Session:
    """Everything that must be reported or closed, however the attempt ends."""

    run: RunDirectory
    launch: Launch
    """The attempt's plan, and how it was started."""
    report: RankBindingReport
    """This rank's binding."""
    recorder: Recorder
    engine: Any = None
    loop: Loop | None = None

    def __post_init__(self) -> None:
        self.plan = self.launch.plan
        self.spec: RunSpec = self.plan.spec
        self.rank = self.report.rank
        self.attempt = self.recorder.attempt
        if self.rank == 0:
            self.recorder.track(trackers_of(self.run, self.spec))

    def main(self) -> int:
        """Load, train, save, and write the end record.

        Returns:
            0 if the run did what was requested. After a failure the process exits with 1.
        """
        # USR1 requests a stop with a checkpoint; at TERM the record says why the run failed, if it
        # did.
        _install_handlers(self._request_stop, self._write_failure)
        try:
            self.finish(self.train())
        # Every error of a rank becomes the run's last record, and its exit code.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            self.fail(error)
            sys.stdout.flush()
            sys.stderr.flush()
            # Not by return: the destructors of NCCL and CUDA may wait for a lost rank. Adam workers
            # die with this process.
            os._exit(1)
        if self.recorder.hanging:
            os._exit(0)  # Not by return: an exit handler of the tracker would wait for its server.
        return 0

    def train(self) -> Outcome:
        """Run the attempt.

        Raises:
            Exception: Whatever goes wrong; ``fail`` explains it.
        """
        # DeepSpeed uses a deprecated name of torch.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        self._load_stage("ranks", "starting the ranks")
        use_gpu = self.plan.binding[0].gpu is not None
        if not use_gpu:
            replace_slow_matmuls()
        ranks = join(use_gpu)
        bindings = ranks.all_gather(self.report, RankBindingReport)
        self.recorder.write(
            BindingRecord(attempt=self.attempt, time=time.time(), ranks=tuple(bindings))
        )
        if self.spec.nodes > 1:
            record_network_rate(ranks, self.run, self.attempt, self.spec.nodes)
        newest = (
            checkpoint.newest_to_resume(
                self.run, self.spec, self.recorder.warn, start_over=self.launch.start_over
            )
            if ranks.first
            else None
        )
        found = ranks.broadcast(newest, Found | None)
        control = Control(
            self.run, ranks, attempt=self.attempt, every_s=60 * self.spec.checkpoint.every_minutes
        )
        try:
            self.loop = loop = self._load(ranks, found, control)
        except StoppedEarlyError:
            step, saved = (found.manifest.step, str(found.path)) if found else (0, "")
            return Outcome(state="stopped", step=step, saved=saved, summary={})
        if found or self.attempt > 1:
            self.recorder.write(
                ResumedRecord(attempt=self.attempt, time=time.time(), step=loop.step)
            )
        # Keep what was loaded out of every later garbage collection. A full one looks at every
        # object that there is: with the libraries some hundred thousand, which takes a good part
        # of a step. It may begin anywhere in a step, on any rank, and the others wait for that rank
        # in their next collective.
        gc.collect()
        gc.freeze()
        self.recorder.phase("training", "")
        outcome = loop.train(control)
        if self.spec.checkpoint.export and outcome.state == "finished":
            self._export(ranks, outcome)
        return outcome

    def finish(self, outcome: Outcome) -> None:
        """Close everything, then write the end record, which must be the last thing that is
        written.
        """
        ending = "releasing memory and ending the processes"
        self.recorder.phase("saving", ending, stage=ENDING)
        if self.engine is not None:
            superoffload.close(self.engine)
        dist.barrier()
        dist.destroy_process_group()
        self.recorder.end_tracking()
        code = reason = ""
        if outcome.state != "finished":
            request = run_control.details(self.run, "stop")
            cause = f" ({request.reason})" if request and request.reason else ""
            code, reason = "stopped", f"stopped on request{cause}"
            if self.loop is None:
                code, reason = "stopped-while-loading", f"{reason} while it was loading"
        self.recorder.write(
            EndRecord(
                attempt=self.attempt,
                time=time.time(),
                state=outcome.state,
                step=outcome.step,
                code=code,
                reason=reason,
                saved=outcome.saved,
                summary=outcome.summary,
            )
        )
        self.recorder.close()

    def fail(self, error: Exception) -> None:
        """Report a failure to the other ranks and the run. Closes nothing that would wait for a
        lost rank.
        """
        if isinstance(error, TrainingError) and error.code == SUPERSEDED:
            print(error, file=sys.stderr)
            return
        step = self.loop.step if self.loop else 0
        failure = failures.explain(error, self.spec, self.rank, step, self.plan)
        try:
            run_control.report_failure(self.run, self.attempt, failure)
            self._write_failure()
        except OSError as write_error:  # A full disk, say. The log may still have space.
            print(
                f"{failure.reason}. {failure.suggestion} (cannot be recorded: {write_error})",
                file=sys.stderr,
            )

    def _request_stop(self) -> None:
        try:
            run_control.request(
                self.run, "stop", reason=f"rank {self.rank} received SIGUSR1", warned=True
            )
        except OSError as error:  # The supervisor and the other ranks receive the signal too.
            print(f"the stop request cannot be written: {error}", file=sys.stderr, flush=True)

    def _load(self, ranks: Ranks, found: Found | None, control: Control) -> Loop:
        """Do everything that precedes the first step; with large models each part takes minutes.

        Raises:
            StoppedEarlyError: A stop was requested meanwhile.
        """
        self._seed(0)
        control.stop_early()
        self._load_stage("data", "reading the data")
        documents, batches, evaluation = _read_training_data(self.spec, ranks, self.recorder)
        fingerprint = trained_fingerprint(documents.fingerprint, self.spec)
        control.stop_early()
        loading = f"loading {self.spec.label}"
        self._load_stage("weights", loading)
        ds_config = self.launch.ds_config
        model = build(
            self.spec,
            ranks.device,
            ds_config,
            lambda done, total: self._load_stage("weights", loading, done, total),
        )
        if takes_boundaries(model.attention):
            batches.end_to_end = True
            if evaluation:
                evaluation.end_to_end = True
        _check_sizes(model.causal.config, documents, self.spec, self.recorder)
        _warn_of_dropout(model, self.recorder)
        parameters = parameter_count(model)
        if not found:  # a table never bars the way to what a run has saved
            _check_table(self.spec, parameters)
        control.stop_early()
        self._load_stage("optimizer", "preparing the optimizer")
        mine = binding.of_rank(self.plan.binding, self.rank)
        settings = engine_settings(self.spec, mine, self.plan.optional)
        self._warn_of_less_memory(settings)
        for fact in self.plan.warnings:
            if isinstance(fact, OneCheckpointKept):  # decided after the plan was shown
                remedy = f"Once there is space, resume with --set checkpoint.keep={fact.kept}"
                self.recorder.warn("one-checkpoint-kept", fact.message, remedy)
        self.engine, *_ = superoffload.initialize(
            model, parameter_groups(model, self.spec), settings, ds_config
        )
        binding.apply_main_cores(mine)
        self._seed(self.rank)
        if found:
            batches.resume_at(found.manifest.step, found.manifest.consumed_sequences)
        metrics = Metrics(self.spec, ranks, self.recorder, parameters)
        self._start_record(ranks, batches.total_steps(), parameters)
        loop = Loop(
            run=self.run,
            plan=self.plan,
            engine=self.engine,
            batches=batches,
            data=fingerprint,
            metrics=metrics,
            recorder=self.recorder,
            ranks=ranks,
            evaluation=evaluation,
            prompts=Prompts(self.spec, ranks, end_to_end=takes_boundaries(model.attention))
            if self.spec.prompts.texts
            else None,
        )
        control.stop_early()
        if self.spec.checkpoint.saves:
            checkpoint.make_room(
                self.engine, checkpoints_folder(self.run, self.spec), self.spec, ranks
            )
        if found:
            self._load_stage("checkpoint", f"resuming from step {thousands(found.manifest.step)}")
            checkpoint.restore(
                found, self.engine, self.spec, fingerprint, ranks, self.recorder.warn
            )
            loop.resume(str(found.path), found.manifest)
            control.stop_early()
        return loop

    def _warn_of_less_memory(self, settings: Settings) -> None:
        planned = self.plan.optional
        self._warn_if_less(
            settings.speculation_bytes,
            planned.second_states_bytes,
            "second-states-reduced",
            "clipping: second states",
            "Results stay the same, but more of Adam waits for the gradient norm. Free the memory "
            "and resume, or go on as it is.",
        )
        self._warn_if_less(
            settings.copies_bytes,
            planned.copies_bytes,
            "copies-reduced",
            "checkpoints: copies of states",
            "Checkpoints stay the same, but training waits for more of each. Free the memory and "
            "resume, or go on as it is.",
        )

    def _warn_if_less(self, found: int, wanted: int, code: str, use: str, effect: str) -> None:
        if found < wanted:
            message = f"{use} get {memory_size(found)} of the planned {memory_size(wanted)}"
            because = "because this host has no more memory available"
            self.recorder.warn(code, f"{message}, {because}", effect)

    def _start_record(self, ranks: Ranks, total_steps: int, parameters: int) -> None:
        hostnames = tuple(dict.fromkeys(ranks.all_gather(socket.gethostname(), str)))
        peak = peak_flops(ranks.device_name)
        self.recorder.write(
            StartRecord(
                attempt=self.attempt,
                time=time.time(),
                model=self.spec.label,
                mode=self.spec.offload.mode,
                ranks=ranks.size,
                total_steps=total_steps,
                parameters=parameters,
                gradient_accumulation_steps=self.spec.gradient_accumulation_steps,
                tokens_per_step=self.plan.tokens_per_step,
                hostnames=hostnames,
                device_name=ranks.device_name,
                peak_tflops_per_gpu=peak / 1e12 if peak else None,
                versions={
                    name: version(name)
                    for name in ("torch", "deepspeed", "transformers", "datasets")
                },
            )
        )

    def _seed(self, offset: int) -> None:
        seed = self.spec.train.seed + offset
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(self.spec.train.deterministic)

    def _export(self, ranks: Ranks, outcome: Outcome) -> None:
        from so_tui_trainer.export import export

        self.recorder.phase("saving", "Hugging Face folder")
        if ranks.first:
            folder, shared = self.run.path / "export", is_shared(self.run.path)
            export(Path(outcome.saved), folder, self.run.name, self.spec, shared=shared)
        ranks.barrier()

    def _load_stage(self, stage: LoadStage, detail: str, done: int = 0, total: int = 0) -> None:
        self.recorder.phase("loading", detail, stage=stage, done=done, total=total)

    def _write_failure(self) -> None:
        """Write the end record on rank 0, from the failure that was reported first. Does nothing if
        no rank failed.
        """
        reported = run_control.failures(self.run, self.attempt)
        if not reported or self.rank != 0:
            return
        failure = reported[0]
        reason = failure.reason if failure.rank == 0 else f"rank {failure.rank}: {failure.reason}"
        saved = self.loop.saved if self.loop else ""
        self.recorder.write(
            EndRecord(
                attempt=self.attempt,
                time=time.time(),
                state="failed",
                step=failure.step,
                code=failure.code,
                reason=reason,
                suggestion=failure.suggestion,
                saved=saved,
            )
        )
        self.recorder.close()
