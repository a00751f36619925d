"""A rank that trains the small model with the engine. Run as a script: ``engine_ranks.py PART FOLDER``."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch

import superoffload
from so_tui.spec.types import RunSpec
from superoffload.deepspeed_adapter.engine import sub_group_states
from tests.support import engine as support
from tests.support.rank_processes import leave
from tests.support.reference_adamw import Reference

SCRIPT = Path(__file__)
SAVED, RESUMED = 5, 20
"""Steps before the save, and after it."""
RUNS: tuple[tuple[support.Mode, float, float, int], ...] = (
    ("superoffload", 0.37, 1.0, 1),
    ("superoffload", 1.0, 0.0, 3),
    ("zerooffload", 1.0, 1.0, 1),
    ("zerooffload", 0.5, 1.0, 1),
    ("gpu", 0.0, 1.0, 1),
)
"""Offload mode, ratio, clipping, gradient accumulation steps."""


def reference(folder: Path) -> None:
    """Compare each rank's shards with float32 AdamW, with padding, clipping in every step and two gradient accumulation steps.

    Some ranks hold nothing but padding of parameters with one or two elements.
    """
    run = support.spec("superoffload", 0.5, clipping=1e-3, accumulation=2)
    rank = torch.distributed.get_rank()
    torch.manual_seed(run.train.seed)
    with support.engine(run, model=support.OddModel()) as made:
        expected = Reference(made, clipping=1e-3)
        for step in range(20):
            support.train(made, support.batches(2, seed=100 * step + rank))
            norm, found = expected.step(1e-2), superoffload.gradient_norm(made)
            assert found is not None
            assert abs(found - norm) < 1e-6 * norm, (found, norm)
        superoffload.synchronize(made)
        expected.assert_same_states(made)
        for state in sub_group_states(made):
            assert torch.equal(state.weights, state.master_weights.bfloat16())


def speculation(folder: Path) -> None:
    """Step before the norm is known, with norms above and below the limit, and with one rank's gradient not finite in one step.

    The states must be those of holding back, and of never having had that step. Meanwhile each rank writes a state for another while, in
    which it does not speculate.
    """
    rank = torch.distributed.get_rank()
    ends: list[bytes] = []
    for speculation_bytes, spoilt in ((0, None), (1 << 30, None), (1 << 30, 10)):
        run = support.spec("superoffload", 0.5, clipping=9.0)
        torch.manual_seed(run.train.seed)
        with support.engine(run, model=support.OddModel(), speculation_bytes=speculation_bytes, max_skipped_steps=1) as made:
            for step in range(200):
                if step == 20:
                    save = superoffload.begin_save(made, folder / f"saved-{len(ends)}")
                if step == 50 + 40 * rank:
                    save.finish()
                if step == spoilt:
                    hook = support.poison(made) if rank == 1 else None
                    support.train(made, support.batches(1, seed=7))
                    if hook:
                        hook.remove()
                    assert made.skipped_steps == 1
                superoffload.set_learning_rate(made, 1e-2 / (1 + step))
                support.train(made, support.batches(1, seed=100 * step + rank))
            ends.append(support.states(made, folder / f"{rank}-{len(ends)}", rank))
            stats = superoffload.stats(made)
            assert (min(stats.kept_steps, stats.redone_steps) >= 4) == bool(speculation_bytes), stats
    assert ends[0] == ends[1] == ends[2]
    torch.distributed.barrier()
    saved = [(folder / f"saved-{kind}" / f"rank_{rank:05d}.states").read_bytes() for kind in range(3)]
    assert saved[0] == saved[1]


def first(folder: Path) -> None:
    """Train, save, and train on for the losses that ``second`` must reproduce, in every mode. Then train until killed."""
    rank = torch.distributed.get_rank()
    for name, run in _runs():
        before, after = _data(run, rank)
        with support.engine(run) as made:
            support.train(made, before)
            superoffload.save_state(made, folder / name)
            expected = support.train(made, after)
            (folder / f"{name}.{rank}.json").write_text(json.dumps([expected, _fingerprint(made)]))
    endless(folder)


def second(folder: Path) -> None:
    """Resume in new processes: losses, and the weights gathered from all ranks, equal those of ``first`` bit for bit."""
    rank = torch.distributed.get_rank()
    for name, run in _runs():
        _, after = _data(run, rank)
        with support.engine(run) as made:
            superoffload.load_state(made, folder / name)
            found = [support.train(made, after), _fingerprint(made)]
        assert found == json.loads((folder / f"{name}.{rank}.json").read_text()), name


def endless(folder: Path) -> None:
    """Train until killed, or until ``folder/end`` exists and one more step is done."""
    with support.engine(support.spec("superoffload", 1.0, clipping=1.0), watchdog_timeout_s=3.0) as made:
        support.train(made, support.batches(1))
        print("worker", superoffload.worker_pid(made), flush=True)
        ended = False
        while not ended:
            ended = (folder / "end").exists()
            support.train(made, support.batches(1))
        superoffload.synchronize(made)


def _runs() -> Iterator[tuple[str, RunSpec]]:
    for mode, ratio, clipping, accumulation in RUNS:
        yield f"{mode}-{ratio}", support.spec(mode, ratio, clipping=clipping, accumulation=accumulation)


def _data(run: RunSpec, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the micro-batches before the save, and after it."""
    accumulation = run.train.gradient_accumulation
    data = support.batches((SAVED + RESUMED) * accumulation, seed=rank)
    return data[: SAVED * accumulation], data[SAVED * accumulation :]


def _fingerprint(made: Any) -> str:
    parameters = list(made.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(parameter.detach().view(torch.int16).cpu().numpy().tobytes())
        return digest.hexdigest()


if __name__ == "__main__":
    backend = "nccl" if os.environ["DS_ACCELERATOR"] == "cuda" else "gloo"
    superoffload.join_process_group(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    parts = {"reference": reference, "speculation": speculation, "first": first, "second": second, "endless": endless}
    parts[sys.argv[1]](Path(sys.argv[2]))
    leave()
