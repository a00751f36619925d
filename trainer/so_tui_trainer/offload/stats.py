"""What the offload engine measured in the last optimizer step."""

from __future__ import annotations

from msgspec import Struct


class OffloadStats(Struct, frozen=True, kw_only=True):
    """Times of one step, this rank. All zero in the modes in which DeepSpeed's own optimizer runs (it does not tell)."""

    adam_busy_s: float = 0.0
    """Seconds the Adam worker computed."""
    exposed_wait_s: float = 0.0
    """Seconds for which the GPU had nothing to do but wait for the worker, its copies or the gradient norm."""
    exposed_in_forward_s: float = 0.0
    """The part of it that fell into the forward pass: waiting for the weights of the step before."""
    host_wait_s: float = 0.0
    """Seconds for which the main thread was held up by the engine. Not all of it is lost: the GPU may still have had work."""
    to_host_bytes: int = 0
    to_host_s: float = 0.0
    """Seconds during which gradients were being copied (0 on a machine without GPU: nothing is copied)."""
    to_gpu_bytes: int = 0
    to_gpu_s: float = 0.0
