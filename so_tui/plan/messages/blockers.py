"""Why a run can never start here, in words."""

from __future__ import annotations

from typing import assert_never

from so_tui.plan.facts import blockers
from so_tui.spec.attention import MASKED_BACKENDS


def blocker_text(fact: blockers.Blocker) -> str:
    """Return why a run can never start here, with what to change."""
    match fact:
        case blockers.AmdGpu():
            return f"GPU {fact.gpu} ({fact.name}) is an AMD GPU, and of these so-tui plans for MI300A only. Use a machine with NVIDIA GPUs"
        case blockers.ModeNeedsGpu():
            return f"offload.mode = gpu needs a GPU, and {fact.machine} has none. Use offload.mode = auto"
        case blockers.EngineNeedsGpu():
            return "DeepSpeed's SuperOffload needs a CUDA GPU, and this machine has none. Use offload.engine = so-tui"
        case blockers.TooFewGpus():
            most = "1" if fact.present == 1 else f"{fact.present} or fewer"
            return f"gpus = {fact.asked}: {_has(fact.machine, fact.present)}. Ask for {most}"
        case blockers.NoSuchGpu():
            there = _has(fact.machine, len(fact.present))
            return f"gpus = {list(fact.asked)}: there is no GPU {fact.missing}, {there}. Choose from {list(fact.present)}"
        case blockers.SequencesNotShareable() if fact.backend in MASKED_BACKENDS:
            return (
                f"train.sequence_parallel = {fact.ranks} needs attention that takes document boundaries, and {fact.backend} takes a mask. "
                "Set it to 1, or run on GPUs with another backend"
            )
        case blockers.SequencesNotShareable():
            heads = f"{fact.heads} heads and {fact.key_heads} key heads"
            return f"train.sequence_parallel = {fact.ranks} cannot divide the model's {heads}. Choose a divisor of both"
        case blockers.NotBindable():
            return "; ".join(f"{found.message}. {found.remedy}" for found in fact.problems)
    assert_never(fact)


def _has(machine: str, gpus: int) -> str:
    return f"{machine} has {gpus} GPU" + ("s" if gpus > 1 else "")
