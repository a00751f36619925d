"""What ZeRO-3 is told about the model."""

import pytest
from deepspeed.utils import get_z3_leaf_modules
from transformers import AutoConfig, PreTrainedModel

from so_tui_trainer.model.build import _set_leaf_modules
from tests.support.launching import tiny
from tests.support.models import causal_model
from tests.support.problems import refusal

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
}


def model() -> PreTrainedModel:
    return causal_model(AutoConfig.for_model("qwen3_moe", **SHAPE, **EXPERTS))


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_layers_and_what_is_named_are_gathered_whole(gpus: str) -> None:
    causal = model()
    _set_leaf_modules(causal, tiny(gpus=gpus, model__leaf_modules='["Qwen3MoeExperts"]'))
    assert {type(module).__name__ for module in get_z3_leaf_modules(causal)} == {
        "Qwen3MoeDecoderLayer",
        "Qwen3MoeExperts",
    }


def test_a_block_that_the_model_lacks_is_named_with_those_it_has() -> None:
    problem = refusal(
        lambda: _set_leaf_modules(model(), tiny(model__leaf_modules='["NoSuchBlock"]'))
    )
    assert (problem.code, problem.field, problem.value) == (
        "leaf-module-unknown",
        "model.leaf_modules",
        "NoSuchBlock",
    )
    assert "Qwen3MoeDecoderLayer" in problem.remedy
