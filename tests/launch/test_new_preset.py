"""Presets for models that were not built in, from tiny config.json files."""

from __future__ import annotations

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.folders import user_folder
from so_tui.launch.helper import call_tool
from so_tui.launch.helper_jobs import _preset_name, describe_model
from so_tui.plan.planner import make_plan
from so_tui.spec import InputError, check_tree, create_preset, find_preset
from tests.support.machines import superchips
from tests.support.models import IN_ROWS, OTHERS, RECURRENT, another, known
from tests.support.problems import codes, refusal, rejected
from tests.support.schemas import valid

pytest.importorskip("transformers")
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
SMALL = {**SIZES, "num_attention_heads": 4, "head_dim": 8}
GROUPED = {**SMALL, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **GROUPED}
HUNYUAN = {**GROUPED, "num_experts": 4, "moe_topk": [2, 2, 2]}
"""It may list how many experts each layer chooses."""
MOE = {**GROUPED, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models described offline, and here: a helper process takes seconds to begin."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    from so_tui_trainer.tools.describe_model import describe

    def answer(tool: str, request: dict[str, Any], *, timeout_s: float) -> Any:
        assert (tool, timeout_s > 0) == ("describe_model", True)
        return json.loads(json.dumps(list(describe(request))[-1]))

    monkeypatch.setattr("so_tui.launch.helper_jobs.call_tool", answer)


def folder(tmp_path: Path, name: str, **config: Any) -> Path:
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def described(model: Path) -> Any:
    from so_tui_trainer.tools.describe_model import describe

    return list(describe({"model": str(model)}))[-1]


def tree_of(answer: Any, **data: object) -> dict[str, Any]:
    data = {"source": "x", **data}
    return {"name": "x", "model": answer["model"], "data": data, "train": {"steps": 1}}


# kind -> (what its config.json says, leaf modules, what the planner is to read of it)
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, int]]] = {
    "qwen3_moe": (MOE, ("Qwen3MoeSparseMoeBlock",), {"moe_intermediate_size": 24}),
    "hunyuan_v1_moe": (HUNYUAN, ("HunYuanMoEV1Moe",), {"num_experts_per_tok": 2}),
    "gpt2": (
        {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
        (),
        {"hidden_size": 32, "intermediate_size": 128},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_counts_what_the_model_has(tmp_path: Path, kind: str) -> None:
    from so_tui_trainer.model.weights import meta_model
    from so_tui_trainer.tools.presets import _model_config, parameter_table

    config, leaves, read = KINDS[kind]
    answer = described(folder(tmp_path, kind, model_type=kind, **config))
    model = check_tree(tree_of(answer)).model
    numels = [each.numel() for each in meta_model(_model_config(model)).parameters()]
    assert answer["parameters"] == model.parameter_count == sum(numels)
    assert model.leaf_modules == leaves
    assert read.items() <= model.config.items()
    # The shape that was written down builds the same model.
    assert parameter_table(model) == model.parameters
    layers = [block for block in model.parameters if block.repeat > 1]
    assert [block.repeat for block in layers] == [3], "repeated layers are written once"
    experts = sum(prod(t.shape) for block in layers for t in block.tensors if t.kind == "expert")
    assert (experts > 0) == bool(leaves)


@pytest.mark.parametrize(
    "kind",
    [
        *IN_ROWS,
        *sorted(RECURRENT.keys() - {"jamba", "minimax"}),
        *sorted(OTHERS.keys() & {"deepseek_v3", "gemma4_text"}),
    ],
)
def test_the_models_of_2026_are_described_as_they_are_built(tmp_path: Path, kind: str) -> None:
    """They can be planned; documents are packed only where layers keep them apart."""
    from so_tui_trainer.tools.presets import parameter_table

    answer = described(folder(tmp_path, kind, **another(kind).config))
    spec = check_tree(tree_of(answer, packing=kind not in IN_ROWS))
    assert parameter_table(spec.model) == spec.model.parameters
    assert make_plan(spec, superchips(1)).fits
    if kind in IN_ROWS:
        with rejected("packing-mixes-documents", field="data.packing"):
            check_tree(tree_of(answer))


def test_a_preset_does_not_pack_what_cannot_be_packed(tmp_path: Path) -> None:
    made, notes = describe_model(str(folder(tmp_path, "hybrid", **another("llama4_text").config)))
    assert not made.data.packing
    assert "chunked_attention" in notes[0]


def test_preset_is_made_saved_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the real helper process."""
    monkeypatch.setattr("so_tui.launch.helper_jobs.call_tool", call_tool)
    model = folder(tmp_path, "Some_Model-7B", max_position_embeddings=512, **LLAMA)
    made, notes = describe_model(str(model), changes={"train.micro_batch": "2"})
    assert create_preset(made) == user_folder() / "some_model-7b.toml"
    spec = find_preset("some_model-7b").spec
    assert spec == made
    assert (spec.title, spec.gpus) == ("Some Model 7B", 1)
    assert (spec.data.sequence_length, spec.train.micro_batch) == (512, 2)
    assert (spec.model.id, spec.data.format, spec.offload.mode) == (str(model), "auto", "auto")
    weights, tokenizer = notes
    assert "has no weights" in weights
    assert "no tokenizer" in tokenizer
    assert make_plan(spec, superchips(1)).fits


def test_what_the_model_lacks_can_be_chosen_but_not_its_shape(tmp_path: Path) -> None:
    model = str(folder(tmp_path, "one", **LLAMA))
    settled = {"model.weights": "random", "model.tokenizer": "builtin:tiny"}
    assert describe_model(model, changes=settled)[1] == ()
    shape = {"model.config.vocab_size": "2048"}
    assert "is read from the model" in str(refusal(lambda: describe_model(model, changes=shape)))


def test_the_command_answers_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path, "moe", model_type="qwen3_moe", **MOE)
    assert main(["presets", "add", str(model), "--name", "mine", "--json"]) == 0
    answer = valid("presets-add", capsys.readouterr().out)
    assert answer["parameters"] == find_preset("mine").spec.model.parameter_count
    assert answer["leaf_modules"] == ["Qwen3MoeSparseMoeBlock"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    model = str(folder(tmp_path, "one", **LLAMA))
    made, _ = describe_model(model)
    first = create_preset(made).read_text()
    with rejected("name-taken"):
        create_preset(made)
    assert create_preset(replace(made, name="two")).name == "two.toml"
    assert (user_folder() / "one.toml").read_text() == first
    (user_folder() / "broken.toml").write_text("name = [")
    for name in ("one", "tiny", "broken"):
        taken = refusal(partial(describe_model, model, name=name))
        assert f"name = {name}: is taken by" in str(taken)
    names = sorted(path.name for path in user_folder().iterdir())
    assert names == ["broken.toml", "one.toml", "two.toml"]


def kind(name: str, **changes: object) -> dict[str, Any]:
    ids = {"num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return GROUPED | ids | {"model_type": name} | changes


def unlike(name: str, **shape: object) -> dict[str, Any]:
    """Return the shape of a model whose sizes have other names than in most."""
    return {"model_type": name, "vocab_size": 96, "hidden_size": 32, **shape}


UNPACKED, CHANGED = "model-packing-unsupported", "model-logits-changed"
OWN_CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
QUANTISED = {"quant_method": "compressed-tensors"}
MIXED = {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 16}
PARTS = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "(BertForMaskedLM), not a"),
        ({"model_type": "vit"}, "no causal language model for"),
        ({"model_type": "recurrent_gemma", **GROUPED}, "changes its logits"),
        (unlike("mamba", num_hidden_layers=2), "no num_attention_heads"),
        (LLAMA | {"quantization_config": {"load_in_4bit": True}}, "quantised (bitsandbytes)"),
        (LLAMA | {"compression_config": QUANTISED}, "quantised (compressed-tensors)"),
        ({"model_type": "from-next-year", **GROUPED}, "does not know"),
        (GROUPED, "does not say what kind of model"),
        (LLAMA | {"hidden_size": "big"}, "Field 'hidden_size' expected int"),
        (unlike("falcon", num_attention_heads=4), "cannot be told apart"),
        ({"model_type": "own", "auto_map": OWN_CODE}, "--trust-remote-code"),
        # A mask of its own, convolutions or shared blocks in attention, logits that are scaled,
        # positions that are missing, two texts: codes.
        (kind("doge"), UNPACKED),
        (kind("zaya", num_experts_per_tok=1, **MIXED), UNPACKED),
        (kind("zamba2", layer_types=["mamba", "hybrid"]), UNPACKED),
        (kind("inkling_text"), CHANGED),
        (
            kind("cohere_compass_text", rope_parameters={"sliding_attention": None}),
            "model-shape-invalid",
        ),
        (kind("musicgen", decoder={}, **PARTS), "model-not-causal"),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else "",
)
def test_untrainable_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    if "pad_token_id" in config and not known({config["model_type"]: {}}):
        pytest.skip("this transformers does not know it")
    with pytest.raises(InputError) as caught:
        described(folder(tmp_path, "model", **config))
    assert words in codes(caught) or words in str(caught.value)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    empty, half = folder(tmp_path, "empty"), folder(tmp_path, "half")
    (empty / "config.json").unlink()
    for model, name, content, words in (
        (tmp_path / "absent", "", "", "there is no such folder"),
        (empty, "README.md", "", "has no config.json"),
        (empty, "adapter_config.json", "{}", "is an adapter"),
        (half, "config.json", '{"model_type": ', "cannot be read"),
        (half, "config.json", "[]", "has no `model_type`"),
    ):
        if name:
            (model / name).write_text(content)
        with pytest.raises(InputError, match=words):
            described(model)


def test_a_hub_id_without_a_network() -> None:
    unreachable = refusal(lambda: describe_model("owner/some-model"))
    assert "the hub cannot be reached" in str(unreachable)


def test_names_come_from_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Some-Model").mkdir()
    monkeypatch.chdir(tmp_path / "Some-Model")
    for model, name in (
        ("Qwen/Qwen3-14B", "qwen3-14b"),
        ("/data/My Model (v2)/", "my-model-v2"),
        ("builtin:tiny", "tiny"),
        ("...", "model"),
        (".", "some-model"),
        ("../Some-Model/", "some-model"),
    ):
        assert _preset_name(model) == name
