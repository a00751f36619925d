"""Checkpoints of whole models, as two ranks would have saved them, and runs with such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from so_tui.runs import RunDirectory, create_run
from so_tui.runs.directory import run_id
from so_tui.spec import RunSpec
from so_tui_trainer.checkpoint_folder import optimizer_folder
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.trained import PREFIX
from superoffload import checkpoint as on_disk
from superoffload.gpu_states import SubGroupState
from tests.support.checkpoints import manifest_of, rank_manifest_of
from tests.support.launching import tiny
from tests.support.models import causal_model

RANKS = 2


def checkpoint_of(
    model: torch.nn.Module, spec: RunSpec, folder: Path, step: int = 5, run: str = ""
) -> None:
    """Write what two ranks that trained the model would have saved, as far as an export reads
    it.
    """
    named = [
        (f"{PREFIX}{name}", parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    groups = [named[: len(named) // 2], named[len(named) // 2 :]]
    members = [[(name, parameter.numel()) for name, parameter in group] for group in groups]
    for rank in range(RANKS):
        states = [_state(_share(group, rank)) for group in groups]
        records = tuple(map(on_disk.SubGroupRecord.of, states, members))
        manifest = rank_manifest_of("deepspeed", rank, RANKS, records)
        file = on_disk.Save(optimizer_folder(folder), manifest)
        for index, state in enumerate(states):
            file.write(index, state.tensors())
        file.finish()
    saved = manifest_of(spec, step, run, RANKS)
    (folder / "checkpoint.json").write_bytes(msgspec.json.encode(saved))


def _state(share: Tensor) -> SubGroupState:
    return SubGroupState(
        "cpu", share, share, lambda: (share, share), lambda *_: None, 1, lambda _: None
    )


def _share(group: list[tuple[str, Tensor]], rank: int) -> Tensor:
    """Return a rank's part of a sub-group, each parameter flat and padded to a multiple of the
    ranks.
    """
    parts = []
    for _, parameter in group:
        flat = parameter.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % RANKS))
        parts.append(padded.chunk(RANKS)[rank])
    return torch.cat(parts)


def run_with_checkpoints(folder: Path, *steps: int) -> RunDirectory:
    """A run of the embedded model, its checkpoints such that they are proven readable."""
    spec = tiny(data__sequence_length="128")
    run = create_run(spec, folder)
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    for step in steps:
        checkpoint_of(model, spec, run.checkpoints_dir / f"step-{step:06d}", step, run_id(run))
    return run
