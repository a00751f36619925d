"""Floating-point operations of a training step, three ways of counting them, and what GPUs can do
at most.

- model: 6 per active matmul parameter and token, plus causal attention within each document. No
  recompute. MFU is this over the peak.
- hardware: what is executed; activation checkpointing runs the forward of every block again (8 per
  parameter and token), but for the last product of a dense feed-forward block, since only the sum
  after it needs the result.
- seed: the formula of the DeepSpeedExamples SuperOffload script, for comparison with published
  figures. It counts padding, recompute, the embedding table and full attention on ``hidden_size``.

A multiply-add counts as two. Backward counts as twice the forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from so_tui.model.shape import Architecture, AttentionLayers, architecture
from so_tui.spec.run_spec import ModelSpec, ParameterBlock, Policy, TensorKind

PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    # Dense bf16, tensor cores, no sparsity; data sheets of NVIDIA and AMD. The first pattern found
    # in the name counts.
    (r"GB300|GB200", 2500e12),
    (r"B300|B200", 2250e12),
    (r"GH200", 989.5e12),
    (r"H[12]00 NVL", 835.5e12),
    (r"H100 PCIe", 756e12),
    (r"H100|H200|H800", 989.5e12),
    (r"H20", 148e12),
    (r"A100|A800", 312e12),
    (r"L40S", 362e12),
    (r"L4", 121e12),
    (r"MI300A", 980.6e12),
)
_NORMS_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2")
"""transformers' names: Gemma 2 and 3, OLMo 2, EXAONE 4, GLM 4, HyperCLOVA X."""
_MIXING = re.compile("attn|attention|mamba|mixer|conv")
"""In names of blocks where tokens meet."""


class Flops(Struct, frozen=True, kw_only=True):
    """What one token costs in a model."""

    active_parameters: int
    """Parameters that one token is multiplied with: of experts the chosen ones; a tied head counts,
    the embedding look-up does not.
    """
    head_parameters: int
    """Those of ``active_parameters`` in the output head (vocabulary x hidden)."""
    attention_layers: tuple[AttentionLayers, ...]
    """For each kind of attention that the model has."""
    last_products: int = 0
    """Parameters of the last products of all dense feed-forward blocks; 0 with experts."""
    norm_after_mlp: bool = False
    """Whether a norm in the layer needs the results of these products."""

    def repeated(self, *, tiled: bool = False) -> int:
        """Return the parameters whose products backward computes again where layers are
        checkpointed.

        A feed-forward block in tiles computes its last product again for each tile, or all three
        where a norm needs the result before that.
        """
        blocks = self.active_parameters - self.head_parameters
        if self.norm_after_mlp:
            return blocks + (3 * self.last_products if tiled else 0)
        return blocks - (0 if tiled else self.last_products)

    def attention_forward(self, document_lengths: Iterable[int]) -> float:
        """Return the FLOPs of QK^T and AV in one forward over documents of these lengths (tokens):
        4 x width x pairs, all layers.
        """
        lengths = tuple(document_lengths)
        return sum(
            4.0 * layers * width * sum(attention_pairs(length, window) for length in lengths)
            for layers, width, window in self.attention_layers
        )


def flops_of(model: ModelSpec) -> Flops:
    """Return the FLOPs of a model. Raises InputError when ``model.config`` does not describe its
    shape.
    """
    return flops_for(model.parameters, architecture(model.config))


def flops_for(blocks: tuple[ParameterBlock, ...], shape: Architecture) -> Flops:
    """Return the FLOPs of a model whose architecture is known already.

    One token is multiplied with the ``linear`` parameters, and with ``experts_per_token`` of those
    stacked in ``expert`` ones. A tied head multiplies too, whatever it shares its storage with;
    norms, biases and the embedding look-up do not count.
    """
    multiplied = _of_kind(blocks, "linear") + _of_kind(blocks, "expert")
    names = [tensor.name for block in blocks for tensor in block.tensors]
    last = 0 if shape.experts else sum(block.repeat * _last_product(block) for block in blocks)
    return Flops(
        active_parameters=multiplied - idle_parameters(blocks, shape),
        head_parameters=shape.vocabulary * shape.hidden,
        attention_layers=shape.attention_layers,
        last_products=last,
        norm_after_mlp=any(norm in name for name in names for norm in _NORMS_AFTER_MLP),
    )


def _last_product(block: ParameterBlock) -> int:
    """Return the parameters of the product that ends a layer: the last of its feed-forward block,
    beside another block; else 0.

    Some layers list their attention after it (Falcon-H1), or a projection of their own (Gemma 4).
    """
    linear = [
        tensor
        for tensor in block.tensors
        if tensor.kind == "linear" and len(tensor.shape) == 2 and "{i}." in tensor.name
    ]
    parents = {tensor.name: tensor.name.rsplit(".", 2)[0] for tensor in linear}
    if len(set(parents.values())) < 2:
        return 0
    plain = [
        tensor for tensor in linear if not _MIXING.search(parents[tensor.name].partition("{i}")[2])
    ]
    inner = [tensor for tensor in plain if not parents[tensor.name].endswith("{i}")] or plain
    return inner[-1].numel if inner else 0


def idle_parameters(blocks: Iterable[ParameterBlock], shape: Architecture) -> int:
    """Return the expert parameters that one token does not use; 0 in dense models."""
    if not shape.experts:
        return 0
    return _of_kind(blocks, "expert") * (shape.experts - shape.experts_per_token) // shape.experts


def _of_kind(blocks: Iterable[ParameterBlock], kind: TensorKind) -> int:
    return sum(
        block.repeat * tensor.numel
        for block in blocks
        for tensor in block.tensors
        if tensor.kind == kind
    )


def attention_pairs(length: int, window: int | None = None) -> float:
    """Return the query-key pairs of causal attention in a document: length^2 / 2, fewer with a
    sliding window.
    """
    if window is None or length <= window:
        return length * length / 2
    return window * length - window * window / 2


def model_flops(flops: Flops, tokens: int, document_lengths: Iterable[int]) -> float:
    """Return the FLOPs of forward and backward over documents of these lengths, without
    recomputation: 6 N T + 3 x attention.
    """
    return 6.0 * flops.active_parameters * tokens + 3.0 * flops.attention_forward(document_lengths)


def hw_flops(
    flops: Flops,
    tokens: int,
    document_lengths: Iterable[int],
    *,
    policy: Policy,
    tiled: bool = False,
) -> float:
    """Return the FLOPs that the GPU executes for ``tokens`` positions, padding included.

    6 N T + 3 x attention, and 2 T for each parameter and attention once more, if backward repeats
    them. The output head is not repeated: the loss forms gradients in the forward,
    and multiplies again only what ``so_tui.model.flops`` counts.

    Args:
        flops: What one token costs.
        tokens: Positions.
        document_lengths: Tokens of each document.
        policy: What backward computes again.
        tiled: Whether feed-forward blocks are computed in tiles.
    """
    repeated = flops.repeated(tiled=tiled) if policy in ("full", "attention") else 0
    attention_passes = 4.0 if policy == "full" else 3.0
    attention = attention_passes * flops.attention_forward(document_lengths)
    return 2.0 * tokens * (3.0 * flops.active_parameters + repeated) + attention


def seed_tflops_total(
    parameters: int,
    shape: Architecture,
    sequence_length: int,
    sequences: int,
    step_s: float,
    *,
    checkpointing: bool,
) -> float:
    """Return TFLOPS as the original script prints them: ``sequences`` of all ranks, padded to
    ``sequence_length``, in one step of ``step_s`` seconds, summed over GPUs.

    It counts 2 c P L + 4 c layers hidden L^2 for each, P being all of the model's parameters, with
    c = 4 when activations are recomputed, else 3. For a mixture of experts the script prints none:
    0.
    """
    if shape.experts:
        return 0.0
    attention = 2.0 * shape.layers * shape.hidden * sequence_length
    passes = 4 if checkpointing else 3
    per_sequence = 2.0 * passes * sequence_length * (parameters + attention)
    return per_sequence * sequences / step_s / 1e12


def peak_flops(gpu_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU by its product name (``NVIDIA GH200 480GB``); None when
    unknown.
    """
    found = (
        flops
        for pattern, flops in PEAK_BF16_FLOPS
        if re.search(rf"\b(?:{pattern})\b", gpu_name, re.IGNORECASE)
    )
    return next(found, None)


# How the trainer's cross-entropy is cut into blocks, and what that costs. Trainer, planner and
# metrics use these functions.
#
# T trained tokens, V vocabulary, h hidden width. The logits T x V never exist whole: they are
# computed in blocks of the vocabulary, first to find each token's normaliser, then to form the
# gradients. The first blocks are stored in bf16 between the two passes; the others are multiplied
# again. Cut by the vocabulary rather than by tokens, each row of the head's gradient is one sum
# inside one matrix product: it needs neither a second pass over memory nor an fp32 copy of itself.


LOSS_BLOCK_LOGITS = 2**26
"""Logits in a block: their fp32 form is the largest temporary."""
LOSS_KEPT_LOGITS = 2**29
"""Logits that are stored in bf16 between the passes instead of being multiplied twice."""
_MULTIPLE = 128
"""Matrix products are fastest where the width of a block is a multiple of this."""


def block_columns(tokens: int, vocabulary: int) -> int:
    """Return the width of a block: as many columns of the vocabulary as ``LOSS_BLOCK_LOGITS``
    allow.
    """
    columns = LOSS_BLOCK_LOGITS // max(1, tokens)
    return max(1, min(vocabulary, columns // _MULTIPLE * _MULTIPLE or columns))


def kept_blocks(tokens: int, vocabulary: int) -> int:
    """Return how many blocks, from the first, are stored between the passes."""
    return LOSS_KEPT_LOGITS // (max(1, tokens) * block_columns(tokens, vocabulary))


def recomputed_logits(tokens: int, vocabulary: int) -> int:
    """Return how many logits are multiplied a second time, at 2 h FLOPs each."""
    return tokens * max(
        0, vocabulary - kept_blocks(tokens, vocabulary) * block_columns(tokens, vocabulary)
    )


def loss_bytes(tokens: int, vocabulary: int, hidden: int) -> int:
    """Return the peak bytes of the loss on one rank, beyond the hidden states, the head's weight
    and that weight's bf16 gradient.

    2 x stored + 6 x block (bf16, and its fp32 form, which the GPU does not need) + 6 T h: the
    trained tokens' hidden states, and the fp32 sum of their gradient. Forming a block's share of
    that gradient takes 2 x block + 2 T h instead of 6 x block.
    """
    block = tokens * block_columns(tokens, vocabulary)
    stored = min(tokens * vocabulary, kept_blocks(tokens, vocabulary) * block)
    states = tokens * hidden
    return 2 * stored + max(6 * block, 2 * block + 2 * states) + 6 * states


# How many positions a micro-batch computes when documents lie end to end: few different numbers,
# so that memory is reused.


_BUCKETS = 64
"""Sizes of a micro-batch at most. The padding at its end is less than this part of it, half of that
on average.
"""
_SMALLEST = 8
"""Tokens of the smallest bucket: a multiple of it suits matmuls."""


def bucket_tokens(capacity: int) -> int:
    """Return the multiple to which the computed positions of a micro-batch of ``capacity``
    positions are rounded up.
    """
    return max(_SMALLEST, -(-capacity // _BUCKETS // _SMALLEST) * _SMALLEST)


def computed_tokens(useful: int, capacity: int, parts: int = 1) -> int:
    """Return the positions that are computed for ``useful`` tokens, in so many equal parts."""
    room = capacity // parts
    bucket = bucket_tokens(room)
    return parts * min(room, -(-useful // (parts * bucket)) * bucket)
