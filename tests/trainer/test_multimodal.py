"""The language part of a multimodal model is trained as a model of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from so_tui.spec import ModelSpec
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.stored import read_index
from so_tui_trainer.model.weights import _realised, match_weights, meta_model, refuse_mismatch
from so_tui_trainer.tools.describe_model import describe
from tests.support.models import MULTIMODAL, causal_model
from tests.support.problems import refusal

LANGUAGE = {"gemma3": "gemma3_text", "mistral3": "mistral", "llama4": "llama4_text"}
KINDS = [kind for kind in MULTIMODAL if kind in LANGUAGE]
NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "": "model.",
}
"""How names begin since transformers 4.52, by how they did before."""


def saved(kind: str, folder: Path, **config: object) -> Any:
    """Save a multimodal model with random weights."""
    torch.manual_seed(0)
    factory: Any = AutoModelForImageTextToText
    model = factory.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    model.save_pretrained(folder)
    return model


def rename(path: Path, *, as_before: bool) -> None:
    """Give tensors the names of transformers before or since 4.52."""
    tensors = load_file(path)
    if as_before == any(name.startswith("model.language_model.") for name in tensors):
        names = [(new, old) if as_before else (old, new) for old, new in NAMES.items()]
        renamed = {
            next(to + name.removeprefix(of) for of, to in names if name.startswith(of)): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, path, metadata={"format": "pt"})


@pytest.mark.parametrize("as_before", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_its_weights_are_those_of_the_whole(kind: str, as_before: bool, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path, **MULTIMODAL[kind])
    rename(tmp_path / "model.safetensors", as_before=as_before)
    model = ModelSpec(id=str(tmp_path), weights="pretrained")
    config = load_config(model)
    index, meta = read_index(tmp_path), meta_model(config)
    found = match_weights(meta, index)
    refuse_mismatch(found, model)
    language: Any = causal_model(config)
    tensors = {
        name: tensor
        for each in found.conversions
        for name, tensor in _realised(meta, each, lambda name: index[name].read()).items()
    }
    missing, unexpected = language.load_state_dict(tensors, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    tokens = torch.randint(1, 300, (1, 24))
    with torch.no_grad():
        # Transformers 5.24 wants a picture for a whole Llama 4.
        asked = whole.language_model if kind == "llama4" else whole
        logits, expected = (each.eval()(input_ids=tokens).logits for each in (language, asked))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def described(folder: Path, **config: object) -> tuple[ModelSpec, list[str]]:
    """Describe the model in a folder, of a configuration that is written there if one is given."""
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    *_, answer = describe({"model": str(folder)})
    return msgspec.convert(answer["model"], ModelSpec), answer["notes"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", sorted(MULTIMODAL.keys() - LANGUAGE.keys()))
def test_a_head_tied_by_the_whole_is_the_embedding(kind: str, tied: bool, tmp_path: Path) -> None:
    """Its text_config says nothing of it; transformers' default is that the head is stored."""
    saved(kind, tmp_path, **MULTIMODAL[kind], tie_word_embeddings=tied)
    written = json.loads((tmp_path / "config.json").read_text())
    written["text_config"].pop("tie_word_embeddings", None)
    index = read_index(tmp_path)
    assert ("lm_head.weight" in index) != tied
    answer, _ = described(tmp_path, **written)
    model = ModelSpec(id=str(tmp_path), weights="pretrained")
    config = load_config(model)
    assert config.tie_word_embeddings == tied
    refuse_mismatch(match_weights(meta_model(config), index), model)
    tensors = [tensor for block in answer.parameters for tensor in block.tensors]
    assert [bool(tensor.tied) for tensor in tensors if tensor.name == "lm_head.weight"] == [tied]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_described_as_its_language_part(kind: str, tmp_path: Path) -> None:
    model, notes = described(tmp_path, model_type=kind, **MULTIMODAL[kind])
    names = [tensor.name for block in model.parameters for tensor in block.tensors]
    assert model.config["model_type"] == LANGUAGE[kind]
    assert not any("vision" in name for name in names)
    assert any("multimodal" in note and "exported" in note for note in notes)


def test_an_untrainable_language_part_is_refused(tmp_path: Path) -> None:
    unknown = {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 32}}
    problem = refusal(lambda: described(tmp_path, **unknown))
    assert problem.code == "model-multimodal"
    assert "qwen2_5_vl_text" in problem.message
    quantised = {"model_type": "gemma3", "quantization_config": {"quant_method": "fp8"}}
    problem = refusal(lambda: described(tmp_path, **MULTIMODAL["gemma3"], **quantised))
    assert problem.code == "weights-quantised"
