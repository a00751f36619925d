"""Real runs of the tiny preset through DeepSpeed's launcher, on the CPU."""

import json
import math
import os
import shutil
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.comparison.packed import labels
from so_tui.runs import RunDirectory, create_run, state
from so_tui.runs.records import (
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    PhaseRecord,
    ResumedRecord,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.runs.results import read_answers
from so_tui.spec import RunSpec
from so_tui_trainer.data import documents, tokens
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.model.config import load_config
from tests.support.launching import log, of_kind, records, start, tiny, train
from tests.support.models import causal_model
from tests.support.shared_run import PARTS, SUPEROFFLOAD, TWELVE_STEPS

pytestmark = pytest.mark.slow
PRETRAINED = {"model__weights": "pretrained", "model__tokenizer": "builtin:tiny"}


def steps_of(found: list[MetricRecord]) -> list[StepRecord]:
    return of_kind(found, StepRecord)


def end_of(found: list[MetricRecord]) -> EndRecord:
    last = found[-1]
    assert isinstance(last, EndRecord)
    return last


def test_a_run_records_its_start_its_steps_and_last_its_end(finished_run: RunDirectory) -> None:
    found = records(finished_run)
    begin, binding = of_kind(found, StartRecord)[0], of_kind(found, BindingRecord)[0]
    parameters = tiny().model.parameter_count
    assert (begin.ranks, begin.total_steps, begin.parameters) == (2, 12, parameters)
    assert [rank.rank for rank in binding.ranks] == [0, 1]
    assert all(rank.cpus and not rank.problem for rank in binding.ranks)
    assert [record.phase for record in of_kind(found, PhaseRecord)][-1] == "saving"
    assert [record.step for record in steps_of(found)] == list(range(1, 13))
    end = end_of(found)
    assert (end.state, end.step, Path(end.saved).name) == ("finished", 12, "step-000012")


def test_figures_of_steps_agree_and_the_loss_falls(finished_run: RunDirectory) -> None:
    steps = steps_of(records(finished_run))
    guessing = math.log(tiny().model.config["vocab_size"])
    assert steps[0].loss == pytest.approx(guessing, abs=0.2)
    assert steps[-1].loss < steps[0].loss - 1
    for step in steps:
        assert sum(getattr(step, part) for part in PARTS) == pytest.approx(step.step_s, rel=0.02)
        assert step.useful_tokens_per_s_total == pytest.approx(step.useful_tokens / step.step_s)
        assert 0 < step.trained_tokens < step.useful_tokens <= 2048
        assert 0 < step.model_tflops_per_gpu < step.hw_tflops_per_gpu
        assert (step.gradient_norm or 0) > 0
        assert step.host_memory_bytes is not None
        assert step.gpu_memory_peak_bytes is None


def test_training_goes_on_from_exported_weights(finished_run: RunDirectory, tmp_path: Path) -> None:
    """The weights come from the hub's cache, on a node without a network."""
    cached = tmp_path / "hub" / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123")
    shutil.copytree(finished_run.path / "export", cached / "snapshots" / "0123")
    model = PRETRAINED | {"model__id": "someone/tiny", "model__tokenizer": "someone/tiny"}
    training = {"gpus": "1", "train__steps": "2", "train__learning_rate": "1e-4"}
    training |= {"checkpoint__at_end": "false", "data__held_out": "0.1"}
    spec = tiny(**model, **training)
    run = create_run(spec, tmp_path / "runs")
    cut_off = {
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    assert start(run, spec, cut_off).wait(timeout=400) == 0, log(run)
    assert "Retrying" not in log(run)
    learned = steps_of(records(finished_run))
    assert steps_of(records(run))[0].loss == pytest.approx(learned[-1].loss, abs=0.7)
    assert steps_of(records(run))[0].loss < learned[0].loss - 1
    before, after = of_kind(run, EvaluationRecord)
    assert (before.step, after.step) == (0, 2)
    assert before.loss == pytest.approx(learned[-1].loss, abs=0.7)
    assert after.loss < before.loss


def test_a_resumed_run_trains_as_if_never_stopped(
    finished_run: RunDirectory, tmp_path: Path
) -> None:
    """Evaluating changes nothing either, though weights arrive while the next forward runs."""
    spec = tiny(**TWELVE_STEPS, **SUPEROFFLOAD, train__evaluate_every_steps="5")
    run = create_run(spec, tmp_path)
    process = start(run, spec)
    while not any(isinstance(record, StepRecord) and record.step >= 3 for record in records(run)):
        assert process.poll() is None, log(run)
        time.sleep(0.05)
    # A scheduler's warning is a request like any other.
    binding = of_kind(run, BindingRecord)[0]
    os.kill(binding.ranks[1].pid, signal.SIGUSR1)
    assert process.wait(timeout=120) == 0, log(run)
    asked = state.details(run, "stop")
    assert asked is not None
    assert asked.reason == "rank 1 received SIGUSR1"
    end = end_of(records(run))
    assert (end.state, end.code) == ("stopped", "stopped")
    assert "rank 1 received SIGUSR1" in end.reason
    assert 3 < end.step < 12
    assert Path(end.saved).is_dir()
    # The request still stands for another attempt: it ends where it would go on, and the checkpoint
    # is not written again.
    assert start(run, spec).wait(timeout=120) == 0, log(run, 2)
    early = end_of(records(run))
    assert (early.attempt, early.state) == (2, "stopped")
    assert (early.step, early.saved) == (end.step, end.saved)
    second = [record for record in records(run) if record.attempt == 2]
    assert not of_kind(second, StepRecord) + of_kind(second, CheckpointRecord)
    state.clear(run, "stop")
    assert start(run, spec).wait(timeout=300) == 0, log(run, 3)
    third = [record for record in records(run) if record.attempt == 3]
    assert of_kind(third, ResumedRecord)[0].step == end.step
    assert [record.step for record in steps_of(third)] == list(range(end.step + 1, 13))
    straight, stopped = (
        {record.step: (record.loss, record.gradient_norm) for record in steps_of(records(each))}
        for each in (finished_run, run)
    )
    assert stopped == straight
    at_end, often = (
        {record.step: record.loss for record in of_kind(each, EvaluationRecord)}
        for each in (finished_run, run)
    )
    assert set(at_end) == {12}
    assert set(often) == {5, 10, 12} - {end.step}  # not where a stop was requested
    assert often[12] == at_end[12]


def test_one_rank_goes_on_for_two(finished_run: RunDirectory, tmp_path: Path) -> None:
    """One rank trains the sequences of two, from the newest readable checkpoint."""
    spec = tiny(
        **TWELVE_STEPS, gpus="1", train__gradient_accumulation="2", offload__mode="zerooffload"
    )
    run = create_run(spec, tmp_path)
    shutil.copytree(finished_run.checkpoints_dir, run.checkpoints_dir)
    # The checkpoints of another run would be refused.
    shutil.copyfile(finished_run.manifest_path, run.manifest_path)
    states = run.checkpoints_dir / "step-000012" / "optimizer" / "rank_00001.states"
    states.write_bytes(states.read_bytes()[:-100])
    assert start(run, spec).wait(timeout=300) == 0, log(run)
    found = records(run)
    warning = of_kind(found, WarningRecord)[0]
    assert warning.code == "checkpoint-damaged"
    assert all(
        name in warning.message for name in ("step-000012", "rank_00001.states", "step-000010")
    )
    assert of_kind(found, ResumedRecord)[0].step == 10
    expected = [record for record in steps_of(records(finished_run)) if record.step > 10]
    for step, same in zip(steps_of(found), expected, strict=True):
        counts = step.step, step.useful_tokens, step.trained_tokens
        assert counts == (same.step, same.useful_tokens, same.trained_tokens)
        assert step.loss == pytest.approx(same.loss, rel=1e-2)
    first = steps_of(found)[0]
    assert first.loss == pytest.approx(expected[0].loss, rel=5e-3)
    assert first.gradient_norm == pytest.approx(expected[0].gradient_norm, rel=2e-2)
    left = sorted(path.name for path in run.checkpoints_dir.glob("step-*"))
    assert left == ["step-000010", "step-000012", "step-000012.damaged"]


def test_stopped_while_it_loads_it_trains_and_saves_nothing(tmp_path: Path) -> None:
    spec = tiny(train__steps="12", gpus="1")
    run = create_run(spec, tmp_path)
    process = start(run, spec)
    while not [
        record for record in of_kind(run, PhaseRecord) if record.detail == "preparing the optimizer"
    ]:
        assert process.poll() is None, log(run)
        time.sleep(0.02)
    state.request(run, "stop")
    assert process.wait(timeout=120) == 0, log(run)
    found = records(run)
    end = end_of(found)
    assert (end.state, end.code, end.step, end.saved) == ("stopped", "stopped-while-loading", 0, "")
    assert not of_kind(found, StepRecord) + of_kind(found, CheckpointRecord)
    assert not any(run.checkpoints_dir.glob("step-*"))


def test_a_step_that_is_not_finite_is_skipped_with_a_warning(tmp_path: Path) -> None:
    """The weights of a token that occurs in one row only are so large that its gradient is NaN."""
    causal = causal_model(load_config(tiny().model), dtype=torch.bfloat16)
    token = load_tokenizer(tiny().model).encode("~", add_special_tokens=False)[-1]
    causal.model.embed_tokens.weight.data[token] = 3e38
    causal.save_pretrained(tmp_path / "spoilt")
    rows = [
        {"instruction": f"Add {number} and {number}.", "input": "", "output": str(2 * number)}
        for number in range(12)
    ]
    rows[2]["instruction"] += " ~"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = {"data__source": str(tmp_path / "rows.json"), "data__format": "alpaca"}
    data |= {"data__packing": "false", "train__micro_batch": "2", "train__seed": "3"}
    training = {"train__steps": "6", "train__gradient_clipping": "1000", "gpus": "1"}
    model = {"model__id": str(tmp_path / "spoilt"), **PRETRAINED}
    run, code = train(tiny(**model, **data, **training), tmp_path / "runs")
    found = records(run)
    assert code == 0, log(run)
    skips = [record for record in of_kind(found, WarningRecord) if record.code == "step-skipped"]
    steps = steps_of(found)
    assert len(skips) == 1
    assert [record.skipped_steps for record in steps][-1] == 1
    assert len(steps) == 5
    assert (steps[-1].kept_steps, steps[-1].redone_steps) == (5, 0)
    end = end_of(found)
    assert (end.state, end.step, Path(end.saved).name) == ("finished", 6, "step-000006")


def test_a_gradient_that_is_not_finite_ends_a_run_without_skips(tmp_path: Path) -> None:
    """Its loss is finite: a huge product comes to nothing, until its input changes."""
    causal = causal_model(load_config(tiny().model), dtype=torch.bfloat16)
    layer = causal.model.layers[0]
    causal.model.embed_tokens.weight.data[:, 0] = layer.self_attn.o_proj.weight.data[0] = 0.0
    layer.mlp.up_proj.weight.data.zero_()[:, 0] = 1e30
    layer.mlp.down_proj.weight.data.zero_()
    causal.save_pretrained(tmp_path / "spoilt")
    model = {"model__id": str(tmp_path / "spoilt"), **PRETRAINED}
    often = {"train__steps": "5", "train__log_interval": "5", "offload__mode": "zerooffload"}
    run, code = train(tiny(gpus="1", **model, **often), tmp_path / "runs")
    end = end_of(records(run))
    assert (code, end.state, end.code, end.step) == (1, "failed", "not-finite", 2)
    assert end.saved == ""
    assert "learning_rate" in end.suggestion
    assert not any(run.checkpoints_dir.glob("step-*"))


def test_prompts_are_answered_before_during_and_after_training(finished_run: RunDirectory) -> None:
    asked = read_answers(finished_run).asked
    assert [each.step for each in asked] == [0, 5, 10, 12]
    for each in asked:
        prompts = [answer.prompt for answer in each.answers]
        assert prompts == ["Which process uses a port?", "Show the disks."]
        assert all(answer.stopped or answer.tokens == 12 for answer in each.answers)
    assert asked[0].answers != asked[-1].answers
    assert "'Show the disks.' -> " in log(finished_run)


STEPS = 8


def loop(spec: RunSpec, model_folder: Path) -> list[float]:
    """Train as a script that knows no plan or run; the trainer says which rows come when."""
    import superoffload
    from examples.own_loop import ds_config, join_process_group

    batches = Batches(documents.read(tokens.prepare(spec), spec.data), spec, rank=0)
    join_process_group(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    train = spec.train
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() >= 2) == matrices]}
        | {"weight_decay": train.weight_decay * matrices}
        for matrices in (True, False)
    ]
    shared = {name: getattr(train, name) for name in ("learning_rate", "beta1", "beta2", "epsilon")}
    settings = superoffload.Settings(**shared, ratio=0.7, speculation_bytes=1 << 40)
    config = ds_config("superoffload", train.gradient_clipping)
    config |= {"train_micro_batch_size_per_gpu": train.micro_batch}
    config |= {"gradient_accumulation_steps": 1}
    engine, *_ = superoffload.initialize(model, groups, settings, config)
    losses = []
    for step in range(1, STEPS + 1):
        (batch,) = batches.micro_batches(step)
        loss = engine(
            input_ids=batch.input_ids, attention_mask=batch.real.long(), labels=labels(batch)
        ).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    superoffload.close(engine)
    return losses


def test_an_outsiders_loop_has_the_losses_of_the_trainer(tmp_path: Path) -> None:
    """The trainer's run is a benchmark: a warm-up step, and a summary of the others."""
    model = causal_model(load_config(tiny().model), torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    weights = {"model__id": str(tmp_path / "model"), **PRETRAINED}
    training = {
        "benchmark__warmup_steps": "1",
        "benchmark__measured_steps": str(STEPS - 1),
        "train__schedule": "constant",
        "train__warmup_ratio": "0",
        "data__packing": "false",
        "checkpoint__at_end": "false",
    }
    spec = tiny(gpus="1", offload__mode="superoffload", **weights, **training)
    run = create_run(spec, tmp_path / "runs")
    assert start(run, spec).wait(timeout=400) == 0, log(run)
    *_, end = records(run)
    assert isinstance(end, EndRecord)
    assert (end.state, end.step, end.saved) == ("finished", STEPS, "")
    steps = of_kind(run, StepRecord)
    assert end.summary["measured_steps"] == STEPS - 1
    assert end.summary["step_s"] == pytest.approx(median(step.step_s for step in steps[1:]))
    trainers = [step.loss for step in steps]

    # In a process of its own, since a process group and DeepSpeed's accelerator are of a process.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        losses = process.submit(loop, spec, tmp_path / "model").result(timeout=300)
    assert losses == pytest.approx(trainers, rel=1e-3)
    assert trainers[-1] < 0.9 * trainers[0], "updates must show in the losses"
