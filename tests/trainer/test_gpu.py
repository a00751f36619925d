"""What only a CUDA device can show: the variable-length kernels, and training in each offload mode."""

from pathlib import Path

import pytest
import torch
from launching import log, records, tiny, train
from test_batches import documents, spec
from transformers import AutoModelForCausalLM

from so_tui.runs.records import EndRecord, StepRecord
from so_tui_trainer import attention
from so_tui_trainer.batches import Batches
from so_tui_trainer.model import TrainedModel, expected_first_loss, load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("window", [None, 16])
def test_the_varlen_kernel_gives_what_masked_attention_gives(window: int | None) -> None:
    torch.manual_seed(0)
    config = load_config(tiny().model)
    if window:
        config.use_sliding_window, config.sliding_window, config.layer_types = True, window, ["sliding_attention", "full_attention"] * 3
    device = torch.device("cuda")
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").to(device)
    batch = next(Batches(documents(), spec(data__sequence_length="128"), 0).micro_batches(1)).to(device)
    results = []
    for implementation in ("eager", "sdpa", attention.choose(tiny().model, True, device)):
        causal.set_attn_implementation(implementation)
        model = TrainedModel(causal, implementation)
        model.zero_grad()
        loss = model(batch, 1 / len(batch.targets))
        loss.backward()
        results.append((loss.item(), {name: parameter.grad.float().clone() for name, parameter in causal.named_parameters()}))
    (expected, gradients), *others = results
    for loss, found in others:
        assert loss == pytest.approx(expected, rel=2e-3)
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gpu", "zerooffload", "superoffload"])
def test_each_mode_trains_saves_and_exports(tmp_path: Path, mode: str) -> None:
    run, code = train(tiny(offload__mode=mode, gpus="1", train__steps="20", checkpoint__export="true"), tmp_path)
    assert code == 0, log(run)
    found = records(run)
    steps = [record for record in found if isinstance(record, StepRecord)]
    assert steps[0].loss == pytest.approx(expected_first_loss(load_config(tiny().model)), abs=0.2)
    assert steps[-1].loss < steps[0].loss - 1
    for step in steps:
        parts = step.data_s + step.forward_s + step.backward_s + step.exposed_optimizer_s + step.other_s
        assert parts == pytest.approx(step.step_s, rel=0.02)
        assert step.gpu_memory_peak_bytes
    assert isinstance(found[-1], EndRecord)
    assert found[-1].state == "finished"
    AutoModelForCausalLM.from_pretrained(run.path / "export")
