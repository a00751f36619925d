"""Python's garbage collection during training."""

from __future__ import annotations

import gc


def freeze() -> None:
    """Keep what was loaded out of every later collection. Call it when all is loaded, before the first step.

    A full collection looks at every object that there is: with the libraries some hundred thousand, which takes a good part of a step. It
    may begin anywhere in a step, on any rank, and the others wait for that rank in their next collective.
    """
    gc.collect()
    gc.freeze()
