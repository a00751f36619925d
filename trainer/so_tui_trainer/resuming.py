"""The checkpoint from which an attempt resumes: which one it is, and restoring it. What differs from before is told in warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from so_tui.runs import RunDirectory, read_state
from so_tui.runs.checkpoints import checkpoints_folder, missing_checkpoints
from so_tui.runs.manifest import run_id
from so_tui.spec import RunSpec
from so_tui.units import thousands
from so_tui_trainer import checkpoint
from so_tui_trainer.checkpoint import Damage, Found
from so_tui_trainer.failures import TrainingError
from so_tui_trainer.ranks import Ranks
from so_tui_trainer.rounding import rounding_warnings

Warn = Callable[[str, str, str], None]
"""Records a warning: its code, message and suggestion."""


def newest(run: RunDirectory, spec: RunSpec, warn: Warn, *, start_over: bool) -> Found | None:
    """Return the checkpoint to resume from. Newer ones that cannot be used are renamed or left, with a warning.

    Args:
        run: The run.
        spec: Its spec.
        warn: Records a warning.
        start_over: Set all checkpoints aside and return None.

    Raises:
        TrainingError: The folder of checkpoints is another run's, or what the run saved is missing or unreadable.
    """
    folder = checkpoints_folder(run, spec)
    if spec.checkpoint.saves or folder.exists():
        checkpoint.claim(run, spec)
    if start_over:
        checkpoint.start_over(folder, run_id(run))
        return None
    found = checkpoint.newest(folder, run_id(run))
    saved = read_state(run)
    if found is None:
        if (missing := missing_checkpoints(run, spec, saved)) is not None:
            raise TrainingError(missing.code, missing.message)
        return None
    for damage in found.damaged:
        _set_aside(damage, found, warn)
    if (
        saved.saved_step is not None
        and found.manifest.step < saved.saved_step
        and not found.damaged
    ):
        gone = f"the run saved step {thousands(saved.saved_step)}, which is no longer in {folder}"
        message = f"{gone}; resuming from step {thousands(found.manifest.step)}"
        warn("checkpoint-missing", message, "")
    return found


def _set_aside(damage: Damage, found: Found, warn: Warn) -> None:
    """Rename a checkpoint that cannot be read, but not one that is whole and does not belong here."""
    if damage.code in ("other-run", "misnamed"):
        message = (
            f"{damage.path.name} is not used ({damage.reason}); resuming from {found.path.name}"
        )
        warn(
            "checkpoint-not-used",
            message,
            "It was left as it is. Move it away if you do not need it here.",
        )
        return
    moved_to = checkpoint.set_aside(damage.path)
    warn(
        "checkpoint-damaged",
        f"{damage.path.name} cannot be read ({damage.reason}); resuming from {found.path.name}",
        f"It was renamed to {moved_to}. Delete it if you do not need it.",
    )


def restore(
    found: Found, engine: Any, spec: RunSpec, fingerprint: str, ranks: Ranks, warn: Warn
) -> None:
    """Load a checkpoint's states into the engine, on all ranks together.

    Args:
        found: The checkpoint.
        engine: The DeepSpeed engine.
        spec: The spec as it is now.
        fingerprint: Of the documents as they are now.
        ranks: The process group.
        warn: Records a warning.

    Raises:
        TrainingError: A rank cannot load it; raised on all ranks.
    """
    manifest = found.manifest
    if manifest.data != fingerprint or _order(manifest.spec) != _order(spec):
        message = f"the data or their order changed since the checkpoint; continuing at sequence {manifest.consumed_sequences + 1}"
        suggestion = "Resume with the same data, weights, seed, sequence length and packing to neither skip nor repeat sequences."
        warn("data-changed", message, suggestion)
    rounded = checkpoint.load(engine, found.path, manifest, ranks)
    for warning in rounding_warnings(manifest, spec, rounded):
        warn(*warning)


def _order(spec: RunSpec) -> tuple[int, int, bool, tuple[float, ...]]:
    """Return the settings that determine the order of the sequences, besides the documents."""
    weights = [source.weight for source in spec.data.sources]
    shares = tuple(weight / weights[0] for weight in weights)
    return spec.train.seed, spec.data.sequence_length, spec.data.packing, shares
