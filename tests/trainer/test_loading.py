"""Weights into a model cut over two ranks, and its memory. The ranks are this file, as a script."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.architecture_models import of_kind
from so_tui_trainer.model.config import load_config
from tests.support import rank_processes
from tests.support.models import ONE_OF_EACH, OTHERS, another, causal_model, known, saved

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
MIB = 1 << 20


def run_ranks(what: str, folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """What each of two ranks printed last."""
    patch.setenv("SO_TUI_RENDEZVOUS", f"file://{tempfile.mkdtemp()}/store")
    outputs = rank_processes.finish(rank_processes.start(Path(__file__), [what, str(folder)], 2))
    return [output.strip().rpartition("\n")[2] for output in outputs]


@pytest.mark.slow
def test_ranks_hold_their_part_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in ONE_OF_EACH.items():
        saved(name, tmp_path / kind, tie_word_embeddings=kind == "qwen3")
    # With biases of routers in fp32, which are parameters in ERNIE.
    routed = known({"deepseek_v3": {}, "glm4_moe": {}, "ernie4_5_moe": {}})
    for kind in routed:
        spec = another(kind) if kind in OTHERS else of_kind(kind)
        model = causal_model(load_config(spec))
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(10 + torch.rand_like(tensor) / 100)
        model.save_pretrained(tmp_path / kind)
    count = len(ONE_OF_EACH) + len(routed)
    assert run_ranks("compare", tmp_path, monkeypatch) == [f"{count} models"] * 2


@pytest.mark.slow
def test_loading_takes_the_planned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large: dict[str, Any] = {"hidden_size": 512, "num_experts": 32, "moe_intermediate_size": 512}
    large |= {"num_hidden_layers": 12, "layer_types": ["full_attention"] * 12}
    model = saved("qwen3-30b-a3b", tmp_path, **large, vocab_size=16_000)
    whole = sum(parameter.numel() * 2 for parameter in model.parameters())
    del model
    for line in run_ranks("measure", tmp_path, monkeypatch):
        found = json.loads(line)
        assert found["peak"] < whole / 2 + found["formula"] + 50 * MIB
        assert found["formula"] + 50 * MIB < whole / 3  # else the line above says little


def _spec(folder: Path) -> Any:
    from tests.support.launching import tiny

    return tiny(model__id=str(folder), model__weights="pretrained")


def _compare(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    import superoffload
    from so_tui_trainer.model.build import build

    folders, cpu = sorted(folder.iterdir()), torch.device("cpu")
    for path in folders:
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        heard: list[tuple[int, int]] = []
        causal = build(
            _spec(path), cpu, DS_CONFIG, lambda *read, heard=heard: heard.append(read)
        ).causal
        files = len(list(path.glob("*.safetensors")))
        assert heard == sorted(heard)
        assert (heard[0], heard[-1]) == ((0, files), (files, files))
        whole = dict(plain.named_parameters())
        assert whole.keys() == dict(causal.named_parameters()).keys()
        for name, parameter in causal.named_parameters():
            part, start = superoffload.local_shard(parameter)
            expected = whole[name].detach().flatten()[start : start + len(part)]
            if not parameter.requires_grad:
                assert part.dtype == expected.dtype, (path.name, name)
            # transformers keeps the weights of some routers in fp32 too.
            assert torch.equal(part, expected.to(part.dtype)), (path.name, name)
        buffers = dict(plain.named_buffers())
        for name, buffer in causal.named_buffers():
            assert buffer.dtype == buffers[name].dtype, name
            assert torch.equal(buffer, buffers[name]), name
    return f"{len(folders)} models"


def _measure(folder: Path) -> str:
    import torch

    from so_tui_trainer.model.build import build
    from so_tui_trainer.model.config import load_config
    from so_tui_trainer.model.stored import read_index
    from so_tui_trainer.model.weights import PIECE_BYTES, match_weights, meta_model

    spec = _spec(folder)
    index = read_index(folder)
    found = match_weights(meta_model(load_config(spec.model)), index)
    # Besides the weights: a piece of a file, or the largest conversion, stacked and joined.
    conversions = (
        sum(index[name].bytes for _, name in conversion.sources)
        for conversion in found.conversions
        if conversion.converter
    )
    formula = PIECE_BYTES + 2 * max(conversions, default=0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    build(spec, torch.device("cpu"), DS_CONFIG)
    return json.dumps({"peak": _status("VmHWM") - before, "formula": formula})


def _status(key: str) -> int:
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _rank(what: str, folder: Path) -> None:
    from so_tui_trainer.ranks import join

    ranks = join(use_gpu=False)
    line = {"compare": _compare, "measure": _measure}[what](folder)
    ranks.barrier()
    print(line, flush=True)
    os._exit(0)  # gloo's threads may abort an interpreter that ends while they still talk


if __name__ == "__main__":
    _rank(sys.argv[1], Path(sys.argv[2]))
