"""From rows to micro-batches: read, written as conversations, tokenised once, packed, made ahead of need."""
