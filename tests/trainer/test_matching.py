"""Weights in the hub's layouts: what must be there, of multimodal models too, and MXFP4 in bf16."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.cpp_extension import get_default_build_root
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.architecture_models import of_kind
from so_tui.machine.software import extensions_folder
from so_tui.spec import ModelSpec, spec_tree
from so_tui.spec.model_table import dropouts
from so_tui_trainer.export import of_folder
from so_tui_trainer.model.config import disable_dropout, load_config, stored_config
from so_tui_trainer.model.stored import convert, missing_bytes, read_index
from so_tui_trainer.model.weights import (
    _compute_buffers,
    _converted_folder,
    _Match,
    _realised,
    constructed,
    load,
    match_weights,
    meta_model,
    refuse_mismatch,
    trainable_folder,
    weights_folder,
)
from so_tui_trainer.tools.check_inputs import _stored
from so_tui_trainer.tools.describe_model import describe
from tests.support.launching import tiny
from tests.support.models import (
    MULTIMODAL,
    ONE_OF_EACH,
    OTHERS,
    another,
    causal_model,
    known,
    load_pretrained,
    saved,
)
from tests.support.problems import refusal
from tests.support.python_path import printed

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
    assert (problem.code, problem.field) == ("weights-mismatch", "model.id")
    assert problem.value == "some/model"
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


def test_a_head_that_is_not_the_embedding_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers that save each name have written such: transformers warns, and does not tie them."""
    model = saved("qwen3-14b", tmp_path, tie_word_embeddings=True)
    embedding: Any = model.get_input_embeddings()
    stored = embedding.weight.detach()
    spec = tiny(model__id=str(tmp_path), model__weights="pretrained")
    rewrite(tmp_path, {"lm_head.weight": stored.float()})
    assert _stored(spec, tmp_path) == []
    own = stored.clone()
    own[-1, -1] += 1
    rewrite(tmp_path, {"lm_head.weight": own})
    problem = refusal(lambda: _stored(spec, tmp_path))
    assert (problem.code, problem.field) == ("weights-untied", "model.id")
    for said in ("lm_head.weight", "model.embed_tokens.weight", "model.safetensors"):
        assert said in problem.message
    # The remedy.
    path = tmp_path / "config.json"
    written = json.loads(path.read_text()) | {"tie_word_embeddings": False}
    path.write_text(json.dumps(written))
    assert _stored(spec, tmp_path) == []
    assert torch.equal(loaded(tmp_path, monkeypatch).lm_head.weight, own)


ROUTED = known({"deepseek_v3": {}, "minimax_m2": {}, "dots1": {}})


@pytest.mark.parametrize("kind", ROUTED)
def test_buffers_that_decide_stay_in_fp32(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of routers and rotary frequencies, as transformers has them in fp32."""
    spec = another(kind) if kind in OTHERS else of_kind(kind)
    plain = causal_model(load_config(spec), torch.float32)
    for name, buffer in plain.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(10 + torch.rand_like(buffer) / 100)  # bf16 would make all of them 10
    plain.save_pretrained(tmp_path)
    found = dict(loaded(tmp_path, monkeypatch).named_buffers())
    expected = dict(load_pretrained(tmp_path)[0].named_buffers())
    assert any("e_score_correction_bias" in name for name in expected)
    for name, buffer in expected.items():
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name], buffer), name


def loaded(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Load a folder's weights as a rank does, into a model that is not sharded."""
    patch.setattr("superoffload.local_shard", lambda whole: (whole.data.view(-1), 0))
    config, index = load_config(ModelSpec(id=str(folder), weights="pretrained")), read_index(folder)
    meta, model = meta_model(config), constructed(config)
    _compute_buffers(model, meta)
    load(model, meta, match_weights(meta, index), index, lambda done, total: None)
    return model


@pytest.mark.parametrize("number", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("llama-3.1-8b", "model.layers.0.mlp.up_proj.weight"),
        ("llama-3.1-8b", "model.norm.weight"),
        ("qwen3-30b-a3b", "model.layers.1.mlp.experts.2.gate_proj.weight"),
    ],
)
def test_weights_that_are_not_finite_are_named(
    preset: str, name: str, number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(preset, tmp_path).save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors").unlink()
    assert loaded(tmp_path, monkeypatch)
    (file,) = (path for path in tmp_path.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = number
    save_file(tensors, file, metadata={"format": "pt"})
    problem = refusal(lambda: loaded(tmp_path, monkeypatch))
    assert (problem.code, problem.value) == ("weights-not-finite", str(file))
    assert problem.message.startswith(f"{name} ")


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
    (tmp_path / "pytorch_model.bin").touch()  # pickles are not read
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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:34cd\nsize 9\n"


PART, INDEX = "model-00002-of-00002.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["model.safetensors", PART, "config.json", INDEX])
def test_pointers_of_git_lfs_are_no_model(name: str, tmp_path: Path) -> None:
    parts = "400KB" if name in (PART, INDEX) else "1GB"
    saved("qwen3-14b", tmp_path / "whole").save_pretrained(tmp_path, max_shard_size=parts)
    (tmp_path / name).read_bytes()  # it is there
    (tmp_path / name).write_text(POINTER)
    model = ModelSpec(id=str(tmp_path))
    read = stored_config if name == "config.json" else lambda _: read_index(tmp_path)
    problem = refusal(lambda: read(model))
    assert (problem.code, problem.value) == ("lfs-pointer", str(tmp_path))
    assert (problem.message.split()[0], "git lfs pull" in problem.remedy) == (name, True)


def test_pointers_of_git_lfs_are_noted_when_a_model_is_added(tmp_path: Path) -> None:
    saved("qwen3-14b", tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(POINTER)
        *_, found = describe({"model": str(tmp_path)})
        assert any(f"{tmp_path / name} is a pointer" in note for note in found["notes"])
        (tmp_path / name).unlink()


LANGUAGE = {"gemma3": "gemma3_text", "mistral3": "mistral", "llama4": "llama4_text"}
KINDS = [kind for kind in MULTIMODAL if kind in LANGUAGE]
NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "": "model.",
}
"""How names begin since transformers 4.52, by how they did before."""


def whole_of(kind: str, folder: Path, **config: object) -> Any:
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
    whole = whole_of(kind, tmp_path, **MULTIMODAL[kind])
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
    whole_of(kind, tmp_path, **MULTIMODAL[kind], tie_word_embeddings=tied)
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


def test_dropout_of_the_kinds_own_default_is_described(tmp_path: Path) -> None:
    """config.json need not say it: GPT-2 drops a tenth by default."""
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 320, "embd_pdrop": 0.0}
    model, _ = described(tmp_path, model_type="gpt2", **small)
    assert dropouts(model.config) == {"attn_pdrop": 0.1, "resid_pdrop": 0.1}
    config = load_config(ModelSpec(id=str(tmp_path), weights="pretrained"))
    assert disable_dropout(config) == dropouts(model.config)
    assert dropouts(config.to_dict()) == {}


def test_an_untrainable_language_part_is_refused(tmp_path: Path) -> None:
    unknown = {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 32}}
    problem = refusal(lambda: described(tmp_path, **unknown))
    assert problem.code == "model-multimodal"
    assert "qwen2_5_vl_text" in problem.message
    quantised = {"model_type": "gemma3", "quantization_config": {"quant_method": "fp8"}}
    problem = refusal(lambda: described(tmp_path, **MULTIMODAL["gemma3"], **quantised))
    assert problem.code == "weights-quantised"


def test_a_model_of_a_million_layers_is_refused(tmp_path: Path) -> None:
    shape = {"model_type": "qwen3", "num_hidden_layers": 10**6}
    folder = tmp_path / "model"
    folder.mkdir()
    for read in (
        lambda: described(folder, **shape),
        lambda: load_config(ModelSpec(id="x", weights="random", config=shape)),
        lambda: of_folder(folder, ModelSpec(id=str(folder))),
    ):
        assert refusal(read).code == "model-too-deep"


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small gpt-oss in two files, its experts in blocks and scales, some of them apart."""
    (tmp_path / "cache").mkdir()
    compiled = [Path(extensions_folder(os.environ)), *Path(get_default_build_root()).glob("*_cpu")]
    if found := next(
        (path for path in compiled if (path / "cpu_adam" / "cpu_adam.so").exists()), None
    ):  # compiling takes a minute
        shutil.copytree(found, tmp_path / "extensions")
        (tmp_path / "extensions").chmod(0o700)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    saved("gpt-oss-20b", folder, vocab_size=2048)  # those of the tokenizer of tiny
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        size = (experts, rows, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(100, 130, size, dtype=torch.uint8)
    halves = {
        name: f"model-{index % 3 == 0:d}.safetensors" for index, name in enumerate(sorted(tensors))
    }
    for file in set(halves.values()):
        part = {name: tensor for name, tensor in tensors.items() if halves[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": halves}))
    quantise(folder, "mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    return folder


def quantise(folder: Path, method: str, **more: object) -> None:
    path = folder / "config.json"
    written = {"quantization_config": {"quant_method": method, **more}}
    path.write_text(json.dumps(json.loads(path.read_text()) | written))


def test_every_weight_is_what_transformers_makes_of_it(packed: Path) -> None:
    spec = ModelSpec(id=str(packed))
    source = {name: stored.read() for name, stored in read_index(packed).items()}
    folder = weights_folder(spec)
    for name, stored in read_index(folder).items():
        parts = [source.get(f"{name}_{part}") for part in ("blocks", "scales")]
        expected = source[name] if name in source else convert_moe_packed_tensors(*parts)
        assert torch.equal(stored.read(), expected), name
    refuse_mismatch(match_weights(meta_model(load_config(spec)), read_index(folder)), spec)
    model, info = load_pretrained(folder)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not hasattr(model.config, "quantization_config")


def test_an_interrupted_conversion_goes_on(packed: Path) -> None:
    target = trainable_folder(packed)
    assert target == _converted_folder(packed)
    target.parent.mkdir(parents=True)
    whole = missing_bytes(packed, target)
    lines: Any = convert(packed, target)
    next(lines)
    next(lines)  # The first file is complete when the second one starts.
    lines.close()
    assert not target.exists()
    assert 0 < missing_bytes(packed, target) < whole
    (first,) = target.with_name(target.name + ".partial").glob("*.safetensors")
    written = first.stat().st_mtime_ns
    assert len(list(convert(packed, target))) == 1
    assert (target / first.name).stat().st_mtime_ns == written
    assert missing_bytes(packed, target) == 0
    assert list(convert(packed, target)) == []


def test_a_full_disk_is_reported_beforehand(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert refusal(lambda: weights_folder(ModelSpec(id=str(packed)))).code == "disk-full"
    assert not list(_converted_folder(packed).parent.rglob("*.safetensors"))


def test_other_quantisations_are_refused(packed: Path) -> None:
    quantise(packed, "fp8")
    assert refusal(lambda: weights_folder(ModelSpec(id=str(packed)))).code == "weights-quantised"


@pytest.mark.slow
def test_prepare_does_what_a_first_run_would(packed: Path) -> None:
    spec = tiny(model__id=str(packed), model__weights="pretrained", model__tokenizer="builtin:tiny")
    request = json.dumps({"spec": spec_tree(spec)})

    def answers(tool: str) -> list[dict[str, object]]:
        lines = printed("-m", f"so_tui_trainer.tools.{tool}", given=request).splitlines()
        return [json.loads(line) for line in lines]

    assert "so-tui prepare" in str(answers("check_inputs")[-1]["warnings"])
    said = answers("prepare")
    assert said[-1]["done"]
    assert any("MXFP4" in str(answer["message"]) for answer in said)
    assert _converted_folder(packed).is_dir()
    assert answers("check_inputs")[-1]["warnings"] == []
    assert not any("MXFP4" in str(answer["message"]) for answer in answers("prepare"))
