"""What is kept or computed again changes memory and time, never the numbers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedModel

from so_tui.model.profile import ModelProfile
from so_tui.model.shape import architecture
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.model import attention, checkpointing, fused
from so_tui_trainer.model.checkpointing import HostActivations, Room
from so_tui_trainer.model.config import load_config
from tests.support.attention import PLAIN
from tests.support.models import another, are_close, causal_model, grad_of
from tests.support.problems import coded
from tests.support.small_training import (
    EXPERTS,
    MIXTURES,
    QUERIES,
    SHAPE,
    Products,
    forward,
    model_of,
    pairs,
    trained,
)


@pytest.mark.parametrize(
    ("policy", "model_type"),
    pairs(["full", "attention", "selective"], ["qwen3", "llama", "phi3", "seed_oss", *MIXTURES]),
)
def test_recomputing_keeps_loss_and_gradients(
    policy: checkpointing.Policy, model_type: str
) -> None:
    expected, gradients = trained("none", model_type)
    found, ours = trained(policy, model_type)
    assert found == expected
    are_close(ours, gradients, 1e-5, 1e-7)


@pytest.mark.parametrize(
    ("kind", "noise"), [("phimoe", {}), ("mixtral", {"router_jitter_noise": 0.1})]
)
def test_random_routers_draw_the_same_again(kind: str, noise: dict[str, float]) -> None:
    """Else backward has the gradients of experts that forward did not choose."""
    config = AutoConfig.for_model(
        kind, **SHAPE, **{key: value for key, value in EXPERTS.items() if key not in SHAPE}, **noise
    )

    def trained_with(policy: checkpointing.Policy) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)
        causal = causal_model(config, dtype=torch.float32, attention="eager")
        checkpointing.install(causal, policy)
        causal.train()
        loss = forward(causal)
        torch.autograd.backward(loss)
        return loss.item(), {
            name: grad_of(parameter) for name, parameter in causal.named_parameters()
        }

    expected, gradients = trained_with("none")
    found, ours = trained_with("full")
    assert found == expected
    are_close(ours, gradients, 1e-5, 1e-7)


@pytest.mark.parametrize(
    ("policy", "model_type"),
    pairs(["full", "attention", "selective"], ["qwen3", "gemma3_text", "gpt2", *MIXTURES]),
)
def test_inputs_in_host_memory_change_no_bit(policy: checkpointing.Policy, model_type: str) -> None:
    """Nor does a second micro-batch, which reuses the memory of the first."""
    expected, gradients = trained(policy, model_type, passes=2)
    found, ours = trained(policy, model_type, passes=2, offloaded=True)
    assert found == expected
    are_close(ours, gradients, 0.0, 0.0)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", *MIXTURES])
def test_attentions_results_in_host_memory_change_no_bit(model_type: str) -> None:
    """gpt-oss has sinks, Gemma 3 windows."""
    expected, gradients = trained("attention", model_type, passes=2, with_kernels=PLAIN)
    found, ours = trained("attention", model_type, passes=2, with_kernels=PLAIN, offloaded=True)
    assert found == expected
    are_close(ours, gradients, 0.0, 0.0)


def test_a_layer_that_runs_twice_is_refused_with_offload() -> None:
    """There is memory for one input of each layer."""
    causal = model_of("full", "qwen3", offloaded=True)
    layers: Any = causal.model.layers
    layers.append(layers[0])
    causal.config.num_hidden_layers += 1
    causal.config.layer_types = ["full_attention"] * len(layers)
    with pytest.raises(TrainingError) as refused:
        forward(causal)
    assert refused.value.code == "layer-inputs-unforeseen"
    assert "activation_offload" in refused.value.suggestion


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["full", "attention", "selective"])
def test_inputs_in_pinned_memory_change_nothing_on_a_gpu(policy: checkpointing.Policy) -> None:
    """Their copies run beside the computation: one that came too late would leave other numbers."""
    expected, gradients = trained(policy, passes=4, device="cuda")
    found, ours = trained(policy, passes=4, offloaded=True, device="cuda")
    assert found == pytest.approx(expected, rel=1e-6)
    are_close(ours, gradients, 1e-4, 1e-6)


@pytest.mark.gpu
def test_attentions_results_go_to_pinned_memory_on_a_gpu() -> None:
    """On a stream of their own; numbers are those of keeping them on the GPU."""
    expected, gradients = trained("attention", passes=4, device="cuda", with_kernels=PLAIN)
    found, ours = trained("attention", passes=4, device="cuda", with_kernels=PLAIN, offloaded=True)
    assert found == pytest.approx(expected, rel=1e-6)
    are_close(ours, gradients, 1e-4, 1e-6)

    causal = model_of("attention", "qwen3", device="cuda", offloaded=True, with_kernels=PLAIN)
    batch_bytes: list[int] = []
    for layer in checkpointing.checkpointed_layers(causal):
        layer.register_forward_pre_hook(
            lambda module, arguments: batch_bytes.append(arguments[0].nbytes)
        )
    with BetweenHostAndGpu() as copies:
        torch.autograd.backward(forward(causal))
    inputs = batch_bytes[0]
    sizes = [
        inputs,
        inputs * QUERIES // SHAPE["hidden_size"],
        inputs * SHAPE["num_attention_heads"] // SHAPE["hidden_size"],
    ]
    layers = SHAPE["num_hidden_layers"]
    apart = [copy for copy in copies.seen if copy.apart]
    assert [copy.nbytes for copy in apart if copy.to_host] == sizes * layers
    assert [copy.nbytes for copy in apart if not copy.to_host] == sizes * (layers - 1), (
        "the last layer's are still on the GPU"
    )
    assert all(copy.pinned for copy in apart)


def test_only_the_last_layers_input_stays_on_the_gpu() -> None:
    """The graph that backward follows holds no other tensor of a layer's input."""
    causal = model_of("full", "qwen3", offloaded=True)
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    for layer in checkpointing.checkpointed_layers(causal):
        layer.register_forward_pre_hook(
            lambda module, arguments: seen.append(weakref.ref(arguments[0].untyped_storage()))
        )
    loss = forward(causal)
    assert [storage() is None for storage in seen] == [True] * (SHAPE["num_hidden_layers"] - 1) + [
        False
    ]
    torch.autograd.backward(loss)
    assert not any(storage() for storage in seen)


def test_only_the_last_layers_results_stay_on_the_gpu() -> None:
    """Backward reads the others from the host, and computes none again."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def noted(*arguments: Any) -> tuple[Tensor, Tensor]:
        results = PLAIN.forward(*arguments)
        seen.extend(weakref.ref(tensor.untyped_storage()) for tensor in results)
        return results

    causal = model_of(
        "attention", "qwen3", offloaded=True, with_kernels=PLAIN._replace(forward=noted)
    )
    loss = forward(causal)
    layers = SHAPE["num_hidden_layers"]
    assert [storage() is None for storage in seen] == [True] * 2 * (layers - 1) + [False] * 2
    torch.autograd.backward(loss)
    assert len(seen) == 2 * layers
    assert not any(storage() for storage in seen)


def test_backward_fetches_one_layer_ahead() -> None:
    """Its input before that layer's attention, its results once that layer has taken its own."""
    causal: Any = model_of("attention", "qwen3", offloaded=True, with_kernels=PLAIN)
    layers = SHAPE["num_hidden_layers"]
    with Copies() as copies:
        for layer in causal.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, arguments: copies.seen.append("attention")
            )
            layer.mlp.register_forward_pre_hook(lambda module, arguments: copies.seen.append("mlp"))
        loss = forward(causal)
        assert (
            copies.seen[: 5 * layers]
            == ["input", "attention", "result", "log-sum-exp", "mlp"] * layers
        )
        copies.seen.clear()
        torch.autograd.backward(loss)
    assert copies.seen == ["input", "attention", "result", "log-sum-exp", "mlp"] * (layers - 1) + [
        "attention",
        "mlp",
    ]


def test_more_attention_in_a_layer_than_is_planned_is_refused() -> None:
    rooms = [Room(SHAPE["num_hidden_layers"], 1 << 20), Room(1, 1 << 20), Room(1, 1 << 20)]
    host = HostActivations(rooms[0], rooms[1:], torch.device("cpu"))
    torch.manual_seed(0)
    causal = causal_model(
        AutoConfig.for_model("qwen3", **SHAPE),
        dtype=torch.float32,
        attention=attention.register(PLAIN),
    )
    checkpointing.install(causal, "attention", host)
    causal.train()
    with coded(TrainingError, "layer-inputs-unforeseen"):
        forward(causal)


def test_evaluation_leaves_nothing_in_host_memory() -> None:
    causal = model_of("attention", "qwen3", offloaded=True, with_kernels=PLAIN)
    causal.train(False)
    with torch.no_grad():
        forward(causal)
    causal.train()
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


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names what is copied, by the shape of its last dimension."""

    NAMES: ClassVar[dict[int, str]] = {SHAPE["hidden_size"]: "input", SHAPE["head_dim"]: "result"}

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.seen.append(self.NAMES.get(arguments[0].shape[-1], "log-sum-exp"))
        return function(*arguments, **(keywords or {}))


class CopyBetween(NamedTuple):
    to_host: bool
    nbytes: int
    pinned: bool
    apart: bool
    """On another stream than the one that computes."""


class BetweenHostAndGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the copies between host and GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[CopyBetween] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default and arguments[0].device != arguments[1].device:
            target, source = arguments[:2]
            host = source if target.is_cuda else target
            apart = torch.cuda.current_stream() != torch.cuda.default_stream()
            self.seen.append(CopyBetween(source.is_cuda, target.nbytes, host.is_pinned(), apart))
        return function(*arguments, **(keywords or {}))


def products_of_a_step(causal: PreTrainedModel, policy: checkpointing.Policy) -> Counter[str]:
    """Return how many matrix products forward and backward compute."""
    checkpointing.install(causal, policy)
    causal.train()
    with Products() as products:
        hidden = causal.base_model(
            input_ids=torch.arange(16)[None], use_cache=False
        ).last_hidden_state
        products.label = "backward"
        torch.autograd.backward(hidden.sum())
    counts: Counter[str] = products.counts
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
    torch.manual_seed(0)
    causal = causal_model(
        AutoConfig.for_model("qwen3", **SHAPE), dtype=torch.float32, attention="sdpa"
    )
    products = products_of_a_step(causal, policy)
    layers = SHAPE["num_hidden_layers"]
    assert products["forward"] == 7 * layers
    assert products["backward"] == (14 + repeated) * layers


@pytest.mark.parametrize(("kind", "all_products"), [("falcon_h1", 9), ("hunyuan_v1_dense", 7)])
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_the_last_product_of_odd_layers_is_not_repeated(
    policy: checkpointing.Policy, kind: str, all_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon-H1 lists its feed-forward block first; HunYuan's knows its layer's number."""
    repeated = all_products - 1 if policy == "full" else 0
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    torch.manual_seed(0)
    causal = causal_model(load_config(another(kind)), dtype=torch.float32, attention="eager")
    products = products_of_a_step(causal, policy)
    layers = len(checkpointing.checkpointed_layers(causal))
    assert products["forward"] == all_products * layers
    assert products["backward"] == (2 * all_products + repeated) * layers


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize(
    ("policy", "repeated"), [("none", 0), ("selective", 0), ("attention", 1), ("full", 1)]
)
def test_selective_repeats_no_product_of_experts(
    policy: checkpointing.Policy, repeated: int, model_type: str
) -> None:
    """Theirs are two a layer. The second one, which backward does not need, is never repeated."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, **SHAPE, **{key: value for key, value in EXPERTS.items() if key not in SHAPE}
    )
    causal = causal_model(config, dtype=torch.float32, attention="eager")
    fused.install_kernels(causal, [fused.EXPERTS])
    products = products_of_a_step(causal, policy)
    layers = SHAPE["num_hidden_layers"]
    assert products["experts' forward"] == 2 * layers
    assert products["experts' backward"] == (4 + repeated) * layers
