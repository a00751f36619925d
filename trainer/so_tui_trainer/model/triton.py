"""Triton kernels. Imported only with a CUDA device: torch without CUDA comes without Triton.

Kernel arguments have no type annotations, which Triton would interpret.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
"""Elements of a row that one program takes: 8 for each of its 128 threads, the widest load."""


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``gate.gated`` on the GPU."""
    gate_rows, up_rows = _rows(gate), _rows(up)
    result = gate.new_empty(gate.shape)
    rows, columns = gate_rows.shape
    grid = (rows, triton.cdiv(columns, _COLUMNS))
    _gated_kernel[grid](
        gate_rows, up_rows, result, columns, gate_rows.stride(0), up_rows.stride(0), block=_COLUMNS
    )
    return result


def gated_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous."""
    gradient_rows, gate_rows, up_rows = _rows(gradient), _rows(gate), _rows(up)
    of_gate = gate.new_empty(gate.shape)
    of_up = torch.empty_like(of_gate)
    rows, columns = gate_rows.shape
    strides = gradient_rows.stride(0), gate_rows.stride(0), up_rows.stride(0)
    grid = (rows, triton.cdiv(columns, _COLUMNS))
    _gated_backward_kernel[grid](
        gradient_rows, gate_rows, up_rows, of_gate, of_up, columns, *strides, block=_COLUMNS
    )
    return of_gate, of_up


def turn(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Compute ``kernels.rotate`` on the GPU, or with ``direction`` -1 the transposed rotation: (g1
    cos1 + g2 sin2, g2 cos2 - g1 sin1).
    """
    rows, count, width, size = heads.shape
    result = heads.new_empty(rows, width, count, size).transpose(1, 2)
    if heads.stride(-1) != 1:
        heads = heads.contiguous()
    angles = cos.shape[-1]  # The head size, or half of it if both halves share the angles.
    cos, sin = (tensor.expand(rows, width, angles).contiguous() for tensor in (cos, sin))
    blocks = {
        "padded_count": triton.next_power_of_2(count),
        "padded_half": triton.next_power_of_2(size // 2),
    }
    _turn_kernel[(rows * width,)](
        heads,
        cos,
        sin,
        result,
        width,
        count,
        size // 2,
        angles,
        *heads.stride()[:3],
        *result.stride()[:3],
        direction=direction,
        **blocks,
    )
    return result


def log_sum_exp(logits: Tensor) -> Tensor:
    """Compute ``softmax.log_sum_exp`` on the GPU."""
    result = logits.new_empty(len(logits), dtype=torch.float32)
    if len(logits):
        _log_sum_exp_kernel[(len(logits),)](
            logits, result, logits.shape[1], logits.stride(0), block=_COLUMNS
        )
    return result


def cross_entropy_gradient(
    logits: Tensor, normaliser: Tensor, targets: Tensor, scale: float
) -> Tensor:
    """Compute ``softmax.cross_entropy_gradient`` on the GPU."""
    rows, columns = logits.shape
    if rows:
        grid = (rows, triton.cdiv(columns, _COLUMNS))
        _cross_entropy_gradient_kernel[grid](
            logits, normaliser, targets, scale, columns, logits.stride(0), block=_COLUMNS
        )
    return logits


def _rows(tensor: Tensor) -> Tensor:
    """View [..., columns] as [rows, columns]; copies only if the rows are not evenly spaced."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).flatten(0, -2)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate, up, result, columns, gate_stride, up_stride, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    gates = tl.load(gate + row * gate_stride + column, mask=inside).to(tl.float32)
    ups = tl.load(up + row * up_stride + column, mask=inside).to(tl.float32)
    tl.store(result + row * columns + column, gates * tl.sigmoid(gates) * ups, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_backward_kernel(  # type: ignore[no-untyped-def]
    gradient,
    gate,
    up,
    of_gate,
    of_up,
    columns,
    gradient_stride,
    gate_stride,
    up_stride,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    gradients = tl.load(gradient + row * gradient_stride + column, mask=inside).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + column, mask=inside).to(tl.float32)
    ups = tl.load(up + row * up_stride + column, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gates)
    tl.store(
        of_gate + row * columns + column,
        gradients * ups * sigmoid * (1 + gates * (1 - sigmoid)),
        mask=inside,
    )
    tl.store(of_up + row * columns + column, gradients * gates * sigmoid, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_kernel(  # type: ignore[no-untyped-def]
    heads,
    cos,
    sin,
    result,
    width,
    count,
    half,
    angles,
    row_stride,
    head_stride,
    position_stride,
    result_row_stride,
    result_head_stride,
    result_position_stride,
    direction: tl.constexpr,
    padded_count: tl.constexpr,
    padded_half: tl.constexpr,
):
    """Rotate all heads of one token in one program."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // width, token % width
    head = tl.arange(0, padded_count)[:, None]
    column = tl.arange(0, padded_half)[None, :]
    inside = (head < count) & (column < half)
    angle1 = token * angles + column
    angle2 = angle1 + angles - half
    cos1 = tl.load(cos + angle1, mask=column < half).to(tl.float32)
    cos2 = tl.load(cos + angle2, mask=column < half).to(tl.float32)
    sin1 = tl.load(sin + angle1, mask=column < half).to(tl.float32)
    sin2 = tl.load(sin + angle2, mask=column < half).to(tl.float32)
    source = heads + row * row_stride + position * position_stride + head * head_stride + column
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + half, mask=inside).to(tl.float32)
    target = (
        result
        + row * result_row_stride
        + position * result_position_stride
        + head * result_head_stride
        + column
    )
    if direction > 0:
        tl.store(target, first * cos1 - second * sin1, mask=inside)
        tl.store(target + half, second * cos2 + first * sin2, mask=inside)
    else:
        tl.store(target, first * cos1 + second * sin2, mask=inside)
        tl.store(target + half, second * cos2 - first * sin1, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_exp_kernel(  # type: ignore[no-untyped-def]
    logits, result, columns, stride, block: tl.constexpr
):
    """Reduce one row in one program. Every lane has its own maximum and sum until the end."""
    row = tl.program_id(0).to(tl.int64)
    # Finite, so that a lane without a column does not compute inf - inf.
    highest = tl.full([block], -1e30, tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        values = tl.load(logits + row * stride + column, mask=column < columns, other=-1e30).to(
            tl.float32
        )
        higher = tl.maximum(highest, values)
        total = total * tl.exp(highest - higher) + tl.exp(values - higher)
        highest = higher
    peak = tl.max(highest, 0)
    tl.store(result + row, peak + tl.log(tl.sum(total * tl.exp(highest - peak), 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_gradient_kernel(  # type: ignore[no-untyped-def]
    logits, normaliser, targets, scale, columns, stride, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    pointer = logits + row * stride + column
    softmax = tl.exp(tl.load(pointer, mask=inside).to(tl.float32) - tl.load(normaliser + row))
    softmax = tl.where(column == tl.load(targets + row), softmax - 1.0, softmax)
    tl.store(pointer, softmax * scale, mask=inside)
