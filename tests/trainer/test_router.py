"""The load-balancing loss is transformers' own, blind to packing, and exact through ZeRO-3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from so_tui.runs.records import StepRecord
from so_tui.spec import ModelSpec, RunSpec, load_catalog
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.model import checkpointing
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.experts import RouterLoss
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.tools.presets import parameter_table
from tests.support import models
from tests.support.documents import documents, ids_of, spec
from tests.support.launching import log, of_kind, tiny, train
from tests.support.models import another, causal_model, gradients_of
from tests.support.problems import rejected

SMALL: dict[str, Any] = {
    key: value for key, value in models.SMALL.items() if key not in ("rope_scaling", "layer_types")
} | {"num_hidden_layers": 3, "sliding_window": 128, "vocab_size": 2048}


def built(config: dict[str, Any]) -> PreTrainedModel:
    """Return a model whose routers choose."""
    torch.manual_seed(0)
    shape = load_config(ModelSpec(id="m", weights="random", config=config))
    causal = causal_model(shape, dtype=torch.float32, attention="eager")
    for parameter in causal.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return causal


REFERENCE: Any = load_balancing_loss_func
"""transformers', whose annotation allows one layer only."""


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_router_loss_is_that_of_transformers(name: str, policy: checkpointing.Policy) -> None:
    full = load_catalog().presets[name].spec.model.config
    left_out = ("rope_scaling", "rope_parameters", "layer_types")
    causal = built({key: SMALL.get(key, full[key]) for key in full if key not in left_out})
    docs = documents(30)
    batches = Batches(docs, spec(data__sequence_length="100"), 0)
    batch = next(batches.micro_batches(1))
    assert not batch.real.all()  # padding
    alone: list[list[Tensor]] = []
    for index in batches._indices(0, 2):
        for document in batches.sequences.of(int(index)):
            ids = ids_of(docs, document)
            alone.append(list(causal.model(input_ids=ids, output_router_logits=True).router_logits))
    by_layer = tuple(
        torch.cat([logits[layer].reshape(-1, 4) for logits in alone]) for layer in range(3)
    )
    expected: Tensor = REFERENCE(by_layer, 4, 2)
    torch.autograd.backward(expected)
    wanted = gradients_of(causal)
    causal.zero_grad()

    checkpointing.install(causal, policy)
    causal.train()
    model = TrainedModel(causal, "eager", RouterLoss(causal, 0.5))
    tokens = int(batch.real.sum())
    plain = model(batch, 1 / len(batch.targets))
    torch.autograd.backward(plain)
    language = gradients_of(causal)
    causal.zero_grad()
    total = model(batch, 1 / len(batch.targets), 1 / tokens)
    assert model.last_router_loss is not None
    torch.testing.assert_close(model.last_router_loss, expected.detach())
    torch.testing.assert_close(total, plain + 0.5 * expected)
    torch.autograd.backward(total)
    for key, gradient in gradients_of(causal).items():
        torch.testing.assert_close(
            gradient, language[key] + 0.5 * wanted.get(key, 0.0), rtol=1e-4, atol=1e-6, msg=key
        )


def test_router_loss_finds_logits_that_come_second() -> None:
    """Llama 4's returns the scores of the chosen experts first."""
    causal: Any = built(another("llama4_text").config)
    router, ids = RouterLoss(causal, 0.5), torch.arange(5, 45)[None]
    with torch.no_grad(), router.watching() as logits:
        output = causal.model(input_ids=ids, output_router_logits=True)
    layers = tuple(layer.reshape(-1, 4) for layer in output.router_logits)
    found = router(logits, torch.ones(1, 40, dtype=torch.bool)) / 40
    torch.testing.assert_close(found, REFERENCE(layers, 4, 1))


def test_models_without_experts_or_with_odd_routers_are_refused() -> None:
    """JetMoE's are recorded in several ways, and HunYuan's may choose another number each."""
    with rejected("no-experts"):
        tiny(train__router_loss_coefficient="0.001")
    names = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "sliding_window")
    shape = {key: value for key, value in SMALL.items() if key not in names}
    hunyuan = shape | {"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2, 2]}
    for config in (tiny().model.config, another("jetmoe").config, hunyuan):
        causal = built(config)
        with rejected("model-without-routers"):
            RouterLoss(causal, 0.001)


def small_mixture(**changes: str) -> RunSpec:
    names = ("sliding_window", "num_local_experts", "pad_token_id", "bos_token_id", "eos_token_id")
    config = {"model_type": "qwen3_moe", "norm_topk_prob": True}
    config |= {key: value for key, value in SMALL.items() if key not in names}
    spec = tiny(model__leaf_modules='["Qwen3MoeSparseMoeBlock"]', **changes)
    model = replace(spec.model, config=config)
    return replace(spec, model=replace(model, parameters=parameter_table(model)))


@pytest.mark.slow
def test_a_mixture_trains_with_its_router_loss_recorded(tmp_path: Path) -> None:
    spec = small_mixture(train__steps="4", gpus="1", checkpoint__at_end="false")
    run, code = train(spec.changed("train", router_loss_coefficient=0.1), tmp_path)
    assert code == 0, log(run)
    steps = of_kind(run, StepRecord)
    assert len(steps) == 4
    assert all(step.router_loss is not None and 1.9 < step.router_loss < 4 for step in steps)
