"""Feed-forward blocks and norms in tiles of tokens change memory and time, never the numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from so_tui_trainer.model import checkpointing
from so_tui_trainer.model import fused as kernels
from so_tui_trainer.model import fused as tiles
from so_tui_trainer.model.config import load_config
from tests.support.models import another, are_close, causal_model
from tests.support.small_training import MIXTURES, SHAPE, TOKENS, forward, model_of, pairs, trained


@pytest.mark.parametrize(
    ("policy", "model_type"), pairs(["full", "attention"], ["qwen3", "phi3", "gemma3_text", "gpt2"])
)
def test_tiles_change_no_loss_and_no_gradient(
    policy: checkpointing.Policy, model_type: str
) -> None:
    """Of 256 tokens, 100 at a time."""
    expected, gradients = trained(policy, model_type)
    found, ours = trained(policy, model_type, tile=100)
    assert found == pytest.approx(expected, rel=1e-6)
    are_close(ours, gradients, 1e-4, 1e-7)


@pytest.mark.parametrize(
    ("fused", "dtype"),
    [((kernels.NORM,), torch.float32), ((), torch.bfloat16)],
    ids=["whole norms", "norms too"],
)
def test_a_tile_of_all_tokens_changes_no_bit(fused: tuple[str, ...], dtype: torch.dtype) -> None:
    """In float32 the two parts of a norm's gradient are added to the layer's in another order."""
    expected, gradients = trained("full", fused=fused, dtype=dtype)
    found, ours = trained("full", tile=1000, fused=fused, dtype=dtype)
    assert found == expected
    assert all(torch.equal(ours[name], gradient) for name, gradient in gradients.items())


def norms_of(causal: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the norms around the blocks of all layers."""
    children = [
        module for layer in checkpointing.checkpointed_layers(causal) for module in layer.children()
    ]
    return [module for module in children if type(module).__name__.endswith("Norm")]


@pytest.mark.parametrize(("model_type", "norms"), [("qwen3", 2), ("gemma3_text", 4)])
def test_norms_in_tiles_are_the_same_to_the_bit(model_type: str, norms: int) -> None:
    """Also in the last tile, which has fewer tokens."""
    causal = model_of("full", model_type, fused=())
    found = norms_of(causal)
    assert len(found) == norms * SHAPE["num_hidden_layers"]
    hidden = torch.randn(1, TOKENS, SHAPE["hidden_size"])
    for norm in found:
        torch.nn.init.normal_(norm.get_parameter("weight"))
    expected = [norm(hidden) for norm in found]
    sizes: list[int] = []
    for norm in found:
        norm.forward = partial(_noted, norm.forward, sizes)
    tiles.install_tiles(causal, 100)
    assert all(
        torch.equal(norm(hidden), whole) for norm, whole in zip(found, expected, strict=True)
    )
    assert sizes == [100, 100, TOKENS - 200] * len(found)


def _noted(run: Callable[[Tensor], Tensor], sizes: list[int], hidden: Tensor) -> Tensor:
    sizes.append(hidden.shape[1])
    return run(hidden)


@pytest.mark.parametrize(("model_type", "fused"), [("qwen3", (kernels.NORM,)), ("gpt2", ())])
def test_norms_that_are_one_kernel_stay_whole(model_type: str, fused: tuple[str, ...]) -> None:
    causal = model_of("full", model_type, fused=fused)
    before = [norm.forward for norm in norms_of(causal)]
    assert tiles.install_tiles(causal, 100) == SHAPE["num_hidden_layers"]
    assert [norm.forward for norm in norms_of(causal)] == before
    assert len(before) == 2 * SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_frozen_norms_in_tiles_pass_their_gradient_on(policy: checkpointing.Policy) -> None:
    found = []
    for tile in (0, 100):
        causal = model_of(policy, "qwen3", tile=tile, fused=())
        for norm in norms_of(causal):
            norm.requires_grad_(False)
        torch.autograd.backward(forward(causal))
        found.append({name: parameter.grad for name, parameter in causal.named_parameters()})
    whole, cut = found
    frozen = [name for name, gradient in cut.items() if gradient is None]
    assert frozen == [name for name, gradient in whole.items() if gradient is None]
    assert len(frozen) == 2 * SHAPE["num_hidden_layers"]
    for name in whole.keys() - set(frozen):
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-4, atol=1e-7, msg=name)


class WholeCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the float32 tensors that are made as large as a micro-batch's hidden states."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.count = elements, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if (
            isinstance(result, Tensor)
            and result.dtype is torch.float32
            and result.numel() == self.elements
        ):
            self.count += 1
        return result


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_norms_in_tiles_make_no_whole_float32_copy(policy: checkpointing.Policy) -> None:
    """In all passes of a micro-batch in bf16; no tensor of attention is as wide."""
    counts = {}
    for tile in (0, 32):
        causal: Any = model_of(
            policy, "llama", tile=tile, fused=(), dtype=torch.bfloat16, head_dim=24
        )
        causal.model.norm = torch.nn.Identity()  # the last norm belongs to no layer
        with WholeCopies(256 * SHAPE["hidden_size"]) as found:
            torch.autograd.backward(
                causal.model(
                    input_ids=torch.arange(256)[None], use_cache=False
                ).last_hidden_state.sum()
            )
        counts[tile] = found.count
    assert counts[0] > 0
    assert counts[32] == 0


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_are_not_cut_into_tiles(model_type: str) -> None:
    assert tiles.install_tiles(model_of("full", model_type), 100) == 0


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            one, other = arguments[-2:]
            self.count += one.numel() * other.shape[1]
        return function(*arguments, **(keywords or {}))


def work_of(model_type: str, tile: int) -> int:
    causal = model_of("full", model_type, tile=tile)
    with Work() as work:
        torch.autograd.backward(forward(causal))
    return int(work.count)


@pytest.mark.parametrize(("model_type", "again"), [("qwen3", 1), ("gemma3_text", 3)])
def test_tiles_repeat_no_product_but_the_last_of_each_block(model_type: str, again: int) -> None:
    """All three where a norm follows the block; none where one tile holds all tokens."""
    whole = work_of(model_type, 0)
    product = TOKENS * SHAPE["hidden_size"] * SHAPE["intermediate_size"]
    assert work_of(model_type, 100) == whole + again * SHAPE["num_hidden_layers"] * product
    assert work_of(model_type, TOKENS) == whole


def test_attention_is_not_cut_where_a_layer_lists_it_last() -> None:
    """Tokens meet in it."""
    causal = causal_model(load_config(another("falcon_h1")), dtype=torch.float32, attention="eager")
    layers: Any = checkpointing.checkpointed_layers(causal)
    assert list(dict(layers[0].named_children())).index("self_attn") > list(
        dict(layers[0].named_children())
    ).index("feed_forward")
    before = [(layer.self_attn.forward, layer.feed_forward.forward) for layer in layers]
    assert tiles.install_tiles(causal, 100) == len(layers)
    for layer, (attention, feed_forward) in zip(layers, before, strict=True):
        assert layer.self_attn.forward == attention
        assert layer.feed_forward.forward != feed_forward


def test_a_feed_forward_block_with_a_layer_number_is_cut() -> None:
    """As attention does, HunYuan's does."""
    causal = causal_model(
        load_config(another("hunyuan_v1_dense")), dtype=torch.float32, attention="eager"
    )
    layers: Any = checkpointing.checkpointed_layers(causal)
    assert all(hasattr(layer.mlp, "layer_idx") for layer in layers)
    attention = [layer.self_attn.forward for layer in layers]
    assert tiles.install_tiles(causal, 100) == len(layers)
    assert [layer.self_attn.forward for layer in layers] == attention
