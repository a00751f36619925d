"""What is kept, computed again or cut into tiles changes memory and time, never the numbers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from so_tui.model.profile import ModelProfile
from so_tui.model.shape import architecture
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.model import attention, checkpointing
from so_tui_trainer.model import fused as kernels
from so_tui_trainer.model.checkpointing import HostActivations, Room
from so_tui_trainer.model.config import load_config
from tests.support.attention import PLAIN
from tests.support.models import another, causal_model
from tests.support.problems import coded
from tests.support.small_training import (
    EXPERTS,
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

POLICIES = ["full", "attention", "selective"]
ROUTED = {key: value for key, value in EXPERTS.items() if key not in SHAPE}


@pytest.mark.parametrize(
    ("policy", "model_type"), pairs(POLICIES, ["qwen3", "llama", "phi3", "seed_oss", *MIXTURES])
)
def test_recomputing_keeps_loss_and_gradients(
    policy: checkpointing.Policy, model_type: str
) -> None:
    agree(trained(policy, model_type), trained("none", model_type), 1e-5, 1e-7)


@pytest.mark.parametrize(
    ("kind", "shape"), [("phimoe", ROUTED), ("mixtral", ROUTED | {"router_jitter_noise": 0.1})]
)
def test_random_routers_draw_the_same_again(kind: str, shape: dict[str, Any]) -> None:
    """Else backward has the gradients of experts that forward did not choose."""
    full, none = (trained(policy, kind, fused=False, **shape) for policy in ("full", "none"))
    agree(full, none, 1e-5, 1e-7)


@pytest.mark.parametrize(
    ("policy", "model_type", "with_kernels"),
    [
        *pairs(POLICIES, ["qwen3", "gemma3_text", "gpt2", *MIXTURES], None),
        *(("attention", kind, PLAIN) for kind in ("qwen3", "gemma3_text", *MIXTURES)),
    ],
)
def test_activations_in_host_memory_change_no_bit(
    policy: checkpointing.Policy, model_type: str, with_kernels: attention.Kernels | None
) -> None:
    """Nor does a second micro-batch, which reuses the memory of the first. With kernels also
    attention's results are there: gpt-oss has sinks, Gemma 3 windows.
    """
    options: dict[str, Any] = {"passes": 2, "with_kernels": with_kernels}
    expected = trained(policy, model_type, **options)
    agree(trained(policy, model_type, offloaded=True, **options), expected)


def test_a_layer_that_runs_twice_is_refused_with_offload() -> None:
    """There is memory for one input of each layer."""
    causal = model_of("full", "qwen3", offloaded=True)
    layers: Any = causal.model.layers
    layers.append(layers[0])
    causal.config.num_hidden_layers += 1
    causal.config.layer_types = ["full_attention"] * len(layers)
    with pytest.raises(TrainingError, match="activation_offload") as refused:
        forward(causal)
    assert refused.value.code == "layer-inputs-unforeseen"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("policy", "with_kernels"),
    [("full", None), ("attention", None), ("selective", None), ("attention", PLAIN)],
)
def test_activations_in_pinned_memory_change_nothing_on_a_gpu(
    policy: checkpointing.Policy, with_kernels: attention.Kernels | None
) -> None:
    """Their copies run beside the computation: one that came too late would leave other numbers."""
    options: dict[str, Any] = {"passes": 4, "device": "cuda", "with_kernels": with_kernels}
    agree(trained(policy, offloaded=True, **options), trained(policy, **options), 1e-4, 1e-6)


def test_only_what_the_last_layer_keeps_stays_on_the_gpu() -> None:
    """The graph that backward follows holds no other tensor of a layer's input, or of attention's
    results, which backward reads from the host.
    """
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    results: list[weakref.ref[torch.UntypedStorage]] = []

    def noted(*arguments: Any) -> tuple[Tensor, Tensor]:
        found = PLAIN.forward(*arguments)
        results.extend(weakref.ref(tensor.untyped_storage()) for tensor in found)
        return found

    kernels = PLAIN._replace(forward=noted)
    causal = model_of("attention", "qwen3", offloaded=True, with_kernels=kernels)
    for layer in checkpointing.checkpointed_layers(causal):
        layer.register_forward_pre_hook(
            lambda _, arguments: inputs.append(weakref.ref(arguments[0].untyped_storage()))
        )
    loss = forward(causal)
    before = SHAPE["num_hidden_layers"] - 1
    assert [storage() is None for storage in inputs] == [True] * before + [False]
    assert [storage() is None for storage in results] == [True] * 2 * before + [False] * 2
    torch.autograd.backward(loss)
    assert len(results) == 2 * before + 2, "none is computed again"
    assert not any(storage() for storage in inputs + results)


def test_more_attention_in_a_layer_than_is_planned_is_refused() -> None:
    causal = model_of("none", "qwen3", with_kernels=PLAIN)
    rooms = [Room(SHAPE["num_hidden_layers"], 1 << 20), Room(1, 1 << 20), Room(1, 1 << 20)]
    host = HostActivations(rooms[0], rooms[1:], torch.device("cpu"))
    checkpointing.install(causal, "attention", host)
    with coded(TrainingError, "layer-inputs-unforeseen"):
        forward(causal)


def test_evaluation_leaves_nothing_in_host_memory() -> None:
    causal = model_of("attention", "qwen3", offloaded=True, with_kernels=PLAIN)
    for training in (False, True):
        causal.train(training)
        with torch.no_grad():
            forward(causal)
    torch.autograd.backward(forward(causal))


@pytest.mark.parametrize(
    "model_type", ["qwen3", "llama", "mistral", "qwen2", "seed_oss", *MIXTURES]
)
def test_plans_count_kept_queries_and_keys(model_type: str) -> None:
    causal = model_of("none", model_type)
    products: list[Tensor] = []
    for name, module in causal.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.register_forward_hook(lambda module, inputs, result: products.append(result))
    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward(causal)
    found = {product.untyped_storage().data_ptr() in saved for product in products}

    shape = architecture(causal.config.to_dict())
    own, normed = (
        ModelProfile((), like, True, False).stored_bytes("none")
        for like in (shape, replace(shape, model_type="qwen3"))
    )
    least = normed - 2 * (shape.query_width + shape.key_value_width)
    assert own == (normed if found == {True} else least)
    assert len(found) == 1


def products_of_a_step(causal: PreTrainedModel) -> Counter[str]:
    """Return the number of matmuls of forward and backward, with those of experts apart."""
    causal.train()
    counts: Counter[str] = Counter()
    passes = ["forward"]

    def note(operation: Any, _arguments: Any, _result: Any) -> None:
        grouped = operation is torch.ops.aten._grouped_mm.default
        if grouped or operation in PRODUCTS:
            counts[f"experts' {passes[-1]}" if grouped else passes[-1]] += 1

    with Watching(note):
        ids = torch.arange(16)[None]
        hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
        passes.append("backward")
        torch.autograd.backward(hidden.sum())
    return counts


@pytest.mark.parametrize("linear", [torch._C._nn.linear, zero3_linear_wrap])
@pytest.mark.parametrize(
    ("policy", "repeated"), [("none", 0), ("selective", 0), ("attention", 6), ("full", 6)]
)
def test_selective_repeats_no_matrix_product(
    policy: checkpointing.Policy,
    repeated: int,
    linear: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer of Qwen3 has seven products, with two gradients each; backward needs not the last."""
    # DeepSpeed puts its own there under ZeRO-3.
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    products = products_of_a_step(model_of(policy, "qwen3", fused=False))
    layers = SHAPE["num_hidden_layers"]
    assert products == {"forward": 7 * layers, "backward": (14 + repeated) * layers}


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize(
    ("policy", "repeated"), [("none", 0), ("selective", 0), ("attention", 1), ("full", 1)]
)
def test_selective_repeats_no_product_of_experts(
    policy: checkpointing.Policy, repeated: int, model_type: str
) -> None:
    """Theirs are two a layer. The second one, which backward does not need, is never repeated."""
    products = products_of_a_step(model_of(policy, model_type))
    layers = SHAPE["num_hidden_layers"]
    assert products["experts' forward"] == 2 * layers
    assert products["experts' backward"] == (4 + repeated) * layers


@pytest.mark.parametrize(
    ("policy", "model_type"), pairs(["full", "attention"], ["qwen3", "phi3", "gemma3_text", "gpt2"])
)
def test_tiles_change_no_loss_and_no_gradient(
    policy: checkpointing.Policy, model_type: str
) -> None:
    """Of 256 tokens, 100 at a time."""
    agree(trained(policy, model_type, tile=100), trained(policy, model_type), 1e-4, 1e-7)


@pytest.mark.parametrize("policy", ["full", "attention"])
def test_norms_in_tiles_make_no_whole_float32_copy(policy: checkpointing.Policy) -> None:
    """In all passes of a micro-batch in bf16; no tensor of attention is as wide."""
    counts = {0: 0, 32: 0}
    for tile in counts:
        causal: Any = model_of(
            policy, "llama", tile=tile, fused=False, dtype=torch.bfloat16, head_dim=24
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
    """Return the multiplications of the matmuls of a forward and a backward pass."""
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
