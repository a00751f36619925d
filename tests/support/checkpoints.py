"""Checkpoints of no parameters, for tests of what is done with their folders."""

from __future__ import annotations

from pathlib import Path

import msgspec

from so_tui.spec import RunSpec
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import Manifest
from superoffload.checkpoint import Manifest as RankManifest


def written(folder: Path, step: int, run: str, spec: RunSpec) -> Path:
    """Write a checkpoint of no parameters."""
    partial = checkpoint_folder.begin(folder, step)
    record = RankManifest(
        deepspeed="0",
        mode="superoffload",
        engine="so-tui",
        ratio=0.5,
        rank=0,
        ranks=1,
        sub_groups=(),
    )
    (checkpoint_folder.optimizer_folder(partial) / "rank_00000.states").write_bytes(b"")
    (checkpoint_folder.optimizer_folder(partial) / "rank_00000.json").write_bytes(
        msgspec.json.encode(record)
    )
    manifest = Manifest(
        run=run,
        step=step,
        total_steps=99,
        ranks=1,
        consumed_sequences=step,
        useful_tokens=0,
        trained_tokens=0,
        data="",
        last_loss=None,
        spec=spec,
    )
    return checkpoint_folder.complete(partial, manifest)
