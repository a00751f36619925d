"""Rotary positions beyond a model's length are those of transformers, also in the export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig

from so_tui.spec import check_tree
from so_tui_trainer.export import export
from so_tui_trainer.model.config import load_config
from tests.support.launching import tiny
from tests.support.model_checkpoints import checkpoint_of
from tests.support.models import another, causal_model, load_pretrained, scaled_down
from tests.support.problems import rejected

POSITIONS, FACTOR = 64, 4.0


@pytest.mark.parametrize("kind", ["yarn", "linear"])
@pytest.mark.parametrize("name", ["qwen3-14b", "seed-oss-36b"])
def test_positions_are_scaled_and_exported(name: str, kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = scaled_down(name)
    shape = plain.config | {"max_position_embeddings": POSITIONS}
    model = replace(plain, id="builtin:tiny", config=shape, rope_scaling=kind, rope_factor=FACTOR)
    assert model.positions == POSITIONS * FACTOR
    ours: Any = causal_model(load_config(model))
    # As in a config.json of transformers 4.56.
    original = {"original_max_position_embeddings": POSITIONS} if kind == "yarn" else {}
    asked = shape | {
        "rope_scaling": {"rope_type": kind, "factor": FACTOR, **original},
        "max_position_embeddings": int(POSITIONS * FACTOR),
    }
    asked.pop("model_type")
    theirs: Any = causal_model(AutoConfig.for_model(shape["model_type"], **asked))
    unscaled: Any = causal_model(load_config(replace(model, rope_scaling="model", rope_factor=1.0)))
    for other in (theirs, unscaled):
        other.load_state_dict(ours.state_dict())
    ids = torch.arange(5, 5 + 2 * POSITIONS)[None]
    with torch.no_grad():
        found, wanted, without = (
            each.eval()(input_ids=ids).logits for each in (ours, theirs, unscaled)
        )
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, without)

    spec = replace(tiny(data__sequence_length="128"), model=model)
    checkpoint_of(ours, spec, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "model", "r", spec)
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    rope = written["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == (kind, FACTOR)
    assert written["max_position_embeddings"] == POSITIONS * FACTOR
    loaded, _ = load_pretrained(tmp_path / "model")
    found_rope, our_rope = loaded.get_submodule("model.rotary_emb"), ours.model.rotary_emb
    torch.testing.assert_close(found_rope.inv_freq, our_rope.inv_freq)
    assert found_rope.attention_scaling == our_rope.attention_scaling


LLAMA = scaled_down("llama-3.1-8b")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}
HYBRID = {"model_type": "granitemoehybrid", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama3", LLAMA.config | {"rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 256}),
        ("several", another("gemma3_text").config),
        ("none", GPT2),
        ("own", scaled_down("phi-4").config),
        ("own of experts", LLAMA.config | {"model_type": "phimoe"}),
        ("unused", HYBRID | {"layer_types": ["mamba", "attention"]}),
    ],
)
def test_positions_that_cannot_be_scaled_are_refused(kind: str, config: dict[str, Any]) -> None:
    """In the unused kind no layer turns anything by its position, though it is described."""
    scaled = replace(LLAMA, config=config, rope_scaling="yarn", rope_factor=2.0)
    with rejected("rope-not-scalable", field="model.rope_scaling"):
        load_config(scaled)


@pytest.mark.parametrize("given", [{"rope_scaling": "yarn"}, {"rope_factor": 2.0}])
def test_a_scaling_needs_its_factor(given: dict[str, Any]) -> None:
    tree = {"name": "x", "model": {"id": "m"} | given, "data": {"source": "x"}}
    with rejected("rope-factor"):
        check_tree(tree | {"train": {"steps": 1}})
