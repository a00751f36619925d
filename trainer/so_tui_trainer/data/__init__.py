"""From rows to micro-batches: reading, chat templates, tokenisation, packing and prefetching."""
