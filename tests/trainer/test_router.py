"""The load-balancing loss is transformers' own, blind to packing, and exact through ZeRO-3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from so_tui.runs import create_run
from so_tui.runs.records import StepRecord
from so_tui.spec import ModelSpec, RunSpec, load_catalog
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.model import checkpointing
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.experts import RouterLoss
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.tools.presets import parameter_table
from tests.support import models
from tests.support.documents import documents, spec
from tests.support.launching import log, of_kind, start, tiny
from tests.support.models import another, causal_model, gradients_of
from tests.support.problems import refusal

SMALL: dict[str, Any] = {
    key: value for key, value in models.SMALL.items() if key not in ("rope_scaling", "layer_types")
} | {"num_hidden_layers": 3, "sliding_window": 128, "vocab_size": 2048}


def mixture(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    full = load_catalog().presets[name].spec.model
    shape = {
        key: SMALL.get(key, value)
        for key, value in full.config.items()
        if key not in ("rope_scaling", "rope_parameters")
    }
    shape.pop("layer_types", None)
    config = load_config(type(full)(id=full.id, weights="random", config=shape))
    causal = causal_model(config, dtype=torch.float32, attention="eager")
    for parameter in causal.parameters():  # routers that choose
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return causal


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_router_loss_is_that_of_transformers(name: str, policy: checkpointing.Policy) -> None:
    causal = mixture(name)
    docs = documents(30)
    batch = next(Batches(docs, spec(data__sequence_length="100"), 0).micro_batches(1))
    assert not batch.real.all()  # padding
    indices = Batches(docs, spec(data__sequence_length="100"), 0)._indices(0, 2)
    sequences = Batches(docs, spec(data__sequence_length="100"), 0).sequences
    alone: list[list[torch.Tensor]] = []
    for document in (document for index in indices for document in sequences.of(int(index))):
        ids = torch.tensor(
            docs.tokens[docs.offsets[document] : docs.offsets[document + 1]], dtype=torch.int64
        )[None]
        alone.append(list(causal.model(input_ids=ids, output_router_logits=True).router_logits))
    reference: Any = load_balancing_loss_func  # its annotation allows one layer only
    by_layer = tuple(
        torch.cat([logits[layer].reshape(-1, 4) for logits in alone]) for layer in range(3)
    )
    expected: torch.Tensor = reference(by_layer, 4, 2)
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
    torch.manual_seed(0)
    causal = causal_model(
        load_config(another("llama4_text")), dtype=torch.float32, attention="eager"
    )
    for parameter in causal.parameters():  # routers that choose
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    router = RouterLoss(causal, 0.5)
    with torch.no_grad(), router.watching() as logits:
        recorded = causal.get_submodule("model")(
            input_ids=torch.arange(5, 45)[None], output_router_logits=True
        ).router_logits
    reference: Any = load_balancing_loss_func
    expected = reference(tuple(layer.reshape(-1, 4) for layer in recorded), 4, 1)
    torch.testing.assert_close(router(logits, torch.ones(1, 40, dtype=torch.bool)) / 40, expected)


def test_a_model_without_experts_is_refused() -> None:
    assert refusal(lambda: tiny(train__router_loss_coefficient="0.001")).code == "no-experts"
    causal = causal_model(load_config(tiny().model))
    assert refusal(lambda: RouterLoss(causal, 0.001)).code == "model-without-routers"


def hunyuan(chosen: int | list[int]) -> PreTrainedModel:
    torch.manual_seed(0)
    names = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "sliding_window")
    shape = {key: value for key, value in SMALL.items() if key not in names} | {
        "model_type": "hunyuan_v1_moe",
        "moe_topk": chosen,
    }
    return causal_model(
        load_config(ModelSpec(id="h", weights="random", config=shape)),
        dtype=torch.float32,
        attention="eager",
    )


def test_experts_that_are_chosen_may_be_listed_layer_by_layer() -> None:
    """As in HunYuan, whose lists may have one value throughout."""
    found = []
    for causal in (hunyuan(2), hunyuan([2, 2, 2])):
        router = RouterLoss(causal, 0.5)
        with torch.no_grad(), router.watching() as logits:
            causal(input_ids=torch.arange(5, 45)[None])
        found.append(router(logits, torch.ones(1, 40, dtype=torch.bool)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[0] / 40 > 1.9
    assert refusal(lambda: RouterLoss(hunyuan([1, 2, 2]), 0.5)).code == "model-without-routers"


def test_routers_that_are_recorded_in_several_ways_are_refused() -> None:
    causal = causal_model(load_config(another("jetmoe")))
    assert refusal(lambda: RouterLoss(causal, 0.5)).code == "model-without-routers"


def small_mixture(**changes: str) -> RunSpec:
    shape = {
        "model__config": "{"
        + ", ".join(f"{key} = {_toml(value)}" for key, value in _config().items())
        + "}"
    }
    spec = tiny(**shape, model__leaf_modules='["Qwen3MoeSparseMoeBlock"]', **changes)
    return replace(spec, model=replace(spec.model, parameters=parameter_table(spec.model)))


def _config() -> dict[str, Any]:
    names = ("sliding_window", "num_local_experts", "pad_token_id", "bos_token_id", "eos_token_id")
    return {"model_type": "qwen3_moe", "norm_topk_prob": True} | {
        key: value for key, value in SMALL.items() if key not in names
    }


def _toml(value: object) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


@pytest.mark.slow
def test_a_mixture_trains_alike_with_and_without_recompute(tmp_path: Path) -> None:
    settings = {
        "train__steps": "4",
        "train__router_loss_coefficient": "0.1",
        "gpus": "1",
        "checkpoint__at_end": "false",
    }
    started = {}
    for policy in ("full", "none"):  # In parallel: much of a launch is one process that imports.
        spec = small_mixture(model__activation_checkpointing=policy, **settings)
        run = create_run(spec, tmp_path / policy)
        started[policy] = run, start(run, spec)
    found = {}
    for policy, (run, process) in started.items():
        assert process.wait(timeout=400) == 0, log(run)
        found[policy] = of_kind(run, StepRecord)
    for one, other in zip(found["full"], found["none"], strict=True):
        assert one.router_loss == pytest.approx(other.router_loss, rel=1e-3)
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=2e-2)
        assert one.router_loss is not None
        assert 1.9 < one.router_loss < 4
