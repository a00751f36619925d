"""Manifests of checkpoints, and checkpoints of no parameters, for what is done with their
folders.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from so_tui.spec import RunSpec
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import Manifest
from superoffload.checkpoint import Manifest as RankManifest
from superoffload.checkpoint import SubGroupRecord


def manifest_of(spec: RunSpec, step: int, run: str, ranks: int = 1, consumed: int = 10) -> Manifest:
    return Manifest(
        run=run,
        step=step,
        total_steps=99,
        ranks=ranks,
        consumed_sequences=consumed,
        useful_tokens=0,
        trained_tokens=0,
        data="",
        last_loss=None,
        spec=spec,
    )


def rank_manifest_of(
    engine: str, rank: int = 0, ranks: int = 1, sub_groups: tuple[SubGroupRecord, ...] = ()
) -> RankManifest:
    return RankManifest(
        deepspeed="0.19.8",
        mode="superoffload" if engine == "so-tui" else "gpu",
        engine=engine,
        ratio=0.5 if engine == "so-tui" else 0.0,
        rank=rank,
        ranks=ranks,
        sub_groups=sub_groups,
    )


def written(folder: Path, step: int, run: str, spec: RunSpec) -> Path:
    """Write a checkpoint of no parameters."""
    partial = checkpoint_folder.begin(folder, step)
    states = checkpoint_folder.optimizer_folder(partial)
    (states / "rank_00000.states").write_bytes(b"")
    (states / "rank_00000.json").write_bytes(msgspec.json.encode(rank_manifest_of("so-tui")))
    return checkpoint_folder.complete(partial, manifest_of(spec, step, run, consumed=step))
