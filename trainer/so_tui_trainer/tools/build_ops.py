"""Compile the kernels that a first run would compile, while all its ranks wait for one to three
minutes.

``{}`` in, ``{"cpu_adam": "built" | "ready", "seconds": s, "deepspeed": reason or
""}`` out. The kernels are our own CPU Adam and DeepSpeed's; ``deepspeed`` says why DeepSpeed's,
which only some settings need, cannot be compiled.
"""

from __future__ import annotations

import os
import sys
import time

from so_tui_trainer.tools.channel import Answer, serve


def build() -> Answer:
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
    from superoffload.deepspeed_adapter.engine import load_cpu_adam

    reason = ""
    try:
        load_cpu_adam()
    except Exception as error:  # noqa: BLE001 -- DeepSpeed's, a compiler's, or whatever it leads to
        reason = first_line(error)
    seconds = time.monotonic() - began
    # Loading a cached build takes a second or two, compiling most of a minute.
    return {
        "cpu_adam": "built" if seconds > 10 else "ready",
        "seconds": round(seconds, 1),
        "deepspeed": reason,
    }


if __name__ == "__main__":
    sys.exit(serve(lambda _: iter([build()])))
