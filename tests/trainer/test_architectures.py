"""Every architecture of the presets, scaled down: packed documents train as if each were alone, in the attention that the CPU gets."""

from typing import Any

import pytest
import torch
from test_batches import documents, spec
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from so_tui.spec import load_catalog
from so_tui_trainer import attention
from so_tui_trainer.batches import Batches
from so_tui_trainer.model import TrainedModel, load_config, without_dropout

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "vocab_size": 2000,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_scaling": None,
    "layer_types": ["sliding_attention", "full_attention"],
}
ONE_OF_EACH = {preset.spec.model.config["model_type"]: name for name, preset in load_catalog().presets.items()}


@pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())
def test_packed_documents_train_as_if_each_were_alone(name: str) -> None:
    torch.manual_seed(0)
    full = load_catalog().presets[name].spec.model
    shape = {key: SMALL.get(key, value) for key, value in full.config.items() if key not in ("rope_scaling", "rope_parameters")}
    random = type(full)(id=full.id, weights="random", config=shape)
    config = load_config(random)
    without_dropout(config)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    implementation = attention.choose(random, model_class._supports_sdpa, torch.device("cpu"))
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
    model = TrainedModel(causal, implementation)
    docs = documents(30)
    batches = Batches(docs, spec(data__sequence_length="128"), 0)
    batch = next(batches.micro_batches(1))
    weight = 1 / len(batch.targets)
    packed = model(batch, weight)
    packed.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in causal.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == {key for key, _ in causal.named_parameters()}
    model.zero_grad()
    alone = torch.zeros(())
    for index in batches._indices(0, len(batch.input_ids)):
        for document in batches.sequences.of(int(index)):
            part = slice(docs.offsets[document], docs.offsets[document + 1])
            ids = torch.tensor(docs.tokens[part], dtype=torch.int64)[None]
            labels = torch.where(torch.tensor(docs.trained[part]), ids[0], -100)[1:]
            alone = alone + cross_entropy(causal(input_ids=ids).logits[0, :-1], labels, ignore_index=-100, reduction="sum")
    (alone * weight).backward()
    torch.testing.assert_close(packed, alone * weight)
    for key, parameter in causal.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-5, msg=key)
