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
    attention_layers=((2, 64, None),),
)


def test_flops_of_a_dense_model_with_and_without_recompute() -> None:
    # 6 N T; attention: 2 layers x 4 x 64 x (8^2 + 4^2) / 2 forward, three times that with backward.
    attention = 2 * 4 * 64 * (64 + 16) / 2
    model = 6 * 1000 * 12 + 3 * attention
    recomputed = 8 * 900 * 12 + 6 * 100 * 12
    documents = 12, [8, 4]
    assert model_flops(DENSE, *documents) == model
    assert hw_flops(DENSE, *documents, policy="none") == model
    assert hw_flops(DENSE, *documents, policy="full") == recomputed + 4 * attention
    kept = hw_flops(DENSE, *documents, policy="attention")
    assert kept == recomputed + 3 * attention


def test_last_product_is_repeated_only_where_needed() -> None:
    shape = PRESETS["llama-3.1-8b"].spec.model
    dense = flops_of(shape)
    last = 32 * 4096 * 14336
    blocks = dense.active_parameters - dense.head_parameters

    def executed(flops: Flops, *, tiled: bool = False) -> float:
        return hw_flops(flops, 1, [], policy="full", tiled=tiled) - 6 * dense.active_parameters

    assert executed(dense) == 2 * (blocks - last)
    assert executed(dense, tiled=True) == 2 * blocks
    normed = replace(dense, norm_after_mlp=True)
    assert executed(normed) == 2 * blocks
    assert executed(normed, tiled=True) == 2 * (blocks + 3 * last)
    assert flops_of(PRESETS["qwen3-30b-a3b"].spec.model).last_products == 0, (
        "experts are computed again as a whole"
    )


def layer(*tensors: tuple[str, *tuple[int, ...]]) -> ParameterBlock:
    """Return two layers of these matrices and norms, each a name and its shape."""
    found = (
        Tensor(f"model.layers.{{i}}.{name}.weight", tuple(shape), len(shape) == 2, kind)
        for name, *shape in tensors
        for kind in ("linear" if len(shape) == 2 else "other",)
    )
    return ParameterBlock(repeat=2, tensors=tuple(found))


SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}
O_PROJ = ("self_attn.o_proj", 64, 32)


@pytest.mark.parametrize(
    ("block", "product"),
    [
        (layer(("conv.out_proj", 64, 64), ("ff.w1", 96, 64), ("ff.w2", 64, 96)), 64 * 96),
        (layer(("mlp.up_proj", 96, 64), ("mlp.down_proj", 64, 96), O_PROJ), 64 * 96),
        (layer(O_PROJ, ("fc1", 96, 64), ("fc2", 64, 96)), 64 * 96),
        (layer(O_PROJ, ("mlp.down_proj", 64, 96), ("projection", 64, 8)), 64 * 96),
        (layer(("mixer.up_proj", 96, 64), ("mixer.down_proj", 64, 96)), 0),
    ],
    ids=["LFM2", "Falcon-H1", "OPT", "Gemma 4", "Nemotron-H"],
)
def test_last_product_is_the_models_own(block: ParameterBlock, product: int) -> None:
    """Not as ``intermediate_size`` says, of which LFM2 takes two thirds, nor in layers without a
    feed-forward block beside another one.
    """
    shape = architecture(SHAPE | {"intermediate_size": 144})
    assert flops_for((block,), shape).last_products == 2 * product


@pytest.mark.parametrize("after", ["post_feedforward_layernorm", "post_norm2", None])
def test_a_norm_after_the_last_product_has_it_computed_again(after: str | None) -> None:
    """HyperCLOVA X calls it ``post_norm2``."""
    norms: list[tuple[str, *tuple[int, ...]]] = [(after, 64)] if after else []
    block = layer(O_PROJ, ("mlp.up_proj", 96, 64), ("mlp.down_proj", 64, 96), *norms)
    head = ParameterBlock(tensors=(Tensor("lm_head.weight", (512, 64), True, "linear"),))
    found = flops_for((block, head), architecture(SHAPE | {"intermediate_size": 96}))
    assert found.repeated() == 2 * (64 * 32 + 96 * 64 + (64 * 96 if after else 0))


def test_latent_attention_is_counted_by_its_unfolded_heads() -> None:
    latent = {"model_type": "deepseek_v3", "head_dim": 64}
    latent |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    assert architecture(SHAPE | {"intermediate_size": 96} | latent).head_dim == 192


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
    active = flops_of(model).active_parameters
    assert active / 1e9 == pytest.approx(billions, rel=0.25)
    idle = idle_parameters(model.parameters, architecture(model.config))
    assert idle + active <= model.parameter_count


GEMMA4 = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 8}
LLAMA4 = {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "attention_chunk_size": 32}
HYBRID = {"layer_types": ["linear_attention", "mlp", "moe", "full_attention"]}
WINDOW = {"sliding_window": 512}


@pytest.mark.parametrize(
    ("kind", "config", "layers"),
    [
        (
            "gemma4_text",
            GEMMA4 | {"per_layer_config": {"3": {"head_dim": 32}}},
            [(1, 128, None), (3, 64, 8)],
        ),
        ("llama4_text", LLAMA4, [(1, 64, None), (3, 64, 32)]),
        ("nemotron_h", HYBRID, [(1, 64, None)]),
        ("gpt_oss", WINDOW, [(2, 64, None), (2, 64, 512)]),
        ("mistral", WINDOW, [(4, 64, 512)]),
        ("llama", WINDOW, [(4, 64, None)]),
    ],
)
def test_layers_have_the_attention_that_they_have(
    kind: str, config: dict[str, Any], layers: list[tuple[int, int, int | None]]
) -> None:
    """Gemma 4's wide heads, Llama 4's chunks, layers without attention, windows in all layers."""
    small = SHAPE | {"intermediate_size": 8, "head_dim": 16, "num_hidden_layers": 4}
    found = flops_for((), architecture(small | {"model_type": kind} | config))
    assert found.attention_layers == tuple(layers)


def test_a_config_without_a_shape_names_every_missing_key() -> None:
    with pytest.raises(InputError) as caught:
        architecture({"model_type": "llama", "hidden_size": "wide"})
    found = {problem.field: problem.code for problem in caught.value.problems}
    assert found.pop("model.config.hidden_size") == "invalid-model-key"
    assert found.keys() > {"model.config.num_hidden_layers", "model.config.vocab_size"}
    assert set(found.values()) == {"missing-model-key"}


def test_published_formula_counts_padding() -> None:
    # 2 c P L + 4 c layers hidden L^2, c = 4
    shape = architecture(PRESETS["llama-3.1-8b"].spec.model.config)
    assert (shape.layers, shape.hidden) == (32, 4096)
    per_sequence = 8e9 * 4096 + 16 * 32 * 4096 * 4096**2
    assert seed_tflops_total(10**9, shape, 4096, 8, 2.0, checkpointing=True) == pytest.approx(
        4 * per_sequence / 1e12
    )
    mixture = architecture(PRESETS["qwen3-30b-a3b"].spec.model.config)
    assert seed_tflops_total(10**9, mixture, 4096, 8, 2.0, checkpointing=True) == 0


PEAKS = {
    "NVIDIA GH200 480GB": 989.5,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H20": 148,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA GB200": 2500,
    "Voodoo 3dfx": None,
    "": None,
}


def test_peaks_by_product_name() -> None:
    assert {name: peak_flops(name) for name in PEAKS} == {
        name: tflops and tflops * 1e12 for name, tflops in PEAKS.items()
    }
