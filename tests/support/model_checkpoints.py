"""Checkpoints of whole models, as two ranks would have saved them, and runs with such."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from so_tui.runs import RunDirectory, create_run
from so_tui.runs.directory import run_id
from so_tui.spec import RunSpec
from so_tui_trainer.checkpoint_folder import Manifest, optimizer_folder
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.trained import PREFIX
from superoffload import checkpoint as on_disk
from superoffload.gpu_states import SubGroupState
from tests.support.launching import tiny
from tests.support.models import causal_model


def checkpoint_of(
    model: torch.nn.Module, spec: RunSpec, folder: Path, step: int = 5, run: str = ""
) -> None:
    """What two ranks that trained the model would have saved, as far as an export reads it."""
    trained = [
        (name, parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    ranks, named = 2, [(f"{PREFIX}{name}", parameter) for name, parameter in trained]
    groups = [named[: len(named) // 2], named[len(named) // 2 :]]
    for rank in range(ranks):
        states = [
            SubGroupState(
                "cpu",
                share,
                share,
                lambda share=share: (share, share),  # type: ignore[misc]
                lambda first, second: None,
                1,
                lambda step: None,
            )
            for share in _shares(groups, rank, ranks)
        ]
        members = [[(name, parameter.numel()) for name, parameter in group] for group in groups]
        manifest = on_disk.Manifest(
            deepspeed="0.19.8",
            mode="gpu",
            engine="deepspeed",
            ratio=0.0,
            rank=rank,
            ranks=ranks,
            sub_groups=tuple(map(on_disk.SubGroupRecord.of, states, members)),
        )
        file = on_disk.Save(optimizer_folder(folder), manifest)
        for index, state in enumerate(states):
            file.write(index, state.tensors())
        file.finish()
    saved = Manifest(
        run=run,
        step=step,
        total_steps=step,
        ranks=ranks,
        consumed_sequences=10,
        useful_tokens=0,
        trained_tokens=0,
        data="",
        last_loss=None,
        spec=spec,
    )
    (folder / "checkpoint.json").write_bytes(msgspec.json.encode(saved))


def _shares(
    groups: list[list[tuple[str, torch.Tensor]]], rank: int, ranks: int
) -> Iterator[torch.Tensor]:
    """This rank's part of every sub-group, flat, padded to a multiple of the ranks."""
    for group in groups:
        parts = []
        for _, parameter in group:
            flat = parameter.flatten()
            share = -(-len(flat) // ranks)
            parts.append(
                torch.cat([flat, flat.new_zeros(share * ranks - len(flat))])[
                    rank * share : (rank + 1) * share
                ]
            )
        yield torch.cat(parts)


def run_with_checkpoints(folder: Path, *steps: int) -> RunDirectory:
    """A run of the embedded model, its checkpoints such that they are proven readable."""
    spec = tiny(data__sequence_length="128")
    run = create_run(spec, folder)
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    for step in steps:
        checkpoint_of(model, spec, run.checkpoints_dir / f"step-{step:06d}", step, run_id(run))
    return run
