"""From steps to tokens per second, and from rows to a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, TypedDict

from benchmarks.comparison.parts import BY_NAME, PARTS


class Step(TypedDict):
    """One optimizer step as it was timed."""

    step_s: float
    useful_tokens: int
    """Tokens of rows: padding is none, whether it carries loss or not."""
    positions: int
    """What was computed, padding included."""


def measured(steps: Sequence[Step], warmup: int) -> dict[str, float]:
    """Figures of the steps after the warm-up: totals over totals, so that each counts by its length.

    Raises ValueError: no step is left.
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
    """Useful tokens per second of a trainer that pads, had its few rows been as long as the data's are on average."""
    return float(row["positions_per_s"] * row["data"]["tokens_per_row"] / sequence_length)


def newest(rows: Sequence[dict[str, Any]], shape: str) -> dict[str, dict[str, Any]]:
    """The last row of each part that was measured at a shape, in the order of the parts."""
    good = {row["part"]: row for row in rows if row["shape"] == shape and "error" not in row}
    return {part.name: good[part.name] for part in PARTS if part.name in good}


def table(rows: Sequence[dict[str, Any]], shape: str) -> str:
    """Markdown: what was measured at a shape, and by how much so-tui's two rows are ahead of each."""
    found = newest(rows, shape)
    heads = [name for name in ("ours", "ours-large") if name in found]
    titles = {"ours": "so-tui ×", "ours-large": "so-tui, long steps ×"}
    lines = [
        "| trainer | tokens a step | of it padding | s/step | useful tokens/s |" + "".join(f" {titles[head]} |" for head in heads),
        "|---|---|---|---|---|" + "---|" * len(heads),
    ]
    for name, row in found.items():
        line = (
            f"| {BY_NAME[name].title} | {row['positions_per_step']:,.0f} | {row['padding']:.0%} | {row['step_s']:.2f} |"
            f" {row['useful_tokens_per_s']:,.0f}{_aside(row)} |"
        )
        ratios = (found[head]["useful_tokens_per_s"] / row["useful_tokens_per_s"] for head in heads)
        lines.append(line + "".join(f" {ratio:.2f} |" if ratio < 10 else f" {ratio:.0f} |" for ratio in ratios))
    failed = {row["part"]: row for row in rows if row["shape"] == shape and "error" in row and row["part"] not in found}
    lines += [f"\n{BY_NAME[name].title}: not measured ({row['error'].strip().splitlines()[-1]})" for name, row in failed.items()]
    return "\n".join(lines)


def _aside(row: dict[str, Any]) -> str:
    return f" ({row['at_mean_row']:,.0f} with rows of mean length)" if "at_mean_row" in row else ""
