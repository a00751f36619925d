"""The MXFP4 weights of gpt-oss in bf16: transformers' numbers, file by file, whole or not."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.cpp_extension import get_default_build_root
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from so_tui.machine.software import extensions_folder
from so_tui.spec import ModelSpec, spec_tree
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.stored import convert, missing_bytes, read_index
from so_tui_trainer.model.weights import (
    _converted_folder,
    match_weights,
    meta_model,
    refuse_mismatch,
    trainable_folder,
    weights_folder,
)
from tests.support.launching import tiny
from tests.support.models import load_pretrained, saved
from tests.support.problems import refusal
from tests.support.python_path import printed


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
        expected = (
            source[name]
            if name in source
            else convert_moe_packed_tensors(source[f"{name}_blocks"], source[f"{name}_scales"])
        )
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
