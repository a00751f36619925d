"""How the trainer's cross-entropy is cut into blocks, and what that costs. Trainer, planner and metrics use these functions.

T trained tokens, V vocabulary, h hidden width. The logits T x V never exist whole: they are computed in blocks of the vocabulary, first
to find each token's normaliser, then to form the gradients. The first blocks are stored in bf16 between the two passes; the others are
multiplied again. Cut by the vocabulary rather than by tokens, each row of the head's gradient is one sum inside one matrix product: it
needs neither a second pass over memory nor an fp32 copy of itself.
"""

from __future__ import annotations

LOSS_BLOCK_LOGITS = 2**26
"""Logits in a block: their fp32 form is the largest temporary."""
LOSS_KEPT_LOGITS = 2**29
"""Logits that are stored in bf16 between the passes instead of being multiplied twice."""
_MULTIPLE = 128
"""Matrix products are fastest where the width of a block is a multiple of this."""


def block_columns(tokens: int, vocabulary: int) -> int:
    """Return the width of a block: as many columns of the vocabulary as ``LOSS_BLOCK_LOGITS`` allow."""
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
    """Return the peak bytes of the loss on one rank, beyond the hidden states, the head's weight and that weight's bf16 gradient.

    2 x stored + 6 x block (bf16, and its fp32 form, which the GPU does not need) + 6 T h: the trained tokens' hidden states, and
    the fp32 sum of their gradient. Forming a block's share of that gradient takes 2 x block + 2 T h instead of 6 x block.
    """
    block = tokens * block_columns(tokens, vocabulary)
    stored = min(tokens * vocabulary, kept_blocks(tokens, vocabulary) * block)
    states = tokens * hidden
    return 2 * stored + max(6 * block, 2 * block + 2 * states) + 6 * states
