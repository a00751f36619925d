"""The built-in presets: true shapes, tables equal to the models, the settings of the original
scripts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from so_tui.spec import OffloadSpec, RunSpec, find_preset, load_catalog, resolve_source
from so_tui.spec.presets import as_published

PRESETS = {
    name: preset for name, preset in load_catalog().presets.items() if preset.origin == "built-in"
}

# name -> (published parameters in billions, GPUs, sequence length, ratio)
PUBLISHED = {
    "gpt-oss-20b": (20.91, 1, 8192, 0.9),
    "qwen3-14b": (14.77, 1, 4096, 0.9),
    "phi-4": (14.66, 1, 4096, 0.9),
    "llama-3.1-8b": (8.03, 1, 4096, 0.8),
    "seed-oss-36b": (36.15, 2, 4096, 0.9),
    "qwen3-30b-a3b": (30.53, 2, 4096, 0.9),
    "llama-3.3-70b": (70.55, 4, 4096, 0.9),
}


def spec_of(name: str) -> RunSpec:
    return PRESETS[name].spec


def rewritten(path: Path) -> str:
    pytest.importorskip("transformers")
    from so_tui_trainer.tools.presets import _rewritten

    return _rewritten(path)[0]


def regenerated(path: Path) -> str:
    """Write what the generator makes of a file, which it must leave as it is then."""
    text = rewritten(path)
    path.write_text(text)
    assert rewritten(path) == text
    return text


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_settings_are_those_published(name: str) -> None:
    spec = spec_of(name)
    billions, gpus, length, ratio = PUBLISHED[name]
    assert round(spec.model.parameter_count / 1e9, 2) == billions
    assert (spec.gpus, spec.data.sequence_length) == (gpus, length)
    offload, train = as_published(spec).offload, spec.train
    assert (offload.ratio, offload.cpu_adam_cores_fraction) == (ratio, 0.9)
    assert (spec.offload, spec.fixed) == (OffloadSpec(), ()), "the machine decides"
    assert train.micro_batch * gpus * train.gradient_accumulation == 4, (
        "the scripts' batch is 4 sequences over all GPUs"
    )
    assert (train.learning_rate, train.warmup_ratio) == (1e-5, 0.05)
    assert (train.weight_decay, train.seed) == (0.01, 42)
    assert (spec.data.source, spec.data.split) == ("tatsu-lab/alpaca", "train[:10%]")
    assert not spec.model.trust_remote_code


@pytest.mark.parametrize("name", PRESETS)
def test_shape_and_table_are_those_of_the_model(name: str) -> None:
    pytest.importorskip("transformers")
    from so_tui_trainer.model.weights import meta_model
    from so_tui_trainer.tools.presets import _model_config, parameter_table

    model = spec_of(name).model
    config, shape = _model_config(model), model.config
    built = meta_model(config)
    assert parameter_table(model) == model.parameters
    assert model.parameter_count == sum(parameter.numel() for parameter in built.parameters())
    assert set(model.leaf_modules) <= {type(module).__name__ for module in built.modules()}
    moved = {"rope_theta", "rope_scaling"}  # newer releases keep both in rope_parameters
    for key in shape.keys() - moved:
        assert getattr(config, key) == shape[key], key
    rope = {"rope_type": "default"} | shape.get("rope_scaling", {})
    if partial := config.rope_parameters.get("partial_rotary_factor"):
        rope["partial_rotary_factor"] = partial
    assert config.rope_parameters == rope | {"rope_theta": shape["rope_theta"]}


def test_tables_tell_kinds_of_tensors_apart() -> None:
    """Tied ones are counted once; experts and what never decays are marked."""
    model = spec_of("qwen3-4b-random").model
    tensors = [tensor for block in model.parameters for tensor in block.tensors]
    tied = [(tensor.name, tensor.tied) for tensor in tensors if tensor.tied]
    assert tied == [("lm_head.weight", "model.embed_tokens.weight")]
    assert model.parameter_count == 4_022_468_096
    named = {
        tensor.name.removeprefix("model.").removeprefix("layers.{i}."): tensor
        for block in spec_of("gpt-oss-20b").model.parameters
        for tensor in block.tensors
    }
    kinds = ("mlp.experts.gate_up_proj", "embed_tokens.weight", "lm_head.weight")
    assert [named[name].kind for name in kinds] == ["expert", "embedding", "linear"]
    assert not named["mlp.experts.gate_up_proj_bias"].decay
    assert not named["self_attn.sinks"].decay


REST = '[data]\nsource = "x"\n[train]\nsteps = 1\n'


def test_the_generator_writes_out_what_the_planner_reads(tmp_path: Path) -> None:
    """Of a shape that leaves half of itself to the model's defaults; what a person wrote stays as
    it is.
    """
    from so_tui.model.flops import flops_of

    path = tmp_path / "mini.toml"
    shape = '[model.config]  # mine\nmodel_type = "llama"\nhidden_size = 256 # narrow\n'
    own = f'[model]\nid = "own/mini"\nweights = "random"\n{shape}num_hidden_layers = 4\n{REST}'
    path.write_text(own)
    text = regenerated(path)
    assert all(line in text.splitlines() for line in own.splitlines())
    model = find_preset(str(path)).spec.model
    assert (model.config["num_attention_heads"], model.config["vocab_size"]) == (32, 32000)
    assert sum(layers for layers, *_ in flops_of(model).attention_layers) == 4
    path.write_text(text.replace("num_hidden_layers = 4", "num_hidden_layers = 2"))
    regenerated(path)
    assert max(block.repeat for block in find_preset(str(path)).spec.model.parameters) == 2


@pytest.mark.parametrize("section", ["", "[model.config]\n"])
def test_generator_writes_a_whole_shape_where_none_is(tmp_path: Path, section: str) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    shape = {"model_type": "llama", "hidden_size": 64, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    path = tmp_path / "own.toml"
    path.write_text(f'[model]\nid = "{tmp_path}"\n{section}{REST}')
    regenerated(path)
    config = find_preset(str(path)).spec.model.config
    assert (config["model_type"], config["hidden_size"]) == ("llama", 64)
    assert config["rope_parameters"]["factor"] == 2.0


def test_the_tiny_tokenizer_loads_and_is_made_from_the_rows(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tools.tiny_tokenizer import row_texts, trained, write

    home = Path(resolve_source("builtin:tiny"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    assert len(tokenizer) == spec_of("tiny").model.config["vocab_size"]
    assert {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id} == {0, 1, 2}
    text = "def f(x):\n    return x  # ¿Dónde está?"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    write(trained(row_texts(home / "rows.jsonl"), len(tokenizer)), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (home / name).read_text()
