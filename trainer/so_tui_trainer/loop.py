"""The training loop: one step reads from top to bottom, and waits for the GPU only where a record or a checkpoint is due."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from msgspec import Struct

import superoffload
from so_tui.plan.types import Plan
from so_tui.runs import RunDirectory
from so_tui.runs.records import PhaseRecord, StepRecord, WarningRecord
from so_tui_trainer import checkpoint
from so_tui_trainer.checkpoint import Manifest
from so_tui_trainer.clocks import StepClock
from so_tui_trainer.control import Control
from so_tui_trainer.data.batches import Batches, MicroBatch, StepCounts
from so_tui_trainer.data.prefetcher import Prefetcher
from so_tui_trainer.evaluation import Evaluation
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.metrics import EngineStats, Metrics, Recorder, Step
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.schedule import learning_rate

_ODD_FIRST_LOSS = 0.5
_WRONG_FIRST_LOSS = 3.0


class Outcome(Struct, frozen=True, kw_only=True):
    state: Literal["finished", "stopped"]
    step: int
    saved: str
    """The checkpoint of the last step; empty when none was asked for."""
    summary: dict[str, float]


class Loop:
    """A run from one step to its end. ``step`` is the last one that is done."""

    def __init__(
        self,
        run: RunDirectory,
        plan: Plan,
        engine: Any,
        batches: Batches,
        data: str,
        metrics: Metrics,
        recorder: Recorder,
        ranks: Ranks,
        *,
        evaluation: Evaluation | None,
        expected_first_loss: float | None,
    ) -> None:
        self.run, self.spec, self.engine, self.batches, self.data = run, plan.spec, engine, batches, data
        self.metrics, self.recorder, self.ranks = metrics, recorder, ranks
        self.evaluation, self.expected_first_loss = evaluation, expected_first_loss
        self.total_steps = batches.total_steps()
        self.step = self.useful_tokens = self.trained_tokens = 0
        self.last_loss: float | None = None
        self.saved_step, self.saved = 0, ""
        self.clock = StepClock(ranks.device)

    def resume(self, path: str, manifest: Manifest) -> None:
        """Go on after the checkpoint's step, to which ``batches`` have been brought."""
        self.step = self.saved_step = manifest.step
        self.saved, self.last_loss = path, manifest.last_loss
        self.useful_tokens, self.trained_tokens = manifest.useful_tokens, manifest.trained_tokens

    def train(self, control: Control) -> Outcome:
        """Train to the last step, or until someone asks to stop. Raises NonFiniteError, TrainingError, and whatever the engine raises."""
        with Prefetcher(self.batches.iterate(self.step + 1, self.total_steps), self.ranks.device) as prefetcher:
            self._train(prefetcher, control)
        control.close()
        self.metrics.check()
        if self.spec.checkpoint.at_end or self.spec.checkpoint.export:
            self.save()
        state: Literal["finished", "stopped"] = "finished" if self.step >= self.total_steps else "stopped"
        saved = self.saved if self.saved_step == self.step else ""
        return Outcome(state=state, step=self.step, saved=saved, summary=self.metrics.summary())

    def _train(self, prefetcher: Prefetcher[MicroBatch], control: Control) -> None:
        stopped = False
        self.clock.restart()
        while self.step < self.total_steps and not stopped:
            step = self.train_step(self.step + 1, prefetcher)
            self.metrics.watch(step)
            if step.number % self.spec.train.log_interval == 0 or step.number in (1, self.total_steps):
                self.log(step)
            asked = control.poll()
            stopped = "stop" in asked
            every = self.spec.train.evaluate_every_steps
            if step.number == self.total_steps or (every and step.number % every == 0 and not stopped):
                self.evaluate()
            every = self.spec.checkpoint.every_steps
            if "checkpoint" in asked or (every and step.number % every == 0):
                self.save()
                control.saved()

    def train_step(self, number: int, prefetcher: Prefetcher[MicroBatch]) -> Step:
        """One optimizer step: every rank's micro-batches, then the update. Nothing here waits for the GPU."""
        rate = learning_rate(number, self.total_steps, self.spec.train)
        superoffload.set_learning_rate(self.engine, rate)
        loss, router_loss = torch.zeros((), device=self.ranks.device), None
        self.clock.lap("other")
        for _ in range(self.spec.gradient_accumulation_steps):
            counts, batch = next(prefetcher)
            self.clock.lap("data")
            # DeepSpeed averages gradients over ranks and sums them over micro-batches: with this weight their sum is that of the mean
            # over all trained tokens of the step.
            part = self.engine(batch, self.ranks.size / counts.trained_tokens, self.ranks.size / counts.useful_tokens)
            self.clock.lap("forward")
            self.engine.backward(part, scale_wrt_gas=False)
            self.clock.lap("backward")
            self.engine.step()
            self.clock.lap("optimizer")
            loss += part.detach()
            if (balance := self.engine.module.last_router_loss) is not None:
                router_loss = balance if router_loss is None else router_loss + balance
        self._count(number, counts)
        if router_loss is not None:
            loss -= self.spec.train.router_loss_coefficient * router_loss
        return Step(number, counts, rate, loss, self.clock.end_step(), router_loss)

    def log(self, step: Step) -> None:
        """Write the step's record. Raises NonFiniteError; TrainingError when random weights start where they cannot."""
        cost = superoffload.stats(self.engine)
        engine_stats = EngineStats(superoffload.gradient_norm(self.engine), cost.adam_busy_s, cost.exposed_in_forward_s)
        record = self.metrics.log(step, engine_stats)
        self.last_loss = record.loss
        if self.ranks.first:
            print(_line(record, self.total_steps), flush=True)
        if step.number == 1 and self.expected_first_loss is not None:
            self._check_first_loss(record.loss, self.expected_first_loss)

    def evaluate(self) -> None:
        """Measure the loss on what is not trained on, where there is any. Raises NonFiniteError."""
        if self.evaluation is None:
            return
        self.metrics.check()
        self._phase("training", f"evaluating on {self.evaluation.documents} documents")
        record = self.evaluation.measure(self.engine.module, self.ranks, attempt=self.recorder.attempt, step=self.step)
        self.recorder.write(record)
        if self.ranks.first:
            print(f"step {record.step}/{self.total_steps}  evaluation loss {record.loss:.4f}", flush=True)
        self._phase("training", "")
        self._leave_out()

    def save(self) -> None:
        """Write a checkpoint of the last step, unless there is one. Raises NonFiniteError: spoilt weights are never saved."""
        if self.saved_step == self.step:
            return
        self.metrics.check()
        self._phase("saving", f"checkpoint of step {self.step}")
        manifest = Manifest(
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
        folder = checkpoint.folder_of(self.run, self.spec)
        record = checkpoint.save(self.engine, manifest, folder, self.ranks, self.recorder.attempt)
        self.recorder.write(record)
        self.saved_step, self.saved = self.step, record.path
        if self.step < self.total_steps:
            self._phase("training", "")
        self._leave_out()

    def _leave_out(self) -> None:
        """What happened since the last step is no part of the next one."""
        self.clock.restart()
        superoffload.leave_out_waits(self.engine)

    def _count(self, number: int, counts: StepCounts) -> None:
        self.step = number
        self.useful_tokens += counts.useful_tokens
        self.trained_tokens += counts.trained_tokens

    def _phase(self, phase: Literal["training", "saving"], detail: str) -> None:
        self.recorder.write(PhaseRecord(attempt=self.recorder.attempt, time=time.time(), phase=phase, detail=detail))

    def _check_first_loss(self, loss: float, expected: float) -> None:
        """Weights that were left uninitialised train for hours before anyone notices; they show in the first loss."""
        message = f"the first loss is {loss:.2f}, where random weights of this shape give about {expected:.2f}"
        if abs(loss - expected) > _WRONG_FIRST_LOSS:
            raise TrainingError(f"{message}: they are not initialised rightly", "Check `[model.config]` against the model's config.json.")
        if abs(loss - expected) > _ODD_FIRST_LOSS:
            self.recorder.write(WarningRecord(attempt=self.recorder.attempt, time=time.time(), message=message))


def _line(record: StepRecord, total_steps: int) -> str:
    norm = "" if record.gradient_norm is None else f"  gradient norm {record.gradient_norm:.3g}"
    speed = f"{record.useful_tokens_per_s_total:,.0f} tokens/s  {record.model_tflops_per_gpu:.4g} TFLOPS/GPU  {record.step_s:.3f} s"
    return f"step {record.step}/{total_steps}  loss {record.loss:.4f}{norm}  {speed}"
