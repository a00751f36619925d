"""A rank that trains the small model with the engine. Run as a script:
``engine_ranks.py PART,PART FOLDER``.
"""

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
from msgspec.structs import replace

import superoffload
from so_tui.model.sharding import StatesFormat
from so_tui.spec.run_spec import RunSpec
from superoffload.deepspeed_adapter.engine import sub_group_states
from tests.support import engine as support
from tests.support.rank_processes import leave
from tests.support.reference_adamw import Reference, record_gradients

SCRIPT = Path(__file__)
PARAMETERS: tuple[support.Parameters, ...] = ("none", "cpu")
SAVED, RESUMED = 5, 8
"""Steps before the save, and after it."""
RUNS: tuple[tuple[support.Mode, float, float, int], ...] = (
    ("superoffload", 0.37, 1.0, 1),
    ("superoffload", 1.0, 0.0, 3),
    ("zerooffload", 0.5, 1.0, 1),
    ("gpu", 0.0, 1.0, 1),
)
"""Offload mode, ratio, clipping, gradient accumulation steps."""


def reference(folder: Path) -> None:
    """Compare each rank's shards, of which some are nothing but padding, with float32 AdamW."""
    run = support.spec("superoffload", 0.5, clipping=1e-3, accumulation=2)
    rank = torch.distributed.get_rank()
    torch.manual_seed(run.train.seed)
    with support.engine(run, model=support.OddModel()) as made:
        expected = Reference(made, clipping=1e-3)
        for step in range(8):
            support.train(made, support.batches(2, seed=100 * step + rank))
            norm, found = expected.step(1e-2), superoffload.gradient_norm(made)
            assert found is not None
            assert abs(found - norm) < 1e-6 * norm, (found, norm)
        superoffload.synchronize(made)
        expected.assert_same_states(made)
        for state in sub_group_states(made):
            assert torch.equal(state.weights, state.master_weights.bfloat16())


def speculation(folder: Path) -> None:
    """Step before the norm is known, also with one rank's gradient not finite in one step: the
    states of holding back. Meanwhile each rank writes a state, and does not speculate.
    """
    rank = torch.distributed.get_rank()
    ends: list[bytes] = []
    settings: dict[str, Any] = {"clipping": 11.5, "max_skipped_steps": 1}
    for number, (speculation_bytes, spoilt) in enumerate(
        ((0, None), (support.ALL, None), (support.ALL, 45))
    ):
        torch.manual_seed(0)
        model, settings["speculation_bytes"] = support.OddModel(), speculation_bytes
        with support.offloading(0.5, model, **settings) as made:
            for step in range(60):
                if step == 20:
                    save = superoffload.begin_save(made, folder / f"saved-{number}")
                if step == 30 + 10 * rank:
                    save.finish()
                if step == spoilt:
                    hook = support.poison(made) if rank == 1 else None
                    support.train(made, support.batches(1, seed=7))
                    if hook:
                        hook.remove()
                    assert made.skipped_steps == 1
                superoffload.set_learning_rate(made, 1e-2 / (1 + step))
                support.train(made, support.batches(1, seed=100 * step + rank))
            ends.append(support.states(made, folder / f"{rank}-{number}", rank))
            stats = superoffload.stats(made)
            rarest = min(stats.kept_steps, stats.redone_steps)
            assert (rarest >= 4) == bool(speculation_bytes), stats
    assert ends[0] == ends[1] == ends[2]
    torch.distributed.barrier()
    saved = [support.saved_bytes(folder / f"saved-{kind}", rank) for kind in range(3)]
    assert saved[0] == saved[1]


def host_weights(folder: Path) -> None:
    """Weights on the GPU and in host memory: the same losses, gradients, weights and states."""
    rank = torch.distributed.get_rank()
    for clipping, accumulation, speculation_bytes in ((0.0, 2, 0), (9.0, 1, 1 << 30)):
        ends: list[tuple[Any, ...]] = []
        for parameters in PARAMETERS:
            torch.manual_seed(0)
            run = {"clipping": clipping, "accumulation": accumulation, "parameters": parameters}
            run["speculation_bytes"] = speculation_bytes
            with support.offloading(0.5, support.OddModel(), **run) as made:
                gradients = record_gradients(made)
                losses = support.train(made, support.batches(10 * accumulation, seed=rank))
                assert len(gradients) > 10
                states = support.states(made, folder / parameters, rank)
                ends.append((losses, gradients, _fingerprint(made), states))
        assert ends[0] == ends[1], (clipping, accumulation, speculation_bytes)
    torch.distributed.barrier()


def first(folder: Path) -> None:
    """Train, save, train on for the losses of ``second``, in every mode; then until killed."""
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
    """Resume in new processes: losses and gathered weights equal those of ``first`` bit for bit."""
    rank = torch.distributed.get_rank()
    for name, run in _runs():
        _, after = _data(run, rank)
        with support.engine(run) as made:
            superoffload.load_state(made, folder / name)
            found = [support.train(made, after), _fingerprint(made)]
        assert found == json.loads((folder / f"{name}.{rank}.json").read_text()), name


def endless(folder: Path) -> None:
    """Train until killed, or until ``folder/end`` exists and one more step is done."""
    with support.offloading(clipping=1.0, watchdog_timeout_s=3.0) as made:
        support.train(made, support.batches(1))
        print("worker", superoffload.worker_pid(made), flush=True)
        ended = False
        while not ended:
            ended = (folder / "end").exists()
            support.train(made, support.batches(1))
        superoffload.synchronize(made)


def reshard(folder: Path) -> None:
    """Resume with the same data from one rank's state: these ranks train on as it did."""
    losses = torch.load(folder / "losses")
    for name, run, states in formats():
        with support.engine(run, states=states) as made:
            superoffload.load_state(made, folder / f"one {name}")
            superoffload.save_state(made, folder / f"two {name}")
            found = support.train(made, support.batches(6)[4:])
            torch.testing.assert_close(found, losses[name], rtol=1e-2, atol=0)


def formats() -> Iterator[tuple[str, RunSpec, StatesFormat]]:
    """Yield every mode and every format of the states, by name."""
    for name, run in _runs():
        yield name, replace(run, train=replace(run.train, gradient_accumulation=1)), "fp32"
    run = support.spec("superoffload", 1.0, clipping=1.0)
    yield "8 bits", run, "int8-moments"
    yield "16 bits", run, "bf16-moments"


def _runs() -> Iterator[tuple[str, RunSpec]]:
    for mode, ratio, clipping, accumulation in RUNS:
        run = support.spec(mode, ratio, clipping=clipping, accumulation=accumulation)
        yield f"{mode}-{ratio}", run


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
    known = (reference, speculation, host_weights, first, second, endless, reshard)
    parts = {part.__name__: part for part in known}
    for part in sys.argv[1].split(","):
        parts[part](Path(sys.argv[2]))
    leave()
