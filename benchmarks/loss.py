"""Measure time and peak memory of the trainer's cross-entropy on this machine's first GPU (or CPU),
and compare with the plan.

    python benchmarks/loss.py [--tokens 16384] [--vocabulary 151936] [--hidden 2560] [--kept LOGITS]
        [--block LOGITS]

Prints one JSON line: seconds of forward and backward (median), peak bytes besides the hidden
states, the head's weight and its gradient, the bytes that ``so_tui.model.flops`` plans (which must
be more), FLOP/s, and the relative error of the gradients against float64 on a sample of the
vocabulary's rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

from so_tui.model import flops as model_loss
from so_tui_trainer.model.loss import HeadLoss

_SAMPLED_ROWS = 512


def main() -> None:
    """Measure and print the figures."""
    given = _parser().parse_args()
    model_loss.LOSS_KEPT_LOGITS, model_loss.LOSS_BLOCK_LOGITS = given.kept, given.block
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    hidden = torch.randn(
        1, given.tokens, given.hidden, dtype=torch.bfloat16, device=device
    ).requires_grad_()
    weight = nn.Parameter(
        0.02 * torch.randn(given.vocabulary, given.hidden, dtype=torch.bfloat16, device=device)
    )
    predictors = torch.arange(given.tokens, device=device)
    targets = torch.randint(given.vocabulary, (given.tokens,), device=device)
    head = HeadLoss(weight)
    seconds = []
    for _ in range(given.repeats + 2):
        hidden.grad = weight.grad = None
        _wait(device)
        begin = time.perf_counter()
        head(hidden, predictors, targets, 1 / given.tokens).backward()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[2:])
    twice = model_loss.recomputed_logits(given.tokens, given.vocabulary)
    flops = 2.0 * given.hidden * (3 * given.tokens * given.vocabulary + twice)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
                **vars(given),
                "seconds": median,
                "tflops": flops / median / 1e12,
                "peak_beyond_bytes": _peak_beyond(head, hidden, predictors, targets)
                if device.type == "cuda"
                else None,
                "planned_bytes": model_loss.loss_bytes(
                    given.tokens, given.vocabulary, given.hidden
                ),
                "recomputed_share": twice / (given.tokens * given.vocabulary),
                "weight_gradient_error": _error(weight, hidden, targets),
            }
        )
    )


def _peak_beyond(
    head: HeadLoss, hidden: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor
) -> int:
    """Return the peak bytes besides the inputs and the weight's gradient."""
    hidden.grad = head.weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    head(hidden, predictors, targets, 1 / len(targets)).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - 2 * head.weight.numel()


def _error(weight: nn.Parameter, hidden: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the relative error of some rows of the head's gradient."""
    assert weight.grad is not None
    rows = torch.arange(0, len(weight), max(1, len(weight) // _SAMPLED_ROWS), device=weight.device)
    sums = torch.zeros(len(rows), weight.shape[1], dtype=torch.float64, device=weight.device)
    with torch.no_grad():
        for start in range(0, len(targets), 256):
            part, target = hidden[0, start : start + 256], targets[start : start + 256]
            logits = (part @ weight.t()).double()
            softmax = logits.softmax(-1)[:, rows] - (target[:, None] == rows).double()
            sums += softmax.t() @ part.double() / len(targets)
    return float((weight.grad[rows] - sums).norm() / sums.norm())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time and peak memory of the trainer's cross-entropy."
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument(
        "--kept",
        type=int,
        default=model_loss.LOSS_KEPT_LOGITS,
        help="logits that are saved between the passes",
    )
    parser.add_argument(
        "--block", type=int, default=model_loss.LOSS_BLOCK_LOGITS, help="logits of one block"
    )
    parser.add_argument("--repeats", type=int, default=7)
    return parser


if __name__ == "__main__":
    main()
