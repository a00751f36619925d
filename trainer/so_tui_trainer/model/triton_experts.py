"""Triton kernels of ``experts``. Imported only with a CUDA device, like ``cuda``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from so_tui_trainer.model.kernels import Gate

_COLUMNS = 1024


def sums(rows: Tensor, row_of_pair: Tensor) -> Tensor:
    """Sum the rows of each token.

    Args:
        rows: [pairs, columns]
        row_of_pair: [tokens, k]

    Returns:
        [tokens, columns]
    """
    rows, (tokens, count), columns = rows.contiguous(), row_of_pair.shape, rows.shape[1]
    result = rows.new_empty(tokens, columns)
    if tokens:
        _sums_kernel[(tokens, triton.cdiv(columns, _COLUMNS))](
            rows, row_of_pair, result, columns, count=count, block=_COLUMNS
        )
    return result


def gated(
    products: Tensor,
    shares: Tensor,
    order: Tensor,
    bias: Tensor | None,
    experts: Tensor | None,
    gate: Gate,
) -> Tensor:
    """Apply the gate and the routing weights.

    Args:
        products: [pairs, 2 columns]
        shares: [tokens, k]
        order: [pairs]
        bias: [experts, 2 columns], or None.
        experts: [pairs], the expert of each row; None without bias.
        gate: The activation.

    Returns:
        [pairs, columns]
    """
    rows, columns = products.shape[0], products.shape[1] // 2
    result = products.new_empty(rows, columns)
    if rows:
        _gated_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
            products.contiguous(), shares.contiguous(), order, bias, experts, result, columns,
            gate.alpha, gate.limit, gate.shift, interleaved=gate.interleaved, block=_COLUMNS,
        )  # fmt: skip
    return result


def gated_backward(
    gradient: Tensor,
    products: Tensor,
    shares: Tensor,
    order: Tensor,
    bias: Tensor | None,
    experts: Tensor | None,
    gate: Gate,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``products`` and ``shares``."""
    rows, columns = products.shape[0], products.shape[1] // 2
    of_products, of_shares = products.new_empty(products.shape), shares.new_empty(shares.shape)
    if rows:
        _gated_backward_kernel[(rows,)](
            gradient.contiguous(), products.contiguous(), shares.contiguous(), order, bias, experts,
            of_products, of_shares, columns, gate.alpha, gate.limit, gate.shift,
            interleaved=gate.interleaved, block=_COLUMNS,
        )  # fmt: skip
    return of_products, of_shares


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(  # type: ignore[no-untyped-def]
    rows, row_of_pair, result, columns, count: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(count):
        row = tl.load(row_of_pair + token * count + choice)
        total += tl.load(rows + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * columns + column, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _halves(  # type: ignore[no-untyped-def]
    row, first, columns, interleaved: tl.constexpr, block: tl.constexpr
):
    """Load gate and up of ``block`` columns from ``first`` on, of the row that begins at ``row``;
    fp32.
    """
    if interleaved:
        both = 2 * first + tl.arange(0, 2 * block)
        values = tl.load(row + both, mask=both < 2 * columns, other=0.0).to(tl.float32)
        gates, ups = tl.split(tl.reshape(values, [block, 2]))
    else:
        column = first + tl.arange(0, block)
        gates = tl.load(row + column, mask=column < columns, other=0.0).to(tl.float32)
        ups = tl.load(row + columns + column, mask=column < columns, other=0.0).to(tl.float32)
    return gates, ups


@triton.jit  # type: ignore[untyped-decorator]
def _with_bias(  # type: ignore[no-untyped-def]
    products, bias, experts, row, first, columns, interleaved: tl.constexpr, block: tl.constexpr
):
    gates, ups = _halves(products + row * 2 * columns, first, columns, interleaved, block)
    if bias is not None:
        of_expert = bias + tl.load(experts + row).to(tl.int64) * 2 * columns
        more_gates, more_ups = _halves(of_expert, first, columns, interleaved, block)
        gates, ups = gates + more_gates, ups + more_ups
    return gates, ups


@triton.jit  # type: ignore[untyped-decorator]
def _gated_kernel(  # type: ignore[no-untyped-def]
    products,
    shares,
    order,
    bias,
    experts,
    result,
    columns,
    alpha,
    limit,
    shift,
    interleaved: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * block
    column = first + tl.arange(0, block)
    share = tl.load(shares + tl.load(order + row)).to(tl.float32)
    gates, ups = _with_bias(products, bias, experts, row, first, columns, interleaved, block)
    gates = tl.minimum(gates, limit)
    ups = tl.maximum(tl.minimum(ups, limit), -limit)
    tl.store(
        result + row * columns + column,
        gates * tl.sigmoid(alpha * gates) * (ups + shift) * share,
        mask=column < columns,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _gated_backward_kernel(  # type: ignore[no-untyped-def]
    gradient,
    products,
    shares,
    order,
    bias,
    experts,
    of_products,
    of_shares,
    columns,
    alpha,
    limit,
    shift,
    interleaved: tl.constexpr,
    block: tl.constexpr,
):
    """Process one row in one program, since the gradient of its share is a sum over the row."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + row)
    share = tl.load(shares + pair).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        inside = column < columns
        gradients = tl.load(gradient + row * columns + column, mask=inside, other=0.0).to(
            tl.float32
        )
        own_gates, own_ups = _with_bias(
            products, bias, experts, row, first, columns, interleaved, block
        )
        gates = tl.minimum(own_gates, limit)
        shifted = tl.maximum(tl.minimum(own_ups, limit), -limit) + shift
        sigmoid = tl.sigmoid(alpha * gates)
        total += gradients * gates * sigmoid * shifted
        of_gates = gradients * share * shifted * sigmoid * (1 + alpha * gates * (1 - sigmoid))
        of_gates = tl.where(own_gates <= limit, of_gates, 0.0)
        of_ups = tl.where(tl.abs(own_ups) <= limit, gradients * share * gates * sigmoid, 0.0)
        target = of_products + row * 2 * columns
        if interleaved:
            both = 2 * first + tl.arange(0, 2 * block)
            tl.store(target + both, tl.interleave(of_gates, of_ups), mask=both < 2 * columns)
        else:
            tl.store(target + column, of_gates, mask=inside)
            tl.store(target + columns + column, of_ups, mask=inside)
    tl.store(of_shares + pair, tl.sum(total, 0))
