"""One rank of one attempt, from its plan to its last record."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers.masking_utils  # noqa: F401 -- imports torch's compiler, which every model needs: no later stage shall look slow for it

import superoffload.api
from so_tui.model.flops import peak_flops
from so_tui.plan.types import Plan
from so_tui.runs import MetricsWriter, RunDirectory
from so_tui.runs import control as run_control
from so_tui.runs.checkpoints import checkpoints_folder
from so_tui.runs.records import (
    ENDING,
    BindingRecord,
    EndRecord,
    PhaseRecord,
    RankBindingReport,
    ResumedRecord,
    StartRecord,
    WarningRecord,
)
from so_tui.spec import RunSpec
from so_tui.units import memory_size, thousands
from so_tui_trainer import (
    binding,
    checkpoint,
    collection,
    failures,
    network_rate,
    resuming,
    signals,
    training_data,
)
from so_tui_trainer.control import Control, StoppedEarlyError
from so_tui_trainer.engine_settings import engine_settings
from so_tui_trainer.failures import SUPERSEDED, Failure, TrainingError
from so_tui_trainer.loop import Loop, Outcome
from so_tui_trainer.metrics import Metrics
from so_tui_trainer.model.attention import takes_boundaries
from so_tui_trainer.model.build import build
from so_tui_trainer.model.logits import expected_first_loss
from so_tui_trainer.model.trained import parameter_count, parameter_groups
from so_tui_trainer.prompts import Prompts
from so_tui_trainer.ranks import Ranks, join
from so_tui_trainer.recorder import Recorder
from so_tui_trainer.trackers import trackers_of
from superoffload.settings import Settings

LoadStage = Literal["ranks", "data", "weights", "optimizer", "checkpoint"]


def train(
    run: RunDirectory,
    attempt: int,
    plan: Plan,
    report: RankBindingReport,
    writer: MetricsWriter | None,
    *,
    start_over: bool = False,
) -> int:
    """Load, train, save, and write the end record.

    Args:
        run: The run.
        attempt: The attempt.
        plan: The attempt's plan.
        report: This rank's binding.
        writer: Writes the run's records; None on other ranks than the first.
        start_over: Train from step 0, whatever the run saved before.

    Returns:
        0 if the run did what was requested. After a failure the process exits with 1.
    """
    session = Session(run, attempt, plan, report, writer, start_over=start_over)
    session.install_signal_handlers()
    try:
        session.finish(session.train())
    except Exception as error:  # noqa: BLE001 -- every error of a rank becomes the run's last record, and its exit code
        traceback.print_exc()
        session.fail(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by return: the destructors of NCCL and CUDA may wait for a lost rank. Adam workers die with this process.
        os._exit(1)
    if session.recorder.hanging:
        os._exit(0)  # Not by return: an exit handler of the tracker would wait for its server.
    return 0


class Session:
    """Everything that must be reported or closed, however the attempt ends."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        plan: Plan,
        report: RankBindingReport,
        writer: MetricsWriter | None,
        *,
        start_over: bool,
    ) -> None:
        self.run, self.attempt, self.plan, self.report = run, attempt, plan, report
        self.start_over = start_over
        self.spec: RunSpec = plan.spec
        self.rank = report.rank
        self.recorder = Recorder(writer, attempt, trackers_of(run, plan.spec) if writer else ())
        self.engine: Any = None
        self.loop: Loop | None = None

    def train(self) -> Outcome:
        """Run the attempt.

        Raises:
            Exception: Whatever goes wrong; ``fail`` explains it.
        """
        # DeepSpeed uses a deprecated name of torch.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        self._load_stage("ranks", "starting the ranks")
        ranks = join(use_gpu=self.plan.binding[0].gpu is not None)
        bindings = ranks.all_gather(self.report, RankBindingReport)
        self.recorder.write(
            BindingRecord(attempt=self.attempt, time=time.time(), ranks=tuple(bindings))
        )
        if self.spec.nodes > 1:
            network_rate.record(ranks, self.run, self.attempt, self.spec.nodes)
        newest = (
            resuming.newest(self.run, self.spec, self._warn, start_over=self.start_over)
            if ranks.first
            else None
        )
        found = ranks.broadcast(newest, checkpoint.Found | None)
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
        collection.freeze()
        self._phase("training", "")
        outcome = loop.train(control)
        if self.spec.checkpoint.export and outcome.state == "finished":
            self._export(ranks, outcome)
        return outcome

    def finish(self, outcome: Outcome) -> None:
        """Close everything, then write the end record, which must be the last thing that is written."""
        ending = "releasing memory and ending the processes"
        self.recorder.write(
            PhaseRecord(
                attempt=self.attempt, time=time.time(), phase="saving", detail=ending, stage=ENDING
            )
        )
        self._close()
        self.recorder.end_tracking()
        code, reason = ("", "") if outcome.state == "finished" else self._stop_reason()
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

    def _stop_reason(self) -> tuple[str, str]:
        """Return the code and the words for a requested stop."""
        request = run_control.details(self.run, "stop")
        cause = f" ({request.reason})" if request and request.reason else ""
        if self.loop is None:
            return "stopped-while-loading", f"stopped on request{cause} while it was loading"
        return "stopped", f"stopped on request{cause}"

    def fail(self, error: Exception) -> None:
        """Report a failure to the other ranks and the run. Closes nothing that would wait for a lost rank."""
        if isinstance(error, TrainingError) and error.code == SUPERSEDED:
            print(error, file=sys.stderr)
            return
        step = self.loop.step if self.loop else 0
        failure = failures.explain(error, self.spec, self.rank, step, self.plan.given_memory)
        try:
            failures.report(failure, self.run, self.attempt)
            self._write_failure()
        except OSError as write_error:  # A full disk, say. The log may still have space.
            print(
                f"{failure.reason}. {failure.suggestion} (cannot be recorded: {write_error})",
                file=sys.stderr,
            )

    def install_signal_handlers(self) -> None:
        """On USR1 request a stop with a checkpoint; on TERM write why the run failed, if it did."""
        signals.install_handlers(self._request_stop, self._write_failure)

    def _request_stop(self) -> None:
        try:
            run_control.request(
                self.run, "stop", reason=f"rank {self.rank} received SIGUSR1", warned=True
            )
        except OSError as error:  # The supervisor and the other ranks receive the signal too.
            print(f"the stop request cannot be written: {error}", file=sys.stderr, flush=True)

    def _load(self, ranks: Ranks, found: checkpoint.Found | None, control: Control) -> Loop:
        """Do everything that precedes the first step; with large models each part takes minutes.

        Raises:
            StoppedEarlyError: A stop was requested meanwhile.
        """
        self._seed(0)
        control.stop_early()
        self._load_stage("data", "reading the data")
        data = training_data.read(
            self.spec, ranks, lambda doing: self._load_stage("data", doing), self._warn
        )
        control.stop_early()
        loop = self._loop(ranks, data, control, found)
        control.stop_early()
        if self.spec.checkpoint.saves:
            checkpoint.make_room(
                self.engine, checkpoints_folder(self.run, self.spec), self.spec, ranks
            )
        if found:
            self._load_stage("checkpoint", f"resuming from step {thousands(found.manifest.step)}")
            resuming.restore(found, self.engine, self.spec, data.fingerprint, ranks, self._warn)
            loop.resume(str(found.path), found.manifest)
            control.stop_early()
        return loop

    def _loop(
        self,
        ranks: Ranks,
        data: training_data.TrainingData,
        control: Control,
        found: checkpoint.Found | None,
    ) -> Loop:
        loading = f"loading {self.spec.label}"
        self._load_stage("weights", loading)
        ds_config = json.loads(self.run.ds_config_path(self.attempt).read_text())
        model = build(
            self.spec,
            ranks.device,
            ds_config,
            lambda done, total: self._load_stage("weights", loading, done, total),
        )
        if takes_boundaries(model.attention):
            data.lay_end_to_end()
        training_data.check_sizes(model.causal.config, data.documents, self.spec, self._warn)
        parameters = parameter_count(model)
        control.stop_early()
        self._load_stage("optimizer", "preparing the optimizer")
        mine = binding.of_rank(self.plan.binding, self.rank)
        settings = engine_settings(self.spec, mine, self.plan.optional)
        self._warn_of_less_memory(settings)
        self.engine, *_ = superoffload.initialize(
            model, parameter_groups(model, self.spec), settings, ds_config
        )
        binding.apply_main_cores(mine)
        self._seed(self.rank)
        if found:
            data.batches.resume_at(found.manifest.step, found.manifest.consumed_sequences)
        metrics = Metrics(self.spec, ranks, self.recorder, parameters)
        self._start_record(ranks, data.batches.total_steps(), parameters)
        expected = (
            expected_first_loss(model.causal.config)
            if self.spec.model.weights == "random"
            else None
        )
        return Loop(
            self.run,
            self.plan,
            self.engine,
            data.batches,
            data.fingerprint,
            metrics,
            self.recorder,
            ranks,
            evaluation=data.evaluation,
            prompts=Prompts(self.spec, ranks, end_to_end=takes_boundaries(model.attention))
            if self.spec.prompts.texts
            else None,
            expected_first_loss=expected,
        )

    def _warn_of_less_memory(self, settings: Settings) -> None:
        planned = self.plan.optional
        because = "because this host has no more memory available"
        if settings.speculation_bytes < planned.second_states_bytes:
            found, wanted = (
                memory_size(settings.speculation_bytes),
                memory_size(planned.second_states_bytes),
            )
            self._warn(
                "second-states-reduced",
                f"clipping: second states get {found} of the planned {wanted}, {because}",
                "Results stay the same, but more of Adam waits for the gradient norm. Free the memory and resume, or go on as it is.",
            )
        if settings.copies_bytes < planned.copies_bytes:
            found, wanted = memory_size(settings.copies_bytes), memory_size(planned.copies_bytes)
            self._warn(
                "copies-reduced",
                f"checkpoints: copies of states get {found} of the planned {wanted}, {because}",
                "Checkpoints stay the same, but training waits for more of each. Free the memory and resume, or go on as it is.",
            )

    def _start_record(self, ranks: Ranks, total_steps: int, parameters: int) -> None:
        hostnames = tuple(dict.fromkeys(ranks.all_gather(socket.gethostname(), str)))
        cuda = ranks.device.type == "cuda"
        device_name = torch.cuda.get_device_name(ranks.device) if cuda else ""
        peak = peak_flops(device_name) if cuda else None
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
                device_name=device_name,
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

        self._phase("saving", "Hugging Face folder")
        if ranks.first:
            export(Path(outcome.saved), self.run.path / "export", self.run.name, self.spec)
        ranks.barrier()

    def _phase(self, phase: Literal["training", "saving"], detail: str) -> None:
        self.recorder.write(
            PhaseRecord(attempt=self.attempt, time=time.time(), phase=phase, detail=detail)
        )

    def _load_stage(self, stage: LoadStage, detail: str, done: int = 0, total: int = 0) -> None:
        record = PhaseRecord(
            attempt=self.attempt,
            time=time.time(),
            phase="loading",
            detail=detail,
            stage=stage,
            done=done,
            total=total,
        )
        self.recorder.write(record)

    def _warn(self, code: str, message: str, suggestion: str) -> None:
        record = WarningRecord(
            attempt=self.attempt,
            time=time.time(),
            code=code,
            message=message,
            suggestion=suggestion,
        )
        self.recorder.write(record)

    def _write_failure(self) -> None:
        """Write the end record on rank 0, from the failure that was reported first. Does nothing if no rank failed."""
        failure: Failure | None = failures.reported(self.run, self.attempt, self.plan.gpus)
        if failure is None or self.rank != 0:
            return
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

    def _close(self) -> None:
        if self.engine is not None:
            superoffload.close(self.engine)
        dist.barrier()
        dist.destroy_process_group()
