"""Kill ranks that save after every step at random times: a valid checkpoint always remains, and
training resumes from it exactly.

The ranks run this file as a script: one process does the slow imports, then forks the two ranks of
every round.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_processes import environment, free_port

ROUNDS = 10
RANKS = 2


class Nursery:
    """The process that has done the imports and forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(RANKS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def ask(self, *words: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate()


@pytest.mark.slow
def test_a_valid_checkpoint_remains_whenever_ranks_die(tmp_path: Path) -> None:
    from so_tui_trainer import checkpoint

    rng = random.Random(4)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    log = killed / "log"
    log.touch()
    nursery = Nursery()
    torn = 0
    for _ in range(ROUNDS):
        known = len(lines(log, "saved"))
        group = int(nursery.ask("fork", free_port(), killed, 10**6))
        wait_until(lambda: len(lines(log, "saved")) > known)  # noqa: B023 -- called before the next round; the run has resumed
        wait_until(lambda: any(killed.glob("*.partial")))
        time.sleep(rng.uniform(0, 1.2) * float(lines(log, "saved")[-1][1]))
        os.killpg(group, signal.SIGKILL)
        assert nursery.ask("reap") == f"{[-signal.SIGKILL] * RANKS}"
        torn += any(killed.glob("*.partial"))
        found = checkpoint.newest(killed)
        assert found is not None
        assert not found.damaged
        assert found.manifest.step >= max(int(step) for step, *_ in lines(log, "saved"))
    assert torn >= ROUNDS / 4, "the kills came when nothing was being written"
    losses: defaultdict[int, set[str]] = defaultdict(set)
    for step, loss in lines(log, "loss"):
        losses[int(step)].add(loss)
    # Steps that were trained twice gave the same bits, and so does a run that was never killed.
    last = len(losses)
    nursery.ask("fork", free_port(), whole, last)
    assert nursery.ask("reap") == f"{[0] * RANKS}"
    assert losses == {int(step): {loss} for step, loss in lines(whole / "log", "loss")}
    nursery.close()


def lines(log: Path, kind: str) -> list[list[str]]:
    return [line.split()[1:] for line in log.read_text().splitlines() if line.startswith(kind)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def serve() -> None:
    """Serve requests: ``fork PORT FOLDER STEPS`` answers with the process group of the new ranks,
    ``reap`` with their exit codes.
    """
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 -- as DeepSpeed does for every engine, and torch's compiler with it

    from tests.support import engine as support

    assert support.DEVICE.type == "cpu"
    pids: list[int] = []
    for line in sys.stdin:
        match line.split():
            case ["fork", port, folder, steps]:
                pids = []
                for rank in range(RANKS):
                    pid = os.fork()
                    if not pid:
                        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
                        train(Path(folder), int(steps))
                        os._exit(0)
                    pids.append(pid)
                    os.setpgid(pid, pids[0])
                print(pids[0], flush=True)
            case _:
                print(
                    [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True
                )


def train(folder: Path, steps: int) -> None:
    """Resume from the newest checkpoint, save after every step, and log losses and saves."""
    import msgspec
    import torch

    import superoffload
    from so_tui.spec.run_spec import CheckpointSpec
    from so_tui_trainer import checkpoint
    from so_tui_trainer.ranks import Ranks
    from tests.support import engine as support

    os.dup2(2, 1)  # stdout is for answers, and DeepSpeed prints to it
    superoffload.join_process_group(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    ranks = Ranks(
        int(os.environ["RANK"]),
        RANKS,
        torch.device("cpu"),
        torch.distributed.new_group(backend="gloo"),
    )
    run = msgspec.structs.replace(
        support.spec("gpu", 0.0, clipping=1.0), checkpoint=CheckpointSpec(keep=1)
    )
    found = ranks.broadcast(
        checkpoint.newest(folder) if ranks.first else None, checkpoint.Found | None
    )
    torch.manual_seed(0)
    model = support.Model()
    model.blocks = model.blocks[:1]
    with support.engine(run, model=model) as made, (folder / "log").open("a", buffering=1) as log:
        step = found.manifest.step if found else 0
        if found:
            checkpoint.load(made, found.path, found.manifest, ranks)
        while step < steps:
            step += 1
            (loss,) = support.train(made, support.batches(1, seed=1000 * step + ranks.rank))
            if ranks.first:
                log.write(f"loss {step} {loss.hex()}\n")
            seconds = (
                checkpoint.Saving(
                    made, support.manifest(step, run, RANKS), folder, ranks, attempt=1
                )
                .wait()
                .seconds
            )
            if ranks.first:
                log.write(f"saved {step} {seconds}\n")


if __name__ == "__main__":
    serve()
