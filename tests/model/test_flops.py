"""FLOPs against counts made by hand, and GPU names against their peaks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.model.flops import (
    Flops,
    attention_pairs,
    flops_for,
    flops_of,
    hw_flops,
    idle_parameters,
    model_flops,
    peak_flops,
    seed_tflops_total,
)
from so_tui.model.shape import architecture
from so_tui.spec import InputError, ParameterBlock, Tensor, load_catalog

PRESETS = load_catalog().presets
DENSE = Flops(
    active_parameters=1000,
    head_parameters=100,
    attention_width=64,
    full_layers=2,
    windowed_layers=0,
    window=None,
)


def test_dense_model_costs_six_and_attention() -> None:
    # 6 N T; attention: 2 layers x 4 x 64 x (8^2 + 4^2) / 2 forward, three times that with backward.
    assert model_flops(DENSE, 12, [8, 4]) == 6 * 1000 * 12 + 3 * 2 * 4 * 64 * (64 + 16) / 2


def test_recompute_counts_as_executed_but_not_as_the_models() -> None:
    attention = 2 * 4 * 64 * 32
    assert (
        hw_flops(DENSE, 8, [8], checkpointing=False)
        == 6 * 1000 * 8 + 3 * attention
        == model_flops(DENSE, 8, [8])
    )
    assert hw_flops(DENSE, 8, [8], checkpointing=True) == 8 * 900 * 8 + 6 * 100 * 8 + 4 * attention
    assert (
        hw_flops(DENSE, 8, [8], checkpointing=True, attention_recomputed=False)
        == 8 * 900 * 8 + 6 * 100 * 8 + 3 * attention
    )


def test_last_product_is_repeated_only_where_needed() -> None:
    shape = PRESETS["llama-3.1-8b"].spec.model
    dense = flops_of(shape)
    last = 32 * 4096 * 14336
    blocks = dense.active_parameters - dense.head_parameters

    def executed(flops: Flops, *, tiled: bool = False) -> float:
        return hw_flops(flops, 1, [], checkpointing=True, tiled=tiled) - 6 * dense.active_parameters

    assert executed(dense) == 2 * (blocks - last)
    assert executed(dense, tiled=True) == 2 * blocks
    normed = replace(dense, norm_after_mlp=True)
    assert executed(normed) == 2 * blocks
    assert executed(normed, tiled=True) == 2 * (blocks + 3 * last)
    assert flops_of(PRESETS["qwen3-30b-a3b"].spec.model).last_products == 0, (
        "experts are computed again as a whole"
    )


def layer(**tensors: tuple[int, ...]) -> ParameterBlock:
    names = {name: name.replace("__", ".") for name in tensors}
    found = tuple(
        Tensor(
            name=f"model.layers.{{i}}.{names[name]}.weight", shape=shape, decay=True, kind="linear"
        )
        for name, shape in tensors.items()
    )
    return ParameterBlock(repeat=2, tensors=found)


SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.mark.parametrize(
    ("tensors", "product"),
    [
        pytest.param(
            {
                "conv__out_proj": (64, 64),
                "feed_forward__w1": (96, 64),
                "feed_forward__w2": (64, 96),
            },
            64 * 96,
            id="LFM2",
        ),
        pytest.param(
            {"mlp__up_proj": (96, 64), "mlp__down_proj": (64, 96), "self_attn__o_proj": (64, 32)},
            64 * 96,
            id="Falcon-H1",
        ),
        pytest.param(
            {"self_attn__o_proj": (64, 32), "fc1": (96, 64), "fc2": (64, 96)}, 64 * 96, id="OPT"
        ),
        pytest.param(
            {"self_attn__o_proj": (64, 32), "mlp__down_proj": (64, 96), "projection": (64, 8)},
            64 * 96,
            id="Gemma 4",
        ),
        pytest.param(
            {"mixer__up_proj": (96, 64), "mixer__down_proj": (64, 96)}, 0, id="Nemotron-H"
        ),
    ],
)
def test_last_product_is_the_models_own(tensors: dict[str, tuple[int, ...]], product: int) -> None:
    """Not as ``intermediate_size`` says, of which LFM2 takes two thirds, nor in layers without a
    feed-forward block beside another one.
    """
    config = SHAPE | {"intermediate_size": 144}
    assert flops_for((layer(**tensors),), architecture(config)).last_products == 2 * product


@pytest.mark.parametrize("after", ["post_feedforward_layernorm", "post_norm2", None])
def test_a_norm_after_the_last_product_has_it_computed_again(after: str | None) -> None:
    """HyperCLOVA X calls it ``post_norm2``."""
    plain = layer(self_attn__o_proj=(64, 32), mlp__up_proj=(96, 64), mlp__down_proj=(64, 96))
    name = f"model.layers.{{i}}.{after}.weight"
    norm = Tensor(name=name, shape=(64,), decay=False, kind="other")
    block = replace(plain, tensors=(*plain.tensors, norm)) if after else plain
    head = Tensor(name="lm_head.weight", shape=(512, 64), decay=True, kind="linear")
    shape = architecture(SHAPE | {"intermediate_size": 96})
    found = flops_for((block, ParameterBlock(tensors=(head,))), shape)
    assert found.repeated() == 2 * (64 * 32 + 96 * 64 + (64 * 96 if after else 0))


def test_latent_attention_is_counted_by_its_unfolded_heads() -> None:
    latent = {"model_type": "deepseek_v3", "head_dim": 64}
    latent |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    assert architecture(SHAPE | {"intermediate_size": 96} | latent).head_dim == 192


def test_short_documents_cost_less_attention_than_one_long_one() -> None:
    assert model_flops(DENSE, 64, [8] * 8) < model_flops(DENSE, 64, [64])


@pytest.mark.parametrize(
    ("length", "window", "pairs"),
    [(4, None, 8), (4, 4, 8), (4, 128, 8), (10, 4, 32), (256, 128, 24576)],
)
def test_a_sliding_window_cuts_pairs_off(length: int, window: int | None, pairs: float) -> None:
    assert attention_pairs(length, window) == pairs


def test_a_real_dense_model() -> None:
    """Llama 3.1 8B: per layer q, o 4096^2, k, v 4096 x 1024, three 4096 x 14336; 32 layers and the
    head.
    """
    expected = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert flops_of(PRESETS["llama-3.1-8b"].spec.model).active_parameters == expected


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.04), ("gpt-oss-20b", 3.03)])
def test_experts_count_by_the_share_a_token_meets(name: str, billions: float) -> None:
    model = PRESETS[name].spec.model
    shape = architecture(model.config)
    active = flops_of(model).active_parameters
    assert active < 0.25 * model.parameter_count
    assert idle_parameters(model.parameters, shape) + active <= model.parameter_count
    assert active / 1e9 == pytest.approx(billions, rel=0.25)


def test_gpt_oss_alternates_sliding_and_full_attention() -> None:
    flops = flops_of(PRESETS["gpt-oss-20b"].spec.model)
    assert (flops.full_layers, flops.windowed_layers, flops.window) == (12, 12, 128)


def test_layers_have_the_attention_that_they_have() -> None:
    """Gemma 4's wide heads in every sixth layer, Llama 4's chunks, and layers of a hybrid without
    attention.
    """
    kinds: dict[str, dict[str, Any]] = {
        "gemma4_text": {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 8,
            "per_layer_config": {"3": {"head_dim": 32}},
        },
        "llama4_text": {
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "attention_chunk_size": 32,
        },
        "nemotron_h": {"layer_types": ["linear_attention", "mlp", "moe", "full_attention"]},
    }
    shape: dict[str, Any] = SHAPE | {"intermediate_size": 8, "head_dim": 16, "num_hidden_layers": 4}
    found = {
        kind: flops_for((), architecture(shape | {"model_type": kind} | config)).attention_layers
        for kind, config in kinds.items()
    }
    assert found == {
        "gemma4_text": ((1, 128, None), (3, 64, 8)),
        "llama4_text": ((1, 64, None), (3, 64, 32)),
        "nemotron_h": ((1, 64, None),),
    }


def test_every_preset_has_a_shape() -> None:
    for preset in PRESETS.values():
        shape = architecture(preset.spec.model.config)
        assert shape.heads % shape.kv_heads == 0
        assert shape.layers == shape.full_layers + shape.windowed_layers


def test_a_config_without_a_shape_names_every_missing_key() -> None:
    with pytest.raises(InputError) as caught:
        architecture({"model_type": "llama", "hidden_size": "wide"})
    found = {problem.field: problem.code for problem in caught.value.problems}
    assert found["model.config.hidden_size"] == "invalid-model-key"
    assert (
        found["model.config.num_hidden_layers"]
        == found["model.config.vocab_size"]
        == "missing-model-key"
    )


def test_published_formula_counts_padding() -> None:
    # 2 c P L + 4 c layers hidden L^2, c = 4
    shape = architecture(PRESETS["llama-3.1-8b"].spec.model.config)
    assert (shape.layers, shape.hidden) == (32, 4096)
    per_sequence = 8e9 * 4096 + 16 * 32 * 4096 * 4096**2
    assert seed_tflops_total(10**9, shape, 4096, 8, 2.0, checkpointing=True) == pytest.approx(
        4 * per_sequence / 1e12
    )


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA GH200 480GB", 989.5),
        ("GH200 480GB", 989.5),
        ("NVIDIA GH200 144G HBM3e", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("Voodoo 3dfx", None),
        ("", None),
    ],
)
def test_peaks_by_product_name(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (tflops and tflops * 1e12)


@pytest.mark.parametrize(
    ("model_type", "windowed"), [("mistral", 4), ("starcoder2", 4), ("llama", 0)]
)
def test_some_models_have_their_window_in_every_layer(model_type: str, windowed: int) -> None:
    config = {"model_type": model_type, "intermediate_size": 128, "sliding_window": 512}
    shape = architecture(SHAPE | {"num_hidden_layers": 4} | config)
    assert shape.windowed_layers == windowed
