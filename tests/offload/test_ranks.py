"""Two ranks over gloo, each with its own worker. The ranks are this file, run as a script."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(what: str, folder: Path, ranks: int, port: int | None = None) -> list[subprocess.Popen[str]]:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "trainer")]),
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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["reference", "resume"])
def test_two_ranks(what: str, tmp_path: Path) -> None:
    ranks = start(what, tmp_path, 2)
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(output[-4000:] for output in outputs)


@pytest.mark.slow
def test_nothing_of_killed_ranks_stays(tmp_path: Path) -> None:
    """Neither the workers nor shared memory with a name: DeepSpeed's collectives on a CPU would make 69 MB a rank, named by the port."""
    port = free_port()
    ranks = start("wait", tmp_path, 2, port)
    pids = []
    for rank in ranks:
        assert rank.stdout is not None
        pid = next((int(line.split()[1]) for line in rank.stdout if line.startswith("worker ")), None)
        assert pid is not None
        assert Path(f"/proc/{pid}").exists()
        pids.append(pid)
    for rank in ranks:
        rank.kill()
        rank.communicate()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not list(Path("/dev/shm").glob(f"*_{port}_*"))


def reference(folder: Path) -> None:
    """Masters and moments of each rank's share agree with float32 AdamW, with padding, clipping at every step and two micro-steps."""
    import torch

    from so_tui_trainer import offload
    from so_tui_trainer.offload.deepspeed_0_19_8 import sub_group_states
    from tests.offload import support
    from tests.offload.reference import Reference, distance

    run = support.spec("superoffload", 0.5, clipping=1e-3, accumulation=2)
    rank = torch.distributed.get_rank()
    with support.engine(run) as made:
        reference = Reference(made, clipping=1e-3)
        for step in range(20):
            support.train(made, support.batches(2, seed=100 * step + rank))
            norm = reference.step(1e-2)
            assert abs(offload.gradient_norm(made) - norm) < 1e-6 * norm, (offload.gradient_norm(made), norm)
        offload.settle(made)
        for state, expected in zip(sub_group_states(made), reference.masters, strict=True):
            assert distance(state.master, expected.detach()) < 1e-6
            assert distance(state.exp_avg, reference.optimizer.state[expected]["exp_avg"]) < 1e-6
            assert distance(state.exp_avg_sq, reference.optimizer.state[expected]["exp_avg_sq"]) < 1e-6
            assert torch.equal(state.weights, state.master.bfloat16())


def resume(folder: Path) -> None:
    """Losses after a resume are those of the run that was never stopped, bit by bit; so are the weights gathered from both ranks."""
    import deepspeed
    import torch

    from so_tui_trainer import offload
    from tests.offload import support

    run = support.spec("superoffload", 0.8, clipping=1.0)
    data = support.batches(8, seed=torch.distributed.get_rank())

    def weights(made: object) -> list[torch.Tensor]:
        parameters = list(made.module.parameters())  # type: ignore[attr-defined]
        with deepspeed.zero.GatheredParameters(parameters):
            return [parameter.detach().clone() for parameter in parameters]

    with support.engine(run) as whole:
        support.train(whole, data[:4])
        offload.save_state(whole, folder)
        losses = support.train(whole, data[4:])
        expected = weights(whole)
    with support.engine(run) as second:
        offload.load_state(second, folder)
        assert support.train(second, data[4:]) == losses
        assert all(torch.equal(*pair) for pair in zip(weights(second), expected, strict=True))


def wait(folder: Path) -> None:
    from so_tui_trainer import offload
    from tests.offload import support

    with support.engine(support.spec("superoffload", 1.0)) as made:
        support.train(made, support.batches(1))
        print("worker", offload.worker_pid(made), flush=True)
        signal.pause()


if __name__ == "__main__":
    from so_tui_trainer import offload

    offload.join_process_group(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    {"reference": reference, "resume": resume, "wait": wait}[sys.argv[1]](Path(sys.argv[2]))
