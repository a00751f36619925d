"""Loads DeepSpeed's CPU Adam kernel, which torch compiles where it is first needed."""

from __future__ import annotations

import fcntl
from pathlib import Path

from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.utils.cpp_extension import _get_build_directory


def load_cpu_adam() -> None:
    """Load the kernel, compiling it if it is not cached. Call it before ``DeepSpeedCPUAdam`` is made.

    While torch compiles, a file named ``lock`` stands in the build folder. A process that is killed leaves it there, and every later one
    would wait for it forever. So one process at a time gets this far, by a lock that the kernel releases, and removes such a file.

    Raises:
        RuntimeError, OSError, AssertionError: DeepSpeed or the compiler refuses.
    """
    builder = CPUAdamBuilder()
    folder = Path(_get_build_directory(builder.name, False))
    with (folder / "so-tui.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)
