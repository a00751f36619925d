"""The Adam worker: a process that runs AdamW on one rank's CPU sub-groups, in memory that it shares with the training process.

The training process starts this file as an isolated script (``python -I -S worker.py``). It uses the standard library only: without torch
it needs no CUDA context and no second OpenMP runtime, and it starts within milliseconds. Commands and results are fixed-size packets on a
socket; tensors never move.

The training process imports this module for the packets and for the layout of the shared memory.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

REGION_ALIGNMENT = 65536
"""Bytes. The largest page size in use (aarch64), so that a region can be pinned without its neighbours."""
SUB_GROUP_ALIGNMENT = 64
"""Bytes. A cache line, so that threads working on adjacent sub-groups share none."""


class Operation(IntEnum):
    INITIALIZE = 0
    """Copy the weights in the staging buffer to the fp32 master weights, and zero the moments."""
    ACCUMULATE = 1
    """Add the gradient in the staging buffer to the accumulated gradient."""
    STEP = 2
    """Run AdamW and leave the new weights in the staging buffer."""


class GradientSource(IntEnum):
    """Where STEP finds the gradient."""

    STAGING = 0
    """In the staging buffer: there is only one micro-batch."""
    ACCUMULATED = 1
    """In the accumulated gradient, which includes every micro-batch."""
    ACCUMULATED_AND_STAGING = 2
    """The accumulated gradient of all earlier micro-batches, plus the last micro-batch's in the staging buffer."""


class Command(NamedTuple):
    operation: int
    sub_group: int
    """Position among the sub-groups of this worker."""
    step: int = 0
    first_micro_batch: int = 0
    """ACCUMULATE: overwrite the accumulated gradient instead of adding to it."""
    gradient: int = GradientSource.STAGING
    """STEP: a ``GradientSource``."""
    scale: float = 1.0
    """STEP: factor of the gradient, from clipping."""
    learning_rate: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    weight_decay: float = 0.0


class Result(NamedTuple):
    operation: int
    sub_group: int
    step: int
    sum_of_squares: float
    """Of the gradient before scaling; not finite if the gradient is not."""
    seconds: float


COMMAND = struct.Struct("<iiqii6d")
RESULT = struct.Struct("<iiqdd")


class MemoryLayout(NamedTuple):
    """Byte offsets of each sub-group's arrays in the shared memory, whose first 8 bytes hold the progress counter."""

    staging: tuple[int, ...]
    master_weights: tuple[int, ...]
    first_moment: tuple[int, ...]
    second_moment: tuple[int, ...]
    accumulated: tuple[int, ...]
    """Empty without gradient accumulation."""
    staging_start: int
    staging_bytes: int
    bytes: int
    """Size of the whole memory."""


def layout(numels: tuple[int, ...], weight_bytes: int, accumulate: bool) -> MemoryLayout:
    """Lay out the shared memory: 14 bytes a parameter for bf16 weights, 18 with gradient accumulation.

    Args:
        numels: Elements of each sub-group.
        weight_bytes: Bytes of one weight, 2 for bf16 and 4 for fp32.
        accumulate: Whether room for accumulated gradients is needed.
    """
    end = REGION_ALIGNMENT
    regions = []
    for size in (weight_bytes, 4, 4, 4) + ((4,) if accumulate else ()):
        offsets = []
        for numel in numels:
            offsets.append(end)
            end += -(-numel * size // SUB_GROUP_ALIGNMENT) * SUB_GROUP_ALIGNMENT
        end = -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
        regions.append(tuple(offsets))
    staging, master_weights, first, second, *rest = regions
    staging_end = master_weights[0] if master_weights else end
    return MemoryLayout(
        staging, master_weights, first, second, rest[0] if rest else (), REGION_ALIGNMENT, staging_end - REGION_ALIGNMENT, end
    )


class AdamWScalars(ctypes.Structure):
    """The scalars of one AdamW step, as in ``adam.cpp``: computed in double precision, as torch does, and rounded once."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "scale",
            "decay_factor",
            "beta1",
            "one_minus_beta1",
            "beta2",
            "one_minus_beta2",
            "step_size",
            "root_bias_correction2",
            "epsilon",
        )
    ]


def adamw_scalars(command: Command) -> AdamWScalars:
    """Return the scalars for a STEP command."""
    return AdamWScalars(
        command.scale,
        1 - command.learning_rate * command.weight_decay,
        command.beta1,
        1 - command.beta1,
        command.beta2,
        1 - command.beta2,
        command.learning_rate / (1 - command.beta1**command.step),
        math.sqrt(1 - command.beta2**command.step),
        command.epsilon,
    )


class Kernel:
    """The compiled functions, bound to one shared memory."""

    def __init__(self, library: str, memory: mmap.mmap, numels: tuple[int, ...], weight_bytes: int, accumulate: bool) -> None:
        self._numels = numels
        self._layout = layout(numels, weight_bytes, accumulate)
        self._is_bf16 = int(weight_bytes == 2)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        functions = ctypes.CDLL(library)
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._initialize = functions.superoffload_initialize
        self._accumulate = functions.superoffload_accumulate
        self._step = functions.superoffload_step
        self._initialize.argtypes = [pointer] * 5 + [integer, long, pointer]
        self._accumulate.argtypes = [pointer, pointer, integer, integer, long, pointer]
        self._step.argtypes = [pointer] * 6 + [integer, integer, long, pointer]
        for function in (self._initialize, self._accumulate, self._step):
            function.restype = ctypes.c_double

    def run(self, command: Command) -> float:
        """Execute a command and return the gradient's sum of squares."""
        index = command.sub_group
        offsets, numel, progress = self._layout, self._numels[index], self._base
        staging, master_weights, first, second = (
            self._base + region[index] for region in (offsets.staging, offsets.master_weights, offsets.first_moment, offsets.second_moment)
        )
        accumulated = self._base + offsets.accumulated[index] if offsets.accumulated else None
        if command.operation == Operation.STEP:
            summed = None if command.gradient == GradientSource.STAGING else accumulated
            add_staging = int(command.gradient != GradientSource.ACCUMULATED)
            scalars = ctypes.byref(adamw_scalars(command))
            return float(self._step(scalars, master_weights, first, second, summed, staging, self._is_bf16, add_staging, numel, progress))
        if command.operation == Operation.ACCUMULATE:
            return float(self._accumulate(accumulated, staging, self._is_bf16, command.first_micro_batch, numel, progress))
        return float(self._initialize(master_weights, first, second, accumulated, staging, self._is_bf16, numel, progress))


def serve(channel: socket.socket, kernel: Kernel) -> None:
    """Execute commands in order until the other side closes the socket, which it may do at any time."""
    with suppress(ConnectionError):
        while packet := channel.recv(COMMAND.size):
            command = Command(*COMMAND.unpack(packet))
            begin = time.monotonic()
            squares = kernel.run(command)
            result = Result(command.operation, command.sub_group, command.step, squares, time.monotonic() - begin)
            channel.send(RESULT.pack(*result))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the training process ends, however it ends."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("The training process is gone.")


def main(arguments: list[str]) -> None:
    settings = json.loads(arguments[0])
    _die_with(settings["parent"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Signals reach the whole process group. The training process decides what they mean, and this process ends with it.
        signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, settings["cpus"])  # before OpenMP is loaded, which creates its threads accordingly
    numels = tuple(settings["numels"])
    with mmap.mmap(settings["memory"], 0) as memory, socket.socket(fileno=settings["channel"]) as channel:
        serve(channel, Kernel(settings["library"], memory, numels, settings["weight_bytes"], settings["accumulate"]))
        os._exit(0)  # the kernel still points into the memory, so leaving the block, which closes it, would fail


if __name__ == "__main__":
    main(sys.argv[1:])
