"""The results of ``architectures.py`` as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.architecture_models import NAMES

Row = dict[str, Any]
_MEMORY = ("gpu_reserved_bytes", "host_bytes")


def table(rows: list[Row]) -> str:
    """Return one line for each architecture, including those that were not run."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    heads = [
        "architecture",
        *(
            f"{what}, {device}"
            for device in devices
            for what in ("trains", "resume exact", "export reloads equal")
        ),
    ]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in NAMES:
        cells = [name]
        for device in devices:
            row = next(
                (row for row in rows if row["name"] == name and row["device"] == device), None
            )
            cells += [_word(row, key) for key in ("trains", "resume_exact", "export_equal")]
        lines.append(_line(cells))
    return "\n".join(lines) if rows else ""


def full_table(rows: list[Row]) -> str:
    """Return one line for each model that was trained at full size."""
    heads = [
        "model",
        "GPUs",
        "mode, ratio",
        "tokens a step",
        "step",
        "TFLOPS/GPU",
        "GPU reserved: plan, measured",
        "host: plan, measured",
    ]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        if "error" in row:
            reason = row["error"].strip().splitlines()[-1][:80]
            lines.append(_line([row["name"], str(row["gpus"]), f"failed: {reason}", *[""] * 5]))
            continue
        tokens = row["sequence_length"] * row["micro_batch"] * row["gpus"]
        cells = [
            row["name"],
            str(row["gpus"]),
            f"{row['mode']}, {row['ratio']}",
            f"{tokens:,}",
            f"{row['step_s']} s",
        ]
        memory = [
            ", ".join(f"{row[key][which] / 2**30:.1f} GiB" for which in ("planned", "measured"))
            for key in _MEMORY
        ]
        lines.append(_line([*cells, str(row["model_tflops_per_gpu"]), *memory]))
    return "\n".join(lines) if rows else ""


def _word(row: Row | None, key: str) -> str:
    if row is None:
        return "not run"
    return "failed" if "error" in row else "yes" if row[key] else "NO"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
