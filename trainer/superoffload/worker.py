"""The Adam worker: a process that runs AdamW on one rank's CPU sub-groups, in memory that it shares
with the training process.

The training process starts this file as an isolated script (``python -I -S worker.py PARENT``) and
writes the settings to its stdin, as a line of JSON. It uses the standard library only: without
torch it needs no CUDA context and no second OpenMP runtime, and it starts within milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Signals reach the whole process group. The training process decides what they mean, and
        # this process ends with it.
        signal.signal(number, signal.SIG_IGN)
    # Have the kernel kill this process when the training process ends, however it ends.
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("The training process is gone.")
    line = (
        sys.stdin.readline()
    )  # and not to the end: a process that was forked meanwhile may have the pipe open
    if not line.endswith("\n"):
        sys.exit("The training process is gone.")
    settings = json.loads(line)
    os.sched_setaffinity(
        0, settings["cpus"]
    )  # before OpenMP is loaded, which creates its threads accordingly
    import_from(Path(__file__).parent)
    from superoffload.adam import Kernel, memory_size, serve

    size = memory_size(settings["size"])
    weights = mmap.mmap(settings["weights"], 0) if size.host_weights else None
    with (
        mmap.mmap(settings["memory"], 0) as memory,
        socket.socket(fileno=settings["channel"]) as channel,
    ):
        serve(channel, Kernel(settings["library"], memory, size, weights).run)
        # the kernel still points into the memory, so leaving the block, which closes it, would fail
        os._exit(0)


def import_from(folder: Path) -> None:
    """Let this process import the engine's modules without the package's ``__init__``, which
    imports torch.
    """
    package = ModuleType("superoffload")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package


if __name__ == "__main__":
    main()
