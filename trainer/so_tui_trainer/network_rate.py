"""Measure how fast the ranks of several nodes all-gather and reduce-scatter, which ZeRO-3 does with all weights and gradients."""

from __future__ import annotations

import sys
import time

import torch

from so_tui.runs.directory import RunDirectory
from so_tui.runs.network_rate import write_network_rate
from so_tui_trainer.older_versions import all_gather_single, reduce_scatter_single
from so_tui_trainer.ranks import Ranks

_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
"""Of a whole tensor. Buckets and layers of large models have some hundred megabytes; a slow network is measured with less."""
_LONG_ENOUGH_S = 0.05
_REPEATS = 3


def record(ranks: Ranks, run: RunDirectory, attempt: int, nodes: int) -> None:
    """Measure the rate, a second or two, and record it for the plans of later runs."""
    bytes_per_s = measure(ranks)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # training finds the GPU as it would be without this
    if ranks.first:
        try:
            write_network_rate(run, attempt, nodes, bytes_per_s)
        except OSError as error:
            print(
                f"the rate of the network cannot be recorded: {error}", file=sys.stderr, flush=True
            )


def measure(ranks: Ranks) -> float:
    """Return how many bytes a second enter each node, and leave it, while all ranks exchange a large tensor.

    As in a ring, each byte but a rank's own share passes through every node once (see ``so_tui.plan.network``).
    """
    whole_bytes = _FIRST_BYTES
    while True:
        both_s = _both_s(ranks, whole_bytes)
        if both_s >= _LONG_ENOUGH_S or whole_bytes >= _MOST_BYTES:
            return 2 * whole_bytes * (ranks.size - 1) / ranks.size / both_s
        whole_bytes *= 4


def _both_s(ranks: Ranks, whole_bytes: int) -> float:
    """Return the seconds of an all-gather and a reduce-scatter of that many bytes on the slowest rank, at best."""
    share = torch.zeros(max(1, whole_bytes // 4 // ranks.size), device=ranks.device)
    whole = torch.empty(share.numel() * ranks.size, device=ranks.device)
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one connects the ranks
        ranks.barrier()
        began = time.perf_counter()
        all_gather_single(whole, share)
        reduce_scatter_single(share, whole)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        seconds.append(time.perf_counter() - began)
    return max(min(row) for row in ranks.all_gather_row(seconds[1:]))
