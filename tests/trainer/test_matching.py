"""What a checkpoint must hold, and what is said when it does not, in the hub's layouts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from so_tui.machine.types import version_numbers
from so_tui.spec import ModelSpec
from so_tui_trainer.model.stored import read_index
from so_tui_trainer.model.weights import _Match, match_weights, meta_model, refuse_mismatch
from tests.support.models import ONE_OF_EACH, saved
from tests.support.problems import refusal

LAYOUT = {
    "llama": "model.layers.0.mlp.gate_proj.weight",
    "qwen3": "model.layers.0.self_attn.q_norm.weight",
    "phi3": "model.layers.0.self_attn.qkv_proj.weight",
    "seed_oss": "model.layers.0.self_attn.q_proj.bias",
    "qwen3_moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
    "gpt_oss": "model.layers.0.self_attn.sinks",
}
"""A name that the published checkpoint of each architecture holds."""

MODEL = ModelSpec(id="some/model")

records_places = pytest.mark.skipif(
    version_numbers(torch.__version__) < (2, 7),
    reason="torch records where stored weights lie since 2.7",
)


def matched(model: PreTrainedModel, folder: Path) -> _Match:
    return match_weights(meta_model(model.config), read_index(folder))


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a saved model, or take them out (None)."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def refused(found: _Match) -> str:
    problem = refusal(lambda: refuse_mismatch(found, MODEL))
    assert (problem.code, problem.field, problem.value) == (
        "weights-mismatch",
        "model.id",
        "some/model",
    )
    return problem.message


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_published_checkpoints_match_their_architecture(kind: str, tmp_path: Path) -> None:
    model = saved(ONE_OF_EACH[kind], tmp_path)
    assert LAYOUT[kind] in read_index(tmp_path)
    found = matched(model, tmp_path)
    assert (found.missing, found.unexpected, found.mismatched) == ((), (), ())
    refuse_mismatch(found, MODEL)
    converted_to = {name for conversion in found.conversions for name in conversion.shapes}
    assert converted_to == model.state_dict().keys()
    if kind != "gpt_oss":  # transformers before 5.5 aligns its experts, as a conversion
        converted = any(conversion.converter for conversion in found.conversions)
        assert converted == (kind == "qwen3_moe")


def test_a_tied_head_need_not_be_stored_and_may_be(tmp_path: Path) -> None:
    model = saved("qwen3-14b", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in read_index(tmp_path)
    assert matched(model, tmp_path).missing == ()
    embedding: Any = model.get_input_embeddings()
    stored = embedding.weight.detach().clone()
    # Old checkpoints also hold the angles of positions.
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(tmp_path, angles | {"lm_head.weight": stored})
    found = matched(model, tmp_path)
    assert (found.missing, found.unexpected) == ((), ())


def test_mismatched_tensors_are_named_and_counted(tmp_path: Path) -> None:
    model = saved("qwen3-14b", tmp_path)
    gone = [
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in range(2)
        for part in ("q_proj", "k_proj", "v_proj")
    ]
    changed = {"adapter.weight": torch.ones(2), "model.norm.weight": torch.ones(63)}
    rewrite(tmp_path, dict.fromkeys(gone) | changed)
    found = matched(model, tmp_path)
    assert (set(found.missing), found.unexpected) == (set(gone), ("adapter.weight",))
    message = refused(found)
    assert "lacks 6 tensors (model.layers.0.self_attn.q_proj.weight" in message
    assert "and 2 more" in message
    assert "1 tensor (adapter.weight)" in message
    assert "model.norm.weight (63, the model's is 64)" in message


@pytest.mark.parametrize("replacement", [None, torch.ones(32, 63, dtype=torch.bfloat16)])
def test_a_missing_or_odd_expert_is_found(replacement: torch.Tensor | None, tmp_path: Path) -> None:
    model = saved("qwen3-30b-a3b", tmp_path)
    rewrite(tmp_path, {"model.layers.1.mlp.experts.2.gate_proj.weight": replacement})
    found = matched(model, tmp_path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in refused(found)
    assert "model.layers.0" not in refused(found)


def test_files_that_are_missing_cut_or_damaged_are_named(tmp_path: Path) -> None:
    assert refusal(lambda: read_index(tmp_path)).code == "weights-missing"
    model, parts = saved("qwen3-14b", tmp_path), tmp_path / "parts"
    model.save_pretrained(parts, max_shard_size="50KB")
    assert read_index(parts).keys() == read_index(tmp_path).keys()
    first, *_ = sorted(parts.glob("*.safetensors"))
    first.unlink()
    absent = refusal(lambda: read_index(parts))
    assert absent.code == "weights-incomplete"
    assert first.name in absent.message
    whole = tmp_path / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-10])
    assert refusal(lambda: read_index(tmp_path)).code == "weights-truncated"
    whole.write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    assert refusal(lambda: read_index(tmp_path)).code == "weights-damaged"


@records_places
def test_torch_saves_are_read_where_they_lie(tmp_path: Path) -> None:
    model = saved("llama-3.1-8b", tmp_path)
    whole = {name: stored.read() for name, stored in read_index(tmp_path).items()}
    (tmp_path / "model.safetensors").unlink()
    tensors = model.state_dict()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    parts = tmp_path / "parts"
    parts.mkdir()
    files = {name: f"pytorch_model-{number % 2}-of-2.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in files if files[name] == file}, parts / file)
    (parts / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    torch.save({"step": 7}, parts / "training_args.bin")  # what trainers leave beside the weights
    for folder in (tmp_path, parts):
        index = read_index(folder)
        assert index.keys() == whole.keys()
        assert all(torch.equal(stored.read(), whole[name]) for name, stored in index.items())
        assert not any(matched(model, folder)[1:])


class Code:
    """Loading it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@records_places
def test_no_code_in_a_torch_save_runs(tmp_path: Path) -> None:
    tensors, path = saved("llama-3.1-8b", tmp_path).state_dict(), tmp_path / "pytorch_model.bin"
    (tmp_path / "model.safetensors").unlink()
    torch.save({**tensors, "more": Code(tmp_path / "made")}, path)
    problem = refusal(lambda: read_index(tmp_path))
    assert (problem.code, problem.value) == ("weights-unreadable", str(path))
    assert not (tmp_path / "made").exists()
    torch.save({**tensors, "turned": torch.zeros(3, 2).t()}, path)
    assert "turned" in refusal(lambda: read_index(tmp_path)).message
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert refusal(lambda: read_index(tmp_path)).code == "weights-unreadable"
    torch.save(tensors, path)
    path.write_bytes(path.read_bytes()[:-5000])
    assert refusal(lambda: read_index(tmp_path)).code == "weights-unreadable"


@pytest.mark.parametrize("held", [{"model": {"a": torch.ones(2)}, "step": 7}, [torch.ones(2)]])
def test_a_torch_save_of_more_than_weights_is_refused(held: object, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(held, path)
    problem = refusal(lambda: read_index(tmp_path))
    assert (problem.code, problem.value) == ("weights-unreadable", str(path))
