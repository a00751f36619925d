"""Compute tokens per second from steps, and a table from rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, TypedDict

from benchmarks.comparison.parts import BY_NAME, PARTS


class Step(TypedDict):
    """A measured optimizer step."""

    step_s: float
    useful_tokens: int
    """Tokens of rows, without padding, whether they carry loss or not."""
    positions: int
    """Computed tokens, with padding."""


def measured(steps: Sequence[Step], warmup: int) -> dict[str, float]:
    """Return the figures of the steps after the warm-up: totals over totals, so that each step
    counts by its length.

    Raises:
        ValueError: No step is left.
    """
    counted = steps[warmup:]
    if not counted:
        raise ValueError(f"{len(steps)} steps leave nothing after {warmup} of warm-up")
    seconds = sum(step["step_s"] for step in counted)
    useful = sum(step["useful_tokens"] for step in counted)
    positions = sum(step["positions"] for step in counted)
    return {
        "useful_tokens_per_s": useful / seconds,
        "positions_per_s": positions / seconds,
        "padding": 1 - useful / positions,
        "step_s": median(step["step_s"] for step in counted),
        "tokens_per_step": useful / len(counted),
        "positions_per_step": positions / len(counted),
        "measured_steps": float(len(counted)),
    }


def at_mean_row(row: dict[str, Any], sequence_length: int) -> float:
    """Return the useful tokens per second of a trainer that pads, if its few rows had the mean
    length of all rows.
    """
    return float(row["positions_per_s"] * row["data"]["tokens_per_row"] / sequence_length)


def newest(rows: Sequence[dict[str, Any]], shape: str) -> dict[str, dict[str, Any]]:
    """Return the last row of each part that was measured at a shape, in the order of the parts."""
    good = {row["part"]: row for row in rows if row["shape"] == shape and "error" not in row}
    return {part.name: good[part.name] for part in PARTS if part.name in good}


def table(rows: Sequence[dict[str, Any]], shape: str) -> str:
    """Return a Markdown table: the results at a shape, and the ratio of so-tui's two rows to
    each.
    """
    found = newest(rows, shape)
    heads = [name for name in ("ours", "ours-large") if name in found]
    titles = {"ours": "so-tui ×", "ours-large": "so-tui, long steps ×"}
    lines = [
        "| trainer | tokens a step | of it padding | s/step | useful tokens/s |"
        + "".join(f" {titles[head]} |" for head in heads),
        "|---|---|---|---|---|" + "---|" * len(heads),
    ]
    for name, row in found.items():
        line = (
            f"| {BY_NAME[name].title} | {row['positions_per_step']:,.0f} | {row['padding']:.0%} | "
            f"{row['step_s']:.2f} |"
            f" {row['useful_tokens_per_s']:,.0f}{_aside(row)} |"
        )
        ratios = (found[head]["useful_tokens_per_s"] / row["useful_tokens_per_s"] for head in heads)
        lines.append(
            line
            + "".join(f" {ratio:.2f} |" if ratio < 10 else f" {ratio:.0f} |" for ratio in ratios)
        )
    failed = {
        row["part"]: row
        for row in rows
        if row["shape"] == shape and "error" in row and row["part"] not in found
    }
    lines += [
        f"\n{BY_NAME[name].title}: not measured ({row['error'].strip().splitlines()[-1]})"
        for name, row in failed.items()
    ]
    return "\n".join(lines)


def _aside(row: dict[str, Any]) -> str:
    return f" ({row['at_mean_row']:,.0f} with rows of mean length)" if "at_mean_row" in row else ""
