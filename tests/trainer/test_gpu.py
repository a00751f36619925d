"""Tests that need a CUDA device: variable-length kernels, and training in each mode."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from so_tui.model.flops import loss_bytes
from so_tui.runs.records import EndRecord, StepRecord
from so_tui_trainer.data.batches import Batches, Prefetcher
from so_tui_trainer.model import attention
from so_tui_trainer.model.config import disable_dropout, load_config
from so_tui_trainer.model.loss import HeadLoss
from so_tui_trainer.model.trained import TrainedModel
from tests.support.attention import backends
from tests.support.documents import documents, spec
from tests.support.launching import log, of_kind, records, tiny, train
from tests.support.models import (
    ONE_OF_EACH,
    SMALL,
    causal_model,
    grad_of,
    gradients_of,
    scaled_down,
)
from tests.support.shared_run import PARTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_packed_gradients_are_the_same_in_every_kernel(kind: str) -> None:
    """bf16, against eager attention; every token meets every expert, as choices hang on a bit."""
    torch.manual_seed(0)
    config = load_config(scaled_down(ONE_OF_EACH[kind]))
    config.num_experts_per_tok = SMALL["num_experts"]
    disable_dropout(config)
    causal: Any = causal_model(config, dtype=torch.bfloat16, attention="eager")
    causal.cuda()
    batches = Batches(documents(), spec(data__sequence_length="128"), 0)
    batch = next(batches.micro_batches(1)).to(torch.device("cuda"))
    results = []
    for each in (None, *backends().values()):
        implementation = attention.register(each) if each else "eager"
        causal.set_attn_implementation(implementation)
        causal.zero_grad()
        loss = TrainedModel(causal, implementation)(batch, 1 / len(batch.targets))
        torch.autograd.backward(loss)
        results.append((loss.item(), gradients_of(causal)))
    (expected, gradients), *others = results
    for loss, found in others:
        assert loss == pytest.approx(expected, rel=2e-3)
        for name, gradient in gradients.items():
            error = (found[name].float() - gradient.float()).norm()
            assert error < 0.06 * gradient.float().norm() + 1e-5, name


def test_the_loss_takes_the_memory_of_the_plan_on_a_gpu() -> None:
    tokens, vocabulary, size = 16_384, 151_936, 2560
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, size, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = nn.Parameter(0.02 * torch.randn(vocabulary, size, dtype=torch.bfloat16, device="cuda"))
    predictors, targets = (
        torch.arange(tokens, device="cuda"),
        torch.randint(vocabulary, (tokens,), device="cuda"),
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.backward(HeadLoss(weight)(hidden, predictors, targets, 1 / tokens))
    beyond = torch.cuda.max_memory_allocated() - before - 2 * weight.numel()
    vectors = 64 * 8 * tokens
    assert beyond < 2 * 2**30
    assert beyond <= loss_bytes(tokens, vocabulary, size) + vectors
    with torch.no_grad():
        rows = slice(0, 64)
        logits = hidden[0, rows].double() @ weight.double().t()
        expected = torch.nn.functional.cross_entropy(logits, targets[rows])
        found = HeadLoss(weight)(hidden, predictors[rows], targets[rows], 1 / 64)
    assert found.item() == pytest.approx(expected.item(), rel=2e-3)
    assert torch.isfinite(grad_of(weight)).all()


def test_micro_batches_come_whole_and_without_a_wait_for_the_gpu() -> None:
    device = torch.device("cuda", 0)
    batches = Batches(documents(200), spec(data__sequence_length="4096"), 0, pin=True)
    expected = [batch for step in range(1, 6) for batch in batches.micro_batches(step)]
    weight = torch.randn(4096, 4096, device=device)
    found = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with closing(Prefetcher(batches.iterate(1, 5), device)) as prefetcher:
            for batch in prefetcher:
                # The GPU is far behind, and memory of earlier batches is used again meanwhile.
                for _ in range(20):
                    weight = weight @ weight / 64
                found.append([tensor.clone() for tensor in batch.tensors])
                del batch
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) == len(expected) == 15
    for copies, batch in zip(found, expected, strict=True):
        assert all(map(torch.equal, (copy.cpu() for copy in copies), batch.tensors))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gpu", "zerooffload", "superoffload"])
def test_each_mode_trains_saves_and_exports(tmp_path: Path, mode: str) -> None:
    run, code = train(
        tiny(offload__mode=mode, gpus="1", train__steps="20", checkpoint__export="true"), tmp_path
    )
    assert code == 0, log(run)
    found = records(run)
    steps = of_kind(found, StepRecord)
    guessing = math.log(tiny().model.config["vocab_size"])
    assert steps[0].loss == pytest.approx(guessing, abs=0.2)
    assert steps[-1].loss < steps[0].loss - 1
    for step in steps:
        assert sum(getattr(step, part) for part in PARTS) == pytest.approx(step.step_s, rel=0.02)
        assert step.gpu_memory_peak_bytes
    assert isinstance(found[-1], EndRecord)
    assert found[-1].state == "finished"
    AutoModelForCausalLM.from_pretrained(run.path / "export")
