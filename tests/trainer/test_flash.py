"""Flash attention with and without sinks: the mathematics in float64, against transformers' own eager attention of gpt-oss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from so_tui_trainer.model.flash import FLASH, Documents, Kernels, attend
from tests.support.attention import PLAIN, visible

LENGTHS = (1, 37, 5, 64, 21)
HEADS, KEY_HEADS, SIZE = 6, 2, 16


def case(window: int | None, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], Tensor, Documents]:
    """Query, key, value and sinks; the gradient that comes back; the documents."""
    torch.manual_seed(3)
    tokens = sum(LENGTHS)
    shapes = [(tokens, HEADS, SIZE), (tokens, KEY_HEADS, SIZE), (tokens, KEY_HEADS, SIZE), (HEADS,)]
    inputs = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    boundaries = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    return inputs, torch.randn(shapes[0]).to(device, dtype), Documents(boundaries, max(LENGTHS), SIZE**-0.5, window)


def eager(inputs: list[Tensor], documents: Documents) -> Tensor:
    query, key, value, sinks = inputs
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, sinks=sinks, training=True)
    mask = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(~visible(documents), torch.finfo(query.dtype).min)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out: Tensor = eager_attention_forward(module, queries, keys, values, mask[None, None], documents.scale)[0][0]
    return out


def attended(inputs: list[Tensor], documents: Documents, kernels: Kernels) -> Tensor:
    query, key, value, sinks = inputs
    return attend(query, key, value, sinks, documents, kernels)


def results(out: Tensor, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


@pytest.mark.parametrize("window", [None, 1, 8])
def test_outputs_and_every_gradient_are_those_of_eager_attention(window: int | None) -> None:
    inputs, gradient, documents = case(window, torch.float64)
    expected = results(eager(inputs, documents), inputs, gradient)
    found = results(attended(inputs, documents, PLAIN), inputs, gradient)
    for name, one, other in zip(("out", "query", "key", "value", "sinks"), found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=name)
    assert expected[-1].abs().min() > 1e-3  # the sinks have a part in it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 8])
def test_torchs_flash_kernel_with_sinks_is_as_near_to_the_truth_as_eager_attention(window: int | None) -> None:
    exact_inputs, exact_gradient, exact_documents = case(window, torch.float64)
    exact = results(eager(exact_inputs, exact_documents), exact_inputs, exact_gradient)
    inputs, gradient, documents = case(window, torch.bfloat16, "cuda")
    rounded = results(eager(inputs, documents), inputs, gradient)
    found = results(attended(inputs, documents, FLASH), inputs, gradient)
    for name, one, other, truth in zip(("out", "query", "key", "value", "sinks"), found, rounded, exact, strict=True):
        error, usual = ((tensor.cpu().double() - truth).norm() / truth.norm() for tensor in (one, other))
        assert error < max(0.02, 2 * usual), name
