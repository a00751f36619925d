"""Attention by kernels, with sinks, windows and caps: against eager attention in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from so_tui.spec.attention import KERNELS, UNKNOWN_GPU, Needs, choose_backend
from so_tui_trainer.model import apply
from so_tui_trainer.model.attention import Documents, Kernels, _Attention, present, register
from tests.support.attention import PLAIN, backends, scores, visible
from tests.support.problems import rejected

NAMES = ("out", "query", "key", "value", "sinks")
LENGTHS = (1, 37, 5, 64, 21)
HEADS, KEY_HEADS, SIZE = 6, 2, 16
ROUNDING = sum(LENGTHS) ** 2 * 2**6 * 2**-53
"""Most by which sums in another order differ: of as many terms as tokens, each below 2**6."""


def case(
    window: int | None,
    dtype: torch.dtype,
    device: str = "cpu",
    lengths: tuple[int, ...] = LENGTHS,
    heads: tuple[int, int, int] = (HEADS, KEY_HEADS, SIZE),
    **options: Any,
) -> tuple[list[Tensor], Tensor, Documents]:
    """Query, key, value and sinks; the gradient that comes back; the documents."""
    # Nothing else in this process draws from this generator.
    drawn = torch.Generator().manual_seed(3)
    (count, key_count, size), tokens = heads, sum(lengths)
    keys = (tokens, key_count, size)
    inputs = [
        torch.randn(shape, generator=drawn).to(device, dtype).requires_grad_()
        for shape in ((tokens, count, size), keys, keys, (count,))
    ]
    gradient = torch.randn(inputs[0].shape, generator=drawn).to(device, dtype)
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return inputs, gradient, Documents(boundaries, max(lengths), size**-0.5, window, **options)


def on_gpu(
    size: int, dtype: torch.dtype, window: int | None = None, **options: Any
) -> tuple[list[Tensor], Tensor, Documents]:
    return case(window, dtype, "cuda", LONG, (8, 2, size), **options)


def eager(inputs: list[Tensor], documents: Documents) -> Tensor:
    query, key, value, sinks = inputs
    module: Any = SimpleNamespace(
        num_key_value_groups=HEADS // KEY_HEADS, sinks=sinks, training=True
    )
    mask = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(
        ~visible(documents), torch.finfo(query.dtype).min
    )
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out: Tensor = eager_attention_forward(
        module, queries, keys, values, mask[None, None], documents.scale
    )[0][0]
    return out


def attended(inputs: list[Tensor], documents: Documents, kernels: Kernels) -> Tensor:
    query, key, value, sinks = inputs
    return apply(_Attention, query, key, value, sinks, documents, kernels)


def results(out: Tensor, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def are_close_to(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-10, atol=ROUNDING, msg=f"{name}: {{}}".format
        )


@pytest.mark.parametrize("window", [None, 1, 8])
def test_outputs_and_every_gradient_are_those_of_eager_attention(window: int | None) -> None:
    inputs, gradient, documents = case(window, torch.float64)
    expected = results(eager(inputs, documents), inputs, gradient)
    are_close_to(results(attended(inputs, documents, PLAIN), inputs, gradient), expected)
    assert expected[-1].abs().min() > 1e-3  # the sinks have a part in it


@pytest.mark.parametrize("window", [None, 8])
def test_capped_scores_give_every_gradient(window: int | None) -> None:
    inputs, gradient, documents = case(window, torch.float64, softcap=1.5)
    query, key, value, sinks = inputs
    seen = scores(query, key, documents).masked_fill(~visible(documents), -torch.inf)
    with_sinks = torch.cat([seen, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    values = value.repeat_interleave(HEADS // KEY_HEADS, dim=1)
    out = torch.einsum("hqk,khd->qhd", with_sinks.softmax(-1)[..., :-1], values)
    found = results(attended(inputs, documents, PLAIN), inputs, gradient)
    are_close_to(found, results(out, inputs, gradient))


def test_a_mask_of_the_models_own_is_refused_not_left_out() -> None:
    """By the adapter that transformers calls with [1, heads, tokens, size]."""
    inputs, _, documents = case(None, torch.float64)
    given = [tensor.transpose(0, 1)[None] for tensor in inputs[:3]]
    mask = torch.zeros(1, 1, sum(LENGTHS), sum(LENGTHS), dtype=torch.float64)
    known: Any = AttentionInterface
    boundaries = {"cu_seq_lens_q": documents.boundaries, "max_length_q": documents.longest}
    with rejected("model-packing-unsupported", field="model.config"):
        known()[register(PLAIN)](None, *given, mask, scaling=documents.scale, **boundaries)


LONG = (1, 700, 5, 1024, 130)
"""Documents of several tiles, and one of a single token."""


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [kernel.name for kernel in KERNELS])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (64, {}),
        (128, {}),
        (256, {}),
        (64, {"window": 128}),
        (128, {"window": 100}),
        (128, {"softcap": 5.0}),
        (80, {}),
        (96, {}),
        (192, {}),
    ],
    ids=str,
)
def test_backends_err_no_more_than_plain(backend: Any, size: int, options: dict[str, Any]) -> None:
    """bf16 with sinks, against float64: twice the error of plain attention in bf16 at most."""
    available = backends(Needs(head_size=size, sinks=True, softcap="softcap" in options))
    if backend not in available:
        pytest.skip("cannot be used here")
    inputs, gradient, documents = on_gpu(size, torch.float64, **options)
    exact = results(attended(inputs, documents, PLAIN), inputs, gradient)
    inputs, gradient, documents = on_gpu(size, torch.bfloat16, **options)
    rounded = results(attended(inputs, documents, PLAIN), inputs, gradient)
    found = results(attended(inputs, documents, available[backend]), inputs, gradient)
    for name, one, other, truth in zip(NAMES, found, rounded, exact, strict=True):
        error, usual = ((tensor.double() - truth).norm() / truth.norm() for tensor in (one, other))
        assert error < max(0.02, 2 * usual), name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [kernel.name for kernel in KERNELS])
def test_deterministic_backward_passes_repeat_bit_for_bit(backend: Any) -> None:
    available = backends(Needs(head_size=128))
    if backend not in available:
        pytest.skip("cannot be used here")
    inputs, gradient, documents = on_gpu(128, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            results(attended(inputs, documents, available[backend]), inputs, gradient)
            for _ in range(4)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(all(map(torch.equal, first, other)) for other in others)


def test_amds_numbers_are_not_taken_for_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ROCm torch calls an MI300A 9.4, as if it were a Hopper."""
    monkeypatch.setattr(torch.version, "hip", "7.0.1")
    here = present(torch.device("cuda", 0))
    assert here.generation == UNKNOWN_GPU
    everything = replace(here, packages=frozenset(kernel.package for kernel in KERNELS))
    assert choose_backend(Needs(head_size=128), everything).backend == "torch-flash"
