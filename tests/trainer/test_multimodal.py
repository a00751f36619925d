"""The language part of a multimodal model is trained as a model of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from so_tui.spec import ModelSpec
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.stored import read_index
from so_tui_trainer.model.weights import _realised, match_weights, meta_model, refuse_mismatch
from so_tui_trainer.tools.describe_model import describe
from tests.support.models import SMALL, known
from tests.support.problems import refusal

TEXT = {
    key: SMALL[key]
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
}
TEXT |= {
    "head_dim": 16,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
KINDS = known(
    {
        "gemma3": {
            "text_config": {**TEXT, "layer_types": SMALL["layer_types"]},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        },
        "mistral3": {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
            "spatial_merge_size": 1,
            "tie_word_embeddings": False,
        },
        "llama4": {
            "text_config": {
                **TEXT,
                "num_local_experts": 4,
                "intermediate_size_mlp": 96,
                "layer_types": ["chunked_attention", "full_attention"],
                "attention_chunk_size": 16,
            },
            "vision_config": {
                **VISION,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "vision_output_dim": 32,
            },
        },
    }
)


def saved(kind: str, folder: Path, *, as_before: bool) -> Any:
    """Save a multimodal model; ``as_before``: with the names of transformers before 4.52."""
    torch.manual_seed(0)
    factory: Any = AutoModelForImageTextToText
    model = factory.from_config(AutoConfig.for_model(kind, **KINDS[kind]), dtype=torch.float32)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if as_before == any(name.startswith("model.language_model.") for name in tensors):
        names = [
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            ("model.", ""),
        ]
        if not as_before:
            names = [
                ("language_model.model.", "model.language_model."),
                ("language_model.lm_head.", "lm_head."),
                ("", "model."),
            ]
        renamed = {
            next(
                (new + name.removeprefix(old) for old, new in names if name.startswith(old))
            ): tensors[name]
            for name in tensors
        }
        save_file(renamed, path, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("as_before", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_its_weights_are_those_of_the_whole(kind: str, as_before: bool, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path, as_before=as_before).eval()
    model = ModelSpec(id=str(tmp_path), weights="pretrained")
    config = load_config(model)
    index = read_index(tmp_path)
    meta = meta_model(config)
    found = match_weights(meta, index)
    refuse_mismatch(found, model)
    factory: Any = AutoModelForCausalLM
    language = factory.from_config(config, dtype=torch.float32)
    tensors = {
        name: tensor
        for each in found.conversions
        for name, tensor in _realised(meta, each, lambda name: index[name].read()).items()
    }
    missing, unexpected = language.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert {name for name in missing if name != "lm_head.weight"} == set()
    tokens = torch.randint(1, 300, (1, 24))
    with torch.no_grad():
        # Transformers 5.24 wants a picture for a whole Llama 4.
        asked = whole.language_model if kind == "llama4" else whole
        expected = asked(input_ids=tokens).logits
        torch.testing.assert_close(
            language.eval()(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5
        )


def described(folder: Path, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describe the model in a folder, of a configuration that is written there if one is given."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    answer: dict[str, Any] = list(describe({"model": str(folder)}))[-1]
    return answer


QWEN3_5 = known(
    {
        "qwen3_5": {
            "text_config": {
                **TEXT,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": TEXT["hidden_size"],
            },
        }
    }
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", QWEN3_5)
def test_a_head_tied_by_the_whole_is_the_embedding(kind: str, tied: bool, tmp_path: Path) -> None:
    """Its text_config says nothing of it; transformers' default is that the head is stored."""
    torch.manual_seed(0)
    factory: Any = AutoModelForImageTextToText
    whole = factory.from_config(
        AutoConfig.for_model(kind, **QWEN3_5[kind], tie_word_embeddings=tied), dtype=torch.float32
    )
    whole.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    model = ModelSpec(id=str(tmp_path), weights="pretrained")
    config = load_config(model)
    assert config.tie_word_embeddings == tied
    refuse_mismatch(match_weights(meta_model(config), read_index(tmp_path)), model)
    answer = described(tmp_path)
    tensors = [
        tensor
        for block in msgspec.convert(answer["model"], ModelSpec).parameters
        for tensor in block.tensors
    ]
    assert [bool(tensor.tied) for tensor in tensors if tensor.name == "lm_head.weight"] == [tied]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_described_as_its_language_part(kind: str, tmp_path: Path) -> None:
    answer = described(tmp_path, {"model_type": kind, **KINDS[kind]})
    model = msgspec.convert(answer["model"], ModelSpec)
    assert (
        model.config["model_type"]
        == {"gemma3": "gemma3_text", "mistral3": "mistral", "llama4": "llama4_text"}[kind]
    )
    assert not any(
        "vision" in tensor.name for block in model.parameters for tensor in block.tensors
    )
    assert any("multimodal" in note and "exported" in note for note in answer["notes"])


QUANTISED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        (
            {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 32}},
            "model-multimodal",
            "qwen2_5_vl_text",
        ),
        ({"model_type": "gemma3", **KINDS["gemma3"], **QUANTISED}, "weights-quantised", ""),
    ],
)
def test_a_model_whose_language_part_cannot_be_trained_is_refused(
    config: dict[str, Any], code: str, said: str, tmp_path: Path
) -> None:
    problem = refusal(lambda: described(tmp_path, config))
    assert problem.code == code
    assert said in problem.message
