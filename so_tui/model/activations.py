"""Bytes that a forward pass stores for backward, per token, by what is recomputed. Pure numbers.

Symbols: h hidden width, q and kv widths of queries and of keys (values), f feed-forward width that one token uses.
"""

from __future__ import annotations

from typing import Literal

from so_tui.model.architecture import Architecture
from so_tui.spec.sections.model import ModelSpec

Policy = Literal["full", "attention", "selective", "none"]
"""What backward recomputes: every block; a block except its attention; norms, rotary positions and activation functions; nothing."""
POLICIES: tuple[Policy, ...] = ("none", "selective", "attention", "full")
"""The fastest first."""

TILED_POLICIES: tuple[Policy, ...] = ("attention", "full")
"""Those with which feed-forward blocks can be cut into tiles: a block keeps nothing but its input."""
MLP_TILE_TOKENS = 8192

SINKS = frozenset({"gpt_oss"})
"""Model types whose attention has sinks: backward briefly holds one more tensor of the size of a layer's attention result. The gate of
their experts is clamped and shifted, and each of these operations stores a copy where they are not one kernel."""
_ROTATED_AS_THEY_COME = frozenset({"gpt_oss", "llama", "mistral", "qwen2", "seed_oss"})
"""Model types whose queries and keys are not stored before rotation: no norm comes before it, and values do not share their memory."""


def policy_of(model: ModelSpec) -> Policy:
    """Return what backward recomputes; ``auto`` counts as ``full``."""
    return "full" if model.activation_checkpointing == "auto" else model.activation_checkpointing


def offloads_inputs(model: ModelSpec) -> bool:
    """Return whether layer inputs are in host memory between forward and backward; ``auto`` counts as not."""
    return model.activation_offload in ("on", "inputs") and policy_of(model) != "none"


def offloads_results(model: ModelSpec) -> bool:
    """Return whether attention's results are in host memory between forward and backward; ``auto`` counts as not."""
    return model.activation_offload in ("on", "attention") and policy_of(model) == "attention"


def offloaded_bytes(shape: Architecture, model: ModelSpec) -> int:
    """Return what all layers keep in host memory between forward and backward, per token."""
    inputs = block_input_bytes(shape) * shape.layers if offloads_inputs(model) else 0
    results = (
        attention_bytes(shape) * (shape.layers - shape.other_layers)
        if offloads_results(model)
        else 0
    )
    return inputs + results


def tiles_mlp(model: ModelSpec) -> bool:
    """Return whether dense feed-forward blocks compute ``MLP_TILE_TOKENS`` at a time; ``auto`` counts as not."""
    return model.tiled_mlp == "on" and policy_of(model) in TILED_POLICIES


def in_tiles(model: ModelSpec, shape: Architecture, tokens: int) -> bool:
    """Return whether dense feed-forward blocks compute a micro-batch of ``tokens`` in more than one tile."""
    return tiles_mlp(model) and not shape.experts and tokens > MLP_TILE_TOKENS


def block_input_bytes(shape: Architecture) -> int:
    """Return the bytes of one block's input: 2 h."""
    return 2 * shape.hidden


def stored_bytes(shape: Architecture, policy: Policy, *, fused: bool) -> int:
    """Return what one block stores per token for backward, in bf16.

    full: its input. attention: that, and attention's result with 4 B a head (its log-sum-exp). selective: that, and the results of matrix
    products. none: 2 (4 h + 3 q + 3 kv + 3 f), which are the
    inputs of the block, of its norms and of its products, queries and keys before and after rotation, values, the attention's result, gate,
    up and their product; experts by those that a token uses (see ``expert_stored_bytes``). Where queries and keys are not stored before
    rotation it is 2 (q + kv) less. Fused experts store 16 B for each expert that a token uses whatever the policy: the index of its row in
    both directions.
    """
    h, q, kv, f = shape.hidden, shape.query_width, shape.key_value_width, shape.active_intermediate
    row_indices = 16 * shape.experts_per_token if fused else 0
    if policy == "full":
        return block_input_bytes(shape) + row_indices
    if policy == "attention":
        return block_input_bytes(shape) + attention_bytes(shape) + row_indices
    if policy == "selective":
        return block_input_bytes(shape) + product_bytes(shape, fused=fused) + row_indices
    feed_forward = expert_stored_bytes(shape, fused=fused) if shape.experts else 6 * f
    before_rotation = 0 if shape.model_type in _ROTATED_AS_THEY_COME else q + kv
    return (
        2 * (4 * h + 2 * (q + kv) + before_rotation) + 4 * shape.heads + feed_forward + row_indices
    )


def expert_stored_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return what a layer's experts store per token where nothing is recomputed, k of them of width f / k.

    2 k h + 6 f with fused kernels (rows, first products, second products' inputs), 4 k h + 8 f in transformers' path, 14 f with gpt-oss's
    clamped gate. The router stores its logits in bf16, their softmax and its fp32 copy, 8 B an expert. transformers' figures are what
    torch's memory profiler shows.
    """
    h, k, f = shape.hidden, shape.experts_per_token, shape.active_intermediate
    return (
        2 * k * h + 6 * f if fused else 4 * k * h + _plain_gate(shape) * f
    ) + _ROUTER_BYTES * shape.experts


def expert_peak_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return the most that a layer's experts hold per token in backward, recomputation included.

    Fused: in the second product's backward 4 k h + 8 f (rows and their gradient; products, inputs and the gradient of these), or in the
    gate's 2 k h + 10 f, once the products' gradient has arrived. In transformers' path 6 k h on top of what is stored, as torch's memory
    profiler shows.
    """
    h, k, f = shape.hidden, shape.experts_per_token, shape.active_intermediate
    own = (
        max(4 * k * h + 8 * f, 2 * k * h + 10 * f) if fused else 10 * k * h + _plain_gate(shape) * f
    )
    return own + _ROUTER_BYTES * shape.experts


_ROUTER_BYTES = 8


def _plain_gate(shape: Architecture) -> int:
    return 14 if shape.model_type in SINKS else 8


def attention_bytes(shape: Architecture) -> int:
    """Return the bytes of attention's result per token and layer, with its log-sum-exp: 2 q + 4 heads."""
    return sum(result_bytes(shape))


def result_bytes(shape: Architecture) -> tuple[int, int]:
    """Return the bytes of the two per token and layer, apart."""
    return 2 * shape.query_width, 4 * shape.heads


def product_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return what ``selective`` stores per token and layer beside the layer's input.

    2 B for every element of q, k, v, the attention's result, the output projection, gate and up, and 4 B a head. Gate and up of experts
    are stored by fused kernels only.
    """
    feed_forward = 0 if shape.experts and not fused else 2 * shape.active_intermediate
    return (
        2 * (2 * shape.query_width + 2 * shape.key_value_width + shape.hidden + feed_forward)
        + 4 * shape.heads
    )


def block_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return what recomputation and backward of one block hold per token beside its input, at the end of the feed-forward's backward.

    With fused kernels 10 h + 6 (q + kv) + 10 f: what the block stores, the gradients of gate, up and their product (itself freed by
    then), and two of width h. That is what torch's memory history shows on an H200. Without, norms store fp32 copies:
    24 h + 6 (q + 2 kv) + 12 f. With experts ``expert_peak_bytes`` in the place of the last.
    """
    feed_forward = (
        expert_peak_bytes(shape, fused=fused) if shape.experts else mlp_bytes(shape, fused=fused)
    )
    sinks = 2 * shape.query_width if shape.model_type in SINKS else 0
    return _bytes_beside_mlp(shape, fused=fused) + feed_forward + sinks


def mlp_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return the part of ``block_bytes`` that a dense feed-forward block holds."""
    return (10 if fused else 12) * shape.intermediate


def tiled_block_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return what ``block_bytes`` is where feed-forward block and norms are cut into tiles, without one tile's ``tile_bytes``.

    Then attention's backward holds the most: 6 h + 14 q + 10 kv, which are queries, keys and values before and after rotation, the result,
    the gradients of all these, and a kernel's fp32 sum of the queries' gradient. Derived, not measured. Norms that are not one kernel hold
    no more than fused ones outside their tile: 10 h, which counting live tensors on a CPU confirms.
    """
    h, q, kv = shape.hidden, shape.query_width, shape.key_value_width
    return max(10 * h + _head_bytes(shape, fused=fused), 6 * h + 14 * q + 10 * kv)


def tile_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return the most that backward of a tile holds per token of it: in the feed-forward block, or 28 h in a norm of several kernels.

    The norm's is what counting live tensors on a CPU shows.
    """
    return max(mlp_bytes(shape, fused=fused), 0 if fused else 28 * shape.hidden)


def _bytes_beside_mlp(shape: Architecture, *, fused: bool) -> int:
    return (10 if fused else 24) * shape.hidden + _head_bytes(shape, fused=fused)


def _head_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return the part of ``block_bytes`` that queries, keys and values take."""
    q, kv = shape.query_width, shape.key_value_width
    return 6 * (q + kv if fused else q + 2 * kv)


def elementwise_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return the GPU memory traffic per token of one block's forward beside matrix products: norms, residuals, rotary positions, SwiGLU.

    20 h + 8 (q + kv) + 6 f with fused kernels, each reading and writing once; 80 h + 30 (q + kv) + 10 f without. For each expert
    that a token uses 6 h: its row is read and written, and the result is read; 20 h without.
    """
    h, heads, f = shape.hidden, shape.query_width + shape.key_value_width, shape.active_intermediate
    routing = (6 if fused else 20) * h * shape.experts_per_token
    return routing + (20 * h + 8 * heads + 6 * f if fused else 80 * h + 30 * heads + 10 * f)


def norm_bytes(shape: Architecture, *, fused: bool) -> int:
    """Return the part of ``elementwise_bytes`` that the two norms of a block move: 8 h, or 68 h without fused kernels."""
    return (8 if fused else 68) * shape.hidden


def fused_kernels(model: ModelSpec) -> bool:
    """Return whether norms, rotary positions and gates are one kernel each."""
    return model.kernels == "auto"


def score_bytes(shape: Architecture, sequence_length: int, sequences: int) -> int:
    """Return the bytes of one layer's attention scores with eager attention: 6 bytes per head and pair of tokens."""
    return 6 * shape.heads * sequence_length**2 * sequences
