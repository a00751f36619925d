"""The training loop. It waits for the GPU only where a record, an evaluation or a checkpoint is
due.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, Literal

import torch
import torch.distributed as dist
from msgspec import Struct

import superoffload
from so_tui.plan.plan import Plan
from so_tui.runs import RunDirectory, read_state
from so_tui.runs import state as run_state
from so_tui.runs.directory import checkpoints_folder, run_id
from so_tui.runs.records import CheckpointRecord, StepRecord
from so_tui.runs.results import add_answers
from so_tui.spec import InputError, TrainSpec
from so_tui.units import plural, rate, significant, thousands
from so_tui_trainer.checkpoint import Saving
from so_tui_trainer.checkpoint_folder import Manifest, claim
from so_tui_trainer.data.batches import Batches, Prefetcher
from so_tui_trainer.evaluation import evaluate
from so_tui_trainer.failures import SUPERSEDED, NonFiniteError, TrainingError
from so_tui_trainer.generation import Prompts
from so_tui_trainer.metrics import Metrics, Step, StepClock
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.recorder import Recorder
from superoffload.errors import NonFiniteGradientError

# Requests of users, and checkpoints by rank 0's clock: all ranks act on them after the same step.


_ACTIONS: tuple[run_state.Action, ...] = ("stop", "checkpoint")
_NEWER_CHECK_S = 10.0


class StoppedEarlyError(Exception):
    """A stop was requested before this attempt trained anything: there is nothing to save."""


def _refuse_if_superseded(run: RunDirectory, attempt: int) -> None:
    """Refuse to go on once the run's state names a newer attempt: this one counted as lost and must
    write nothing more.

    Raises:
        TrainingError: There is one (``superseded``).
    """
    try:
        newest = read_state(run).attempt
    # Its file system is away for a moment, or the run was deleted, which the supervisor notices.
    except InputError:
        return
    if newest > attempt:
        raise TrainingError(
            SUPERSEDED,
            f"attempt {newest} of the run has been started, because this one counted as lost",
        )


class Control:
    """Rank 0 broadcasts after each step what it finds in ``control/``; the ranks act on it after
    the next step.

    The broadcast runs while that step computes, so no rank waits for another here.
    """

    def __init__(self, run: RunDirectory, ranks: Ranks, *, attempt: int, every_s: float) -> None:
        """Watch a run's control folder.

        Args:
            run: The run.
            ranks: The process group.
            attempt: This attempt.
            every_s: Seconds of training between checkpoints by rank 0's clock; 0 for none.
        """
        self._run, self._ranks, self._attempt = run, ranks, attempt
        self._newer_checked_at = time.monotonic()
        self._every_s = every_s
        self._saved_at: float | None = None
        """When the interval began; None before the first step: loading is not training."""
        self._flags = torch.zeros(len(_ACTIONS), dtype=torch.bool)
        self._broadcast: dist.Work | None = None
        self._told = False
        """The log says that a request waits."""
        if ranks.first:  # Requests of an earlier attempt were meant for it.
            run_state.clear(run, "checkpoint")

    def stop_early(self) -> None:
        """Check for a stop request between parts of the loading. All ranks must call it.

        Raises:
            StoppedEarlyError: A stop is requested; raised on all ranks.
        """
        if self._ranks.broadcast("stop" in run_state.pending(self._run), bool):
            raise StoppedEarlyError

    def poll(self) -> frozenset[run_state.Action]:
        """Return what was broadcast after the previous step, and broadcast what is requested
        now. All ranks must call it after every step.
        """
        self.close()
        received = self._flags.tolist()
        self._flags = torch.zeros(len(_ACTIONS), dtype=torch.bool)
        if self._ranks.first:
            if time.monotonic() >= self._newer_checked_at + _NEWER_CHECK_S:
                self._newer_checked_at = time.monotonic()
                _refuse_if_superseded(self._run, self._attempt)
            requested = run_state.pending(self._run)
            # A request for a checkpoint is broadcast once; one to stop stays until the run ends.
            checkpoint = "checkpoint" in requested and self._cleared()
            if self._saved_at is None:
                self.saved()
            elif self._every_s and time.monotonic() >= self._saved_at + self._every_s:
                checkpoint = True
                self.saved()
            self._flags = torch.tensor(["stop" in requested, checkpoint])
        self._broadcast = dist.broadcast(self._flags, src=0, group=self._ranks.group, async_op=True)
        return frozenset(compress(_ACTIONS, received))

    def _cleared(self) -> bool:
        """Remove the request for a checkpoint. While its folder cannot be written it has to wait:
        it would be carried out at every step.
        """
        try:
            run_state.clear(self._run, "checkpoint")
        except OSError as error:
            if not self._told:
                print(
                    f"the request for a checkpoint waits, because it cannot be removed: {error}",
                    flush=True,
                )
            self._told = True
            return False
        self._told = False
        return True

    def saved(self) -> None:
        """Restart the interval of checkpoints by the clock, after any checkpoint."""
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Wait for the last broadcast; also before the process group is destroyed."""
        if self._broadcast is not None:
            self._broadcast.wait()


# The learning rate of a step. A pure function.


def learning_rate(step: int, total_steps: int, train: TrainSpec) -> float:
    """Return the learning rate of a step.

    It rises linearly over the warm-up of ``ceil(warmup_ratio * total_steps)`` steps and reaches the
    peak at the last of them. ``cosine`` and ``linear`` decay from there, ``wsd`` (warm-up, stable,
    decay) decays linearly over the last ``ceil(decay_ratio * total_steps)`` steps, as far as they
    come after the warm-up. The floor would be reached one step after the last, so that no step has
    a learning rate of 0.

    Args:
        step: From 1.
        total_steps: Steps of the run.
        train: The train section.
    """
    warmup = math.ceil(train.warmup_ratio * total_steps)
    if step <= warmup:
        return train.learning_rate * step / warmup
    falling = total_steps - warmup
    if train.schedule == "wsd":
        falling = min(falling, math.ceil(train.decay_ratio * total_steps))
    progress = max(0, step - (total_steps - falling) - 1) / max(1, falling)
    # The share of the decay that is left, from 1 at its start towards 0 at its end.
    height = 1 - progress
    if train.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif train.schedule == "constant":
        height = 1.0
    floor = train.min_learning_rate_ratio
    return train.learning_rate * (floor + (1 - floor) * height)


class Outcome(Struct, frozen=True, kw_only=True):
    """How training ended."""

    state: Literal["finished", "stopped"]
    step: int
    saved: str
    """Path of the last step's checkpoint; empty if none was written."""
    summary: dict[str, float]
    """Medians of a benchmark's measured steps."""


@dataclass(eq=False, kw_only=True)
class Loop:
    """Trains from one step to the end of the run."""

    run: RunDirectory
    plan: Plan
    engine: Any
    """The DeepSpeed engine."""
    batches: Batches
    """Of this rank."""
    data: str
    """Fingerprint of the documents, for checkpoints."""
    metrics: Metrics
    recorder: Recorder
    ranks: Ranks
    evaluation: Batches | None
    """Of the held-out documents, if there are any."""
    prompts: Prompts | None
    """What the model is asked during training, if anything."""
    step: int = 0
    """The last completed step."""
    useful_tokens: int = 0
    """Tokens trained so far that are not padding, over all ranks. Those of skipped steps do not
    count.
    """
    trained_tokens: int = 0
    """Tokens so far that carried loss, likewise."""
    last_loss: float | None = None
    saved_step: int = 0
    saved: str = ""
    """Path of the newest checkpoint; empty if there is none."""
    _saving: Saving | None = None
    """The checkpoint that is being written."""
    _due_step: int | None = None
    """When a checkpoint fell due that could not be begun yet, because another is being written."""

    def __post_init__(self) -> None:
        self.spec = self.plan.spec
        self.total_steps = self.batches.total_steps()
        self.clock = StepClock(self.ranks.device)

    def resume(self, path: str, manifest: Manifest) -> None:
        """Continue after the step of a checkpoint. ``batches`` must have been resumed there."""
        self.step = self.saved_step = manifest.step
        self.saved, self.last_loss = path, manifest.last_loss
        self.useful_tokens = manifest.useful_tokens
        self.trained_tokens = manifest.trained_tokens

    def train(self, control: Control) -> Outcome:
        """Train to the last step, or until a stop is requested.

        Raises:
            NonFiniteError: A loss or a gradient is not finite.
            TrainingError: A checkpoint cannot be written.
        """
        train, stop_requested = self.spec.train, False
        if self.step == 0:
            self.ask()
            if self.spec.model.weights == "pretrained":
                self.evaluate()  # What training is to improve; the loss of random weights is known.
        steps = self.batches.iterate(self.step + 1, self.total_steps)
        with closing(Prefetcher(steps, self.ranks.device)) as micro_batches:
            self.clock.restart()
            while self.step < self.total_steps and not stop_requested:
                step = self.train_step(micro_batches)
                if skipped := superoffload.skipped_step(self.engine):
                    self._warn_of_skipped_step(skipped)
                else:
                    self.metrics.watch(step)
                    if self._is_due(train.log_interval) or self.step == 1:
                        self.log(step)
                actions = control.poll()
                stop_requested = "stop" in actions
                if self._is_due(0 if stop_requested else train.evaluate_every_steps):
                    self.evaluate()
                if self._is_due(self.spec.prompts.every_steps):
                    self.ask()
                if self._saving and (record := self._saving.poll()):
                    self._record_saved(record)
                    self._show_training()
                every = self.spec.checkpoint.every_steps
                if "checkpoint" in actions or (every and self.step % every == 0):
                    self._due_step = self._due_step or self.step
                if self._due_step is not None and self._saving is None:
                    self.save(background=self.spec.checkpoint.background)
                    control.saved()
        control.close()
        if self._saving:  # It is of an earlier step, which is sound whatever the last ones were.
            self.recorder.phase("saving", f"checkpoint of step {thousands(self._saving.step)}")
            self._record_saved(self._saving.wait())
        self.metrics.check()
        if self.spec.checkpoint.saves_at_end or self._due_step is not None:
            self.save()
        return Outcome(
            state="finished" if self.step >= self.total_steps else "stopped",
            step=self.step,
            saved=self.saved if self.saved_step == self.step else "",
            summary=self.metrics.summary(),
        )

    def train_step(self, micro_batches: Prefetcher) -> Step:
        """Run one optimizer step: forward and backward of every micro-batch, then the update. Does
        not wait for the GPU.
        """
        number = self.step + 1
        rate = learning_rate(number, self.total_steps, self.spec.train)
        superoffload.set_learning_rate(self.engine, rate)
        loss, router_loss = torch.zeros((), device=self.ranks.device), None
        self.clock.lap("other")
        for _ in range(self.spec.gradient_accumulation_steps):
            batch = next(micro_batches)
            counts = batch.counts
            self.clock.lap("data")
            # DeepSpeed averages gradients over ranks and sums them over micro-batches. With these
            # scales the result is the gradient of the mean over all trained tokens of the step.
            micro_loss = self.engine(
                batch,
                self.ranks.size / counts.trained_tokens,
                self.ranks.size / counts.useful_tokens,
            )
            self.clock.lap("forward")
            self.engine.backward(micro_loss, scale_wrt_gas=False)
            self.clock.lap("backward")
            self.engine.step()  # Updates the weights after the last micro-batch.
            self.clock.lap("optimizer")
            loss += micro_loss.detach()
            if (balance := self.engine.module.last_router_loss) is not None:
                router_loss = balance if router_loss is None else router_loss + balance
        if router_loss is not None:
            loss -= self.spec.train.router_loss_coefficient * router_loss
        self.step = number
        if superoffload.skipped_step(self.engine) is None:
            # DeepSpeed's own optimizers skip it without a word.
            if not self.engine.was_step_applied():
                raise NonFiniteError(number, "gradient norm")
            self.useful_tokens += counts.useful_tokens
            self.trained_tokens += counts.trained_tokens
        return Step(number, counts, rate, loss, self.clock.end_step(), router_loss)

    def log(self, step: Step) -> None:
        """Write the step's record. Waits for the GPU.

        Raises:
            NonFiniteError: A loss or the gradient norm is not finite.
        """
        record = self.metrics.log(
            step, superoffload.gradient_norm(self.engine), superoffload.stats(self.engine)
        )
        self.last_loss = record.loss
        if self.ranks.first:
            print(_log_line(record, self.total_steps), flush=True)

    def evaluate(self) -> None:
        """Measure the loss on the held-out documents, if there are any.

        Raises:
            NonFiniteError: A loss is not finite.
        """
        if self.evaluation is None:
            return
        self.metrics.check()
        documents = len(self.evaluation.sequences.documents)
        self.recorder.phase("training", f"evaluating on {documents} documents")
        record = evaluate(
            self.evaluation,
            self.engine.module,
            self.ranks,
            attempt=self.recorder.attempt,
            step=self.step,
        )
        self.recorder.write(record)
        if self.ranks.first:
            print(
                f"step {thousands(record.step)}/{thousands(self.total_steps)}  evaluation loss "
                f"{record.loss:.4f}",
                flush=True,
            )
        self._show_training()
        self._restart_clocks()

    def ask(self) -> None:
        """Have the model answer the prompts of the spec, if there are any. A disk that does not
        take them costs no training.
        """
        if self.prompts is None:
            return
        self.metrics.check()
        self.recorder.phase("training", f"answering {plural(len(self.prompts), 'prompt')}")
        asked = self.prompts.ask(self.engine.module, attempt=self.recorder.attempt, step=self.step)
        if self.ranks.first:
            for answer in asked.answers:
                print(
                    f"step {thousands(asked.step)}/{thousands(self.total_steps)}  "
                    f"{answer.prompt!r} -> {answer.text!r}",
                    flush=True,
                )
            try:
                add_answers(self.run, asked)
            except OSError as error:
                print(f"the answers cannot be kept: {error}", flush=True)
        self._show_training()
        self._restart_clocks()

    def save(self, *, background: bool = False) -> None:
        """Write a checkpoint of the last step, unless there is one.

        Args:
            background: Go on training while it is written. No other checkpoint may be being
                written.

        Raises:
            NonFiniteError: A loss was not finite; these weights must not be saved.
            TrainingError: The checkpoint cannot be written.
        """
        due_step, self._due_step = self._due_step, None
        if self.saved_step == self.step:
            return
        self.metrics.check()
        self.recorder.phase("saving", f"checkpoint of step {thousands(self.step)}")
        manifest = Manifest(
            run=run_id(self.run),
            step=self.step,
            total_steps=self.total_steps,
            ranks=self.ranks.size,
            consumed_sequences=self.batches.consumed(self.step),
            useful_tokens=self.useful_tokens,
            trained_tokens=self.trained_tokens,
            data=self.data,
            last_loss=self.last_loss,
            spec=self.spec,
        )
        folder = checkpoints_folder(self.run, self.spec)
        if self.ranks.first:
            claim(self.run, self.spec)  # again: it may have been removed since the start
        attempt = self.recorder.attempt
        self._saving = Saving(
            self.engine,
            manifest,
            folder,
            self.ranks,
            attempt,
            background=background,
            due_step=due_step if due_step != self.step else None,
            check=partial(_refuse_if_superseded, self.run, attempt),
        )
        if not background:
            self._record_saved(self._saving.wait())
        if self.step < self.total_steps:
            self._show_training()
        self._restart_clocks()

    def _record_saved(self, record: CheckpointRecord) -> None:
        self.recorder.write(record)
        self.saved_step, self.saved = record.step, record.path
        self._saving = None

    def _is_due(self, every: int) -> bool:
        """Return whether something is due that happens every so many steps (0: never), and after
        the last one.
        """
        return self.step == self.total_steps or bool(every and self.step % every == 0)

    def _restart_clocks(self) -> None:
        """Exclude the time since the last step from the next one."""
        self.clock.restart()
        superoffload.leave_out_waits(self.engine)

    def _show_training(self) -> None:
        self.recorder.phase(
            "training",
            f"writing the checkpoint of step {thousands(self._saving.step)}"
            if self._saving
            else "",
        )

    def _warn_of_skipped_step(self, error: NonFiniteGradientError) -> None:
        where = f"sub-group {error.sub_group} ({error.parameter} ...)"
        message = f"step {thousands(self.step)} was skipped: the gradient of {where} is not finite"
        self.recorder.warn(
            "step-skipped",
            message,
            f"Inspect the data around that step. More than {self.spec.train.max_skipped_steps} in "
            "a row end the run",
        )
        if self.ranks.first:
            print(message, flush=True)


def _log_line(record: StepRecord, total_steps: int) -> str:
    """Return a step as a line of the log; ranks without GPUs have their speed by rank."""
    norm = "" if record.gradient_norm is None else f"  gradient norm {record.gradient_norm:.3g}"
    per = "rank" if record.gpu_memory_peak_bytes is None else "GPU"
    return (
        f"step {thousands(record.step)}/{thousands(total_steps)}  loss {record.loss:.4f}{norm}  "
        f"{rate(record.useful_tokens_per_s_total)} tokens/s  "
        f"{significant(record.model_tflops_per_gpu, 4)} TFLOPS/{per}  {record.step_s:.3f} s"
    )
