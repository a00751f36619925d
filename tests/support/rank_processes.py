"""Ranks of a small run: a script is started once per rank, awaited, or killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.python_path import checkout_path
from tests.support.waiting import LIMIT_S

Ranks = list[subprocess.Popen[str]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    port: int | None = None,
    accelerator: str = "cpu",
) -> Ranks:
    shared = os.environ | {
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
            [sys.executable, str(script), *arguments],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(ranks: Ranks) -> list[str]:
    """Wait for all ranks, assert that each ended with code 0, and return their outputs."""
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(
        output[-4000:] for output in outputs
    )
    return outputs


def leave() -> NoReturn:
    """End a rank that is done; else gloo's threads may abort an interpreter that exits."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def worker_of(rank: subprocess.Popen[str]) -> int:
    """Return the Adam worker's process id, which a rank prints as soon as it trains."""
    assert rank.stdout is not None
    output = []
    for line in rank.stdout:
        output.append(line)
        if line.startswith("worker "):
            return int(line.split()[1])
    pytest.fail("".join(output)[-4000:])


def gone(pids: Sequence[int]) -> bool:
    """Return whether all these processes end within a minute, on a busy machine."""
    deadline = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
