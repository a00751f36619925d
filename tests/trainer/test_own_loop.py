"""A user's own loop with transformers' loss has the losses of the trainer."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from so_tui.runs import create_run
from so_tui.runs.records import EndRecord, StepRecord
from so_tui.spec import RunSpec
from tests.support.launching import log, of_kind, records, start, tiny

STEPS = 8


def loop(spec: RunSpec, model_folder: Path) -> list[float]:
    """Train as a script that knows no plan or run; the trainer says which rows come when."""
    import torch
    from transformers import AutoModelForCausalLM

    import superoffload
    from benchmarks.comparison.packed import labels
    from examples.own_loop import ds_config, join_process_group
    from so_tui_trainer.data import documents, tokens
    from so_tui_trainer.data.batches import Batches

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


@pytest.mark.slow
def test_an_outsiders_loop_has_the_losses_of_the_trainer(tmp_path: Path) -> None:
    """The trainer's run is a benchmark: a warm-up step, and a summary of the others."""
    import torch

    from so_tui_trainer.model.config import load_config
    from tests.support.models import causal_model

    torch.manual_seed(0)
    model = causal_model(load_config(tiny().model), torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    weights = {
        "model__id": str(tmp_path / "model"),
        "model__weights": "pretrained",
        "model__tokenizer": "builtin:tiny",
    }
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
