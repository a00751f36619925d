"""Feed-forward blocks and norms in tiles of tokens change memory and time, never the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from so_tui_trainer.model import checkpointing
from so_tui_trainer.model import fused as kernels
from so_tui_trainer.model.config import load_config
from tests.support.models import another, causal_model
from tests.support.small_training import (
    MIXTURES,
    PRODUCTS,
    SHAPE,
    TOKENS,
    Watching,
    agree,
    forward,
    model_of,
    pairs,
    trained,
)


@pytest.mark.parametrize(
    ("policy", "model_type"), pairs(["full", "attention"], ["qwen3", "phi3", "gemma3_text", "gpt2"])
)
def test_tiles_change_no_loss_and_no_gradient(
    policy: checkpointing.Policy, model_type: str
) -> None:
    """Of 256 tokens, 100 at a time."""
    agree(trained(policy, model_type, tile=100), trained(policy, model_type), 1e-4, 1e-7)


@pytest.mark.parametrize(
    ("fused", "dtype"),
    [((kernels.NORM,), torch.float32), ((), torch.bfloat16)],
    ids=["whole norms", "norms too"],
)
def test_a_tile_of_all_tokens_changes_no_bit(fused: tuple[str, ...], dtype: torch.dtype) -> None:
    """In float32 the two parts of a norm's gradient are added to the layer's in another order."""
    options: dict[str, Any] = {"fused": fused, "dtype": dtype}
    agree(trained("full", tile=1000, **options), trained("full", **options))


def norms_of(causal: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the norms around the blocks of all layers."""
    children = [
        module for layer in checkpointing.checkpointed_layers(causal) for module in layer.children()
    ]
    return [module for module in children if type(module).__name__.endswith("Norm")]


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_norms_in_tiles_make_no_whole_float32_copy(policy: checkpointing.Policy) -> None:
    """In all passes of a micro-batch in bf16; no tensor of attention is as wide."""
    counts = {0: 0, 32: 0}
    for tile in counts:
        causal: Any = model_of(
            policy, "llama", tile=tile, fused=(), dtype=torch.bfloat16, head_dim=24
        )
        causal.model.norm = torch.nn.Identity()  # the last norm belongs to no layer

        def note(_operation: Any, _arguments: Any, made: Any, tile: int = tile) -> None:
            if isinstance(made, Tensor) and made.dtype is torch.float32:
                counts[tile] += made.numel() == TOKENS * SHAPE["hidden_size"]

        with Watching(note):
            ids = torch.arange(TOKENS)[None]
            hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state
            torch.autograd.backward(hidden.sum())
    assert counts[0] > 0
    assert counts[32] == 0


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_are_not_cut_into_tiles(model_type: str) -> None:
    assert kernels.install_tiles(model_of("full", model_type), 100) == 0


def work_of(model_type: str, tile: int) -> int:
    """Return the multiplications of the matrix products of a pass forward and backward."""
    causal = model_of("full", model_type, tile=tile)
    counts: list[int] = []

    def note(operation: Any, arguments: Any, _result: Any) -> None:
        if operation in PRODUCTS:
            one, other = arguments[-2:]
            counts.append(one.numel() * other.shape[1])

    with Watching(note):
        torch.autograd.backward(forward(causal))
    return sum(counts)


@pytest.mark.parametrize(("model_type", "again"), [("qwen3", 1), ("gemma3_text", 3)])
def test_tiles_repeat_no_product_but_the_last_of_each_block(model_type: str, again: int) -> None:
    """All three where a norm follows the block; none where one tile holds all tokens."""
    whole = work_of(model_type, 0)
    product = TOKENS * SHAPE["hidden_size"] * SHAPE["intermediate_size"]
    assert work_of(model_type, 100) == whole + again * SHAPE["num_hidden_layers"] * product
    assert work_of(model_type, TOKENS) == whole


@pytest.mark.parametrize("kind", ["falcon_h1", "hunyuan_v1_dense"])
def test_the_feed_forward_block_of_odd_layers_is_cut(kind: str) -> None:
    """Not attention, in which tokens meet, where a layer lists it last, as Falcon-H1's. HunYuan's
    feed-forward block has a layer's number, as attention does.
    """
    causal = causal_model(load_config(another(kind)), dtype=torch.float32, attention="eager")
    layers: Any = checkpointing.checkpointed_layers(causal)
    blocks = [layer.feed_forward if kind == "falcon_h1" else layer.mlp for layer in layers]
    whole = [block.forward for block in blocks]
    attention = [layer.self_attn.forward for layer in layers]
    assert kernels.install_tiles(causal, 100) == len(layers)
    assert [layer.self_attn.forward for layer in layers] == attention
    assert all(block.forward != before for block, before in zip(blocks, whole, strict=True))
