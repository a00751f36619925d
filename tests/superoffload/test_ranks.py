"""Several ranks over gloo, each with its own worker; killed, suspended, resumed. The ranks are this file, run as a script."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import pytest

from tests.support.python_path import checkout_path

if TYPE_CHECKING:
    from so_tui.spec.types import RunSpec

SAVED, RESUMED = 5, 20
"""Steps before the save, and after it."""
MODES: tuple[tuple[Literal["gpu", "superoffload", "zerooffload"], float, float, int], ...] = (
    ("superoffload", 0.37, 1.0, 1),
    ("superoffload", 1.0, 0.0, 3),
    ("zerooffload", 1.0, 1.0, 1),
    ("zerooffload", 0.5, 1.0, 1),
    ("gpu", 0.0, 1.0, 1),
)
"""Offload mode, ratio, clipping, accumulation."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(what: str, folder: Path, ranks: int, port: int | None = None, accelerator: str = "cpu") -> list[subprocess.Popen[str]]:
    environment = os.environ | {
        "DS_ACCELERATOR": accelerator,
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": checkout_path(),
    }
    return [
        subprocess.Popen(
            [sys.executable, __file__, what, str(folder)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(ranks: list[subprocess.Popen[str]]) -> None:
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(output[-4000:] for output in outputs)


def leave() -> NoReturn:
    """For ranks that have done their part: gloo's threads may abort an interpreter that ends while they still talk."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def worker_of(rank: subprocess.Popen[str]) -> int:
    """Told by the rank as soon as it trains."""
    assert rank.stdout is not None
    output = []
    for line in rank.stdout:
        output.append(line)
        if line.startswith("worker "):
            return int(line.split()[1])
    pytest.fail("".join(output)[-4000:])


def gone(pids: list[int]) -> bool:
    """Soon."""
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_three_ranks_of_which_some_hold_only_padding() -> None:
    finish(start("reference", Path(), 3))


@pytest.mark.slow
def test_killed_ranks_leave_nothing_and_resumed_they_go_on_bit_for_bit(tmp_path: Path) -> None:
    """No Adam worker, no shared memory with a name: DeepSpeed's collectives on a CPU would make 69 MB a rank, named by the port."""
    port = free_port()
    ranks = start("first", tmp_path, 2, port)
    workers = [worker_of(rank) for rank in ranks]
    os.kill(workers[0], signal.SIGSTOP)  # even so it ends
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate()
    assert gone(workers)
    assert not list(Path("/dev/shm").glob(f"*_{port}_*"))
    finish(start("second", tmp_path, 2))


@pytest.mark.slow
def test_time_for_which_a_rank_is_suspended_with_its_worker_is_no_silence(tmp_path: Path) -> None:
    """As a scheduler suspends a job. The rank goes on first, and finds its worker where it was."""
    (rank,) = start("endless", tmp_path, 1)
    worker = worker_of(rank)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(0.2)  # now it owes a result
    os.kill(rank.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(rank.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(worker, signal.SIGCONT)
    (tmp_path / "end").touch()
    finish([rank])


# -- the ranks ----------------------------------------------------------------------------------------------------------------------------


def reference(folder: Path) -> None:
    """Masters and moments of each rank's share agree with float32 AdamW, with padding, clipping at every step and two micro-steps.

    Of parameters with one or two elements some ranks hold nothing but padding.
    """
    import torch

    import superoffload
    from superoffload.deepspeed_adapter.engine import sub_group_states
    from tests.support import engine as support
    from tests.support.reference_adamw import Reference, distance

    run = support.spec("superoffload", 0.5, clipping=1e-3, accumulation=2)
    rank = torch.distributed.get_rank()
    torch.manual_seed(run.train.seed)
    with support.engine(run, model=support.OddModel()) as made:
        reference = Reference(made, clipping=1e-3)
        for step in range(20):
            support.train(made, support.batches(2, seed=100 * step + rank))
            norm = reference.step(1e-2)
            assert abs(superoffload.gradient_norm(made) - norm) < 1e-6 * norm, (superoffload.gradient_norm(made), norm)
        superoffload.synchronize(made)
        for state, expected in zip(sub_group_states(made), reference.masters, strict=True):
            assert distance(state.master, expected.detach()) < 1e-6
            assert distance(state.exp_avg, reference.optimizer.state[expected]["exp_avg"]) < 1e-6
            assert distance(state.exp_avg_sq, reference.optimizer.state[expected]["exp_avg_sq"]) < 1e-6
            assert torch.equal(state.weights, state.master.bfloat16())


def runs() -> Iterator[tuple[str, RunSpec]]:
    from tests.support import engine as support

    for mode, ratio, clipping, accumulation in MODES:
        name = f"{mode}-{ratio}"
        yield name, support.spec(mode, ratio, clipping=clipping, accumulation=accumulation)


def first(folder: Path) -> None:
    """Every mode: train, save, and train on for the losses that ``second`` must find again. Then train on, to be killed in the middle."""
    import torch

    import superoffload
    from tests.support import engine as support

    rank = torch.distributed.get_rank()
    for name, run in runs():
        gradient_accumulation_steps = SAVED * run.train.gradient_accumulation
        data = support.batches((SAVED + RESUMED) * run.train.gradient_accumulation, seed=rank)
        with support.engine(run) as made:
            support.train(made, data[:gradient_accumulation_steps])
            superoffload.save_state(made, folder / name)
            expected = support.train(made, data[gradient_accumulation_steps:])
            (folder / f"{name}.{rank}.json").write_text(json.dumps([expected, fingerprint(made)]))
    endless(folder)


def second(folder: Path) -> None:
    """In new processes: losses, and the weights gathered from all ranks, are those of the run that was never stopped, bit by bit."""
    import torch

    import superoffload
    from tests.support import engine as support

    rank = torch.distributed.get_rank()
    for name, run in runs():
        gradient_accumulation_steps = SAVED * run.train.gradient_accumulation
        data = support.batches((SAVED + RESUMED) * run.train.gradient_accumulation, seed=rank)
        with support.engine(run) as made:
            superoffload.load_state(made, folder / name)
            found = [support.train(made, data[gradient_accumulation_steps:]), fingerprint(made)]
        assert found == json.loads((folder / f"{name}.{rank}.json").read_text()), name


def fingerprint(made: object) -> str:
    import hashlib

    import deepspeed
    import torch

    parameters = list(made.module.parameters())  # type: ignore[attr-defined]
    with deepspeed.zero.GatheredParameters(parameters):
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(parameter.detach().view(torch.int16).cpu().numpy().tobytes())
        return digest.hexdigest()


def endless(folder: Path) -> None:
    """Trains until it is killed, or ``folder/end`` is there and a step is done after it."""
    import superoffload
    from tests.support import engine as support

    with support.engine(support.spec("superoffload", 1.0, clipping=1.0), watchdog_timeout_s=3.0) as made:
        support.train(made, support.batches(1))
        print("worker", superoffload.worker_pid(made), flush=True)
        ended = False
        while not ended:
            ended = (folder / "end").exists()
            support.train(made, support.batches(1))
        superoffload.synchronize(made)


if __name__ == "__main__":
    import superoffload

    backend = "nccl" if os.environ["DS_ACCELERATOR"] == "cuda" else "gloo"
    superoffload.join_process_group(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    parts = {"reference": reference, "first": first, "second": second, "endless": endless}
    parts[sys.argv[1]](Path(sys.argv[2]))
    leave()
