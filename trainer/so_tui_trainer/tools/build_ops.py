"""Compile the kernels that a first run would compile, while all its ranks wait for one to three
minutes.

``{}`` in, ``{"cpu_adam": "built" | "ready", "seconds": s, "deepspeed": reason or
""}`` out. The kernels are our own CPU Adam and DeepSpeed's; ``deepspeed`` says why DeepSpeed's,
which only some settings need, cannot be compiled.
"""

from __future__ import annotations

import json
import os
import sys
import time


def build() -> dict[str, object]:
    """Load the kernels, and compile those that are not cached.

    Raises:
        OffloadError: Our own kernel cannot be compiled.
    """
    import torch

    from so_tui.spec import first_line
    from superoffload import kernel

    began = time.monotonic()
    kernel.library()
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException

    from superoffload.deepspeed_adapter.engine import load_cpu_adam

    reason = ""
    try:
        load_cpu_adam()
    except (
        RuntimeError,
        OSError,
        AssertionError,
        CUDAMismatchException,
        MissingCUDAException,
    ) as error:
        reason = first_line(error)
    seconds = time.monotonic() - began
    # Loading a cached build takes a second or two, compiling most of a minute.
    return {
        "cpu_adam": "built" if seconds > 10 else "ready",
        "seconds": round(seconds, 1),
        "deepspeed": reason,
    }


def main() -> int:
    """Answer the request on stdin."""
    # The compiler and DeepSpeed print to stdout, which is reserved for the answer.
    answer_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdin.read()
    json.dump(build(), answer_stream)
    answer_stream.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
