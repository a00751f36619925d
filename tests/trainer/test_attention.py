"""Attention by kernels, with sinks, windows and caps: against eager attention in float64."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from benchmarks.attention import planned_table, table
from so_tui.spec import InputError
from so_tui.spec.attention import KERNELS, UNKNOWN_GPU, Needs, choose_backend
from so_tui_trainer.model import apply
from so_tui_trainer.model.attention import Documents, Kernels, _Attention, present, register
from tests.support.attention import PLAIN, backends, visible

NAMES = ("out", "query", "key", "value", "sinks")
LENGTHS = (1, 37, 5, 64, 21)
HEADS, KEY_HEADS, SIZE = 6, 2, 16
ROUNDING = sum(LENGTHS) ** 2 * 2**6 * 2**-53
"""Most by which sums in another order differ: of as many terms as tokens, each below 2**6."""


def case(
    window: int | None, dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[Tensor], Tensor, Documents]:
    """Query, key, value and sinks; the gradient that comes back; the documents."""
    # Nothing else in this process draws from this generator.
    drawn = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS)
    shapes = [(tokens, HEADS, SIZE), (tokens, KEY_HEADS, SIZE), (tokens, KEY_HEADS, SIZE), (HEADS,)]
    inputs = [
        torch.randn(shape, generator=drawn).to(device, dtype).requires_grad_() for shape in shapes
    ]
    boundaries = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    return (
        inputs,
        torch.randn(shapes[0], generator=drawn).to(device, dtype),
        Documents(boundaries, max(LENGTHS), SIZE**-0.5, window),
    )


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


@pytest.mark.parametrize("window", [None, 1, 8])
def test_outputs_and_every_gradient_are_those_of_eager_attention(window: int | None) -> None:
    inputs, gradient, documents = case(window, torch.float64)
    expected = results(eager(inputs, documents), inputs, gradient)
    found = results(attended(inputs, documents, PLAIN), inputs, gradient)
    for name, one, other in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-10, atol=ROUNDING, msg=f"{name}: {{}}".format
        )
    assert expected[-1].abs().min() > 1e-3  # the sinks have a part in it


@pytest.mark.parametrize("window", [None, 8])
def test_capped_scores_give_every_gradient(window: int | None) -> None:
    inputs, gradient, documents = case(window, torch.float64)
    documents = documents._replace(softcap=1.5)
    query, key, value, sinks = inputs
    keys, values = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    found = 1.5 * (torch.einsum("qhd,khd->hqk", query, keys) * documents.scale / 1.5).tanh()
    with_sinks = torch.cat(
        [
            found.masked_fill(~visible(documents), -torch.inf),
            sinks[:, None, None].expand(-1, len(query), 1),
        ],
        dim=-1,
    )
    out = torch.einsum("hqk,khd->qhd", with_sinks.softmax(-1)[..., :-1], values)
    expected = results(out, inputs, gradient)
    for name, one, other in zip(
        NAMES, results(attended(inputs, documents, PLAIN), inputs, gradient), expected, strict=True
    ):
        torch.testing.assert_close(
            one, other, rtol=1e-10, atol=ROUNDING, msg=f"{name}: {{}}".format
        )


def test_values_with_smaller_heads_than_keys_are_attended() -> None:
    """DeepSeek's latent attention, through the adapter that transformers calls."""
    torch.manual_seed(3)
    tokens = sum(LENGTHS)
    query, key = (
        torch.randn(1, heads, tokens, SIZE, dtype=torch.float64) for heads in (HEADS, KEY_HEADS)
    )
    value = torch.randn(1, KEY_HEADS, tokens, SIZE - 6, dtype=torch.float64)
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    known: Any = AttentionInterface
    attention = known()[register(PLAIN)]
    out, _ = attention(
        None,
        query,
        key,
        value,
        None,
        scaling=0.25,
        cu_seq_lens_q=boundaries,
        max_length_q=max(LENGTHS),
    )
    keys, values = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    mask = visible(Documents(boundaries, max(LENGTHS), 0.25))
    expected = scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=0.25
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_a_mask_of_the_models_own_is_refused_not_left_out() -> None:
    (query, key, value, _), _, documents = case(None, torch.float64)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    mask = torch.zeros(1, 1, len(query), len(query), dtype=torch.float64)
    known: Any = AttentionInterface
    attention = known()[register(PLAIN)]
    with pytest.raises(InputError) as raised:
        attention(
            None,
            queries,
            keys,
            values,
            mask,
            scaling=1.0,
            cu_seq_lens_q=documents.boundaries,
            max_length_q=documents.longest,
        )
    assert [(problem.code, problem.field) for problem in raised.value.problems] == [
        ("model-packing-unsupported", "model.config")
    ]


def on_gpu(
    size: int, dtype: torch.dtype, device: str, **options: Any
) -> tuple[list[Tensor], Tensor, Documents]:
    """Longer documents than ``case``, of several tiles, one of them a single token."""
    lengths, heads, key_heads = (1, 700, 5, 1024, 130), 8, 2
    torch.manual_seed(3)
    tokens = sum(lengths)
    shapes = [(tokens, heads, size), (tokens, key_heads, size), (tokens, key_heads, size), (heads,)]
    inputs = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return (
        inputs,
        torch.randn(shapes[0]).to(device, dtype),
        Documents(boundaries, max(lengths), size**-0.5, **options),
    )


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
    exact_inputs, exact_gradient, exact_documents = on_gpu(size, torch.float64, "cuda", **options)
    exact = results(attended(exact_inputs, exact_documents, PLAIN), exact_inputs, exact_gradient)
    inputs, gradient, documents = on_gpu(size, torch.bfloat16, "cuda", **options)
    rounded = results(attended(inputs, documents, PLAIN), inputs, gradient)
    found = results(attended(inputs, documents, available[backend]), inputs, gradient)
    for name, one, other, truth in zip(NAMES, found, rounded, exact, strict=True):
        error, usual = ((tensor.double() - truth).norm() / truth.norm() for tensor in (one, other))
        assert error < max(0.02, 2 * usual), name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [kernel.name for kernel in KERNELS])
def test_deterministic_backward_passes_repeat_bit_for_bit(backend: Any) -> None:
    available = backends(Needs(head_size=128, deterministic=True))
    if backend not in available:
        pytest.skip("cannot be used here")
    inputs, gradient, documents = on_gpu(128, torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            [
                one.clone()
                for one in results(
                    attended(inputs, documents, available[backend]), inputs, gradient
                )
            ]
            for _ in range(4)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(
        torch.equal(one, same) for other in others for one, same in zip(first, other, strict=True)
    )


@pytest.mark.parametrize(
    ("results", "tables"),
    [
        ("attention-h200", table),
        ("attention-h200-second", table),
        ("length-h200", planned_table),
        ("length-h200-x2", planned_table),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_docs_show_what_was_measured(
    results: str, tables: Callable[[list[dict[str, Any]]], str]
) -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks" / "results" / f"{results}.json").read_text())
    shown = (root / "docs" / "attention.md").read_text()
    assert all(part in shown for part in tables(rows).split("\n\n"))


def test_amds_numbers_are_not_taken_for_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ROCm torch calls an MI300A 9.4, as if it were a Hopper."""
    monkeypatch.setattr(torch.version, "hip", "7.0.1")
    here = present(torch.device("cuda", 0))
    assert here.generation == UNKNOWN_GPU
    everything = replace(here, packages=frozenset(kernel.package for kernel in KERNELS))
    assert choose_backend(Needs(head_size=128), everything).backend == "torch-flash"
