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
from typing import Any, NamedTuple

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
    """Run AdamW in place and leave the new weights in the staging buffer."""
    SPECULATE = 3
    """Run AdamW from the current set of states into the other one, and leave the new weights in the second buffer."""
    RESTORE = 4
    """Leave the weights of the current set of states in the staging buffer."""


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
    """STEP, SPECULATE: a ``GradientSource``."""
    states: int = 0
    """STEP, SPECULATE, RESTORE: which of the two sets of states is current."""
    scale: float = 1.0
    """STEP, SPECULATE: factor of the gradient, from clipping."""
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


COMMAND = struct.Struct("<iiqiii6d")
RESULT = struct.Struct("<iiqdd")


class StateOffsets(NamedTuple):
    """Byte offsets of one set of fp32 states."""

    master_weights: tuple[int, ...]
    first_moment: tuple[int, ...]
    second_moment: tuple[int, ...]


class MemoryLayout(NamedTuple):
    """Byte offsets of each sub-group's arrays in the shared memory, whose first 8 bytes hold the progress counter."""

    staging: tuple[int, ...]
    new_weights: tuple[int, ...]
    """Where SPECULATE leaves the weights. Of no size for a sub-group that does not speculate, as the second set of states."""
    states: tuple[StateOffsets, StateOffsets]
    accumulated: tuple[int, ...]
    """Empty without gradient accumulation."""
    staging_start: int
    staging_bytes: int
    bytes: int
    """Size of the whole memory."""


class MemorySize(NamedTuple):
    """What decides the layout of the shared memory."""

    numels: tuple[int, ...]
    """Elements of each sub-group."""
    weight_bytes: int
    """Of one weight: 2 for bf16, 4 for fp32."""
    accumulate: bool
    """Whether there is room for accumulated gradients."""
    speculating: tuple[int, ...] = ()
    """Positions of the sub-groups that have a second set of states."""


def layout(size: MemorySize) -> MemoryLayout:
    """Lay out the shared memory: 14 bytes a parameter for bf16 weights; 14 more for one that speculates, 4 with gradient accumulation."""
    end = REGION_ALIGNMENT

    def region(element_bytes: int, numels: tuple[int, ...]) -> tuple[int, ...]:
        nonlocal end
        offsets = []
        for numel in numels:
            offsets.append(end)
            end += -(-numel * element_bytes // SUB_GROUP_ALIGNMENT) * SUB_GROUP_ALIGNMENT
        end = -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return tuple(offsets)

    numels = size.numels
    second = tuple(numel if index in size.speculating else 0 for index, numel in enumerate(numels))
    staging, new_weights = region(size.weight_bytes, numels), region(size.weight_bytes, second)
    staging_bytes = end - REGION_ALIGNMENT
    states = tuple(StateOffsets(region(4, each), region(4, each), region(4, each)) for each in (numels, second))
    accumulated = region(4, numels) if size.accumulate else ()
    return MemoryLayout(staging, new_weights, (states[0], states[1]), accumulated, REGION_ALIGNMENT, staging_bytes, end)


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
    """Return the scalars for a STEP or SPECULATE command."""
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


class States(ctypes.Structure):
    """One set of a sub-group's fp32 arrays, as in ``adam.cpp``; all null for a set that does not exist."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("master_weights", "first_moment", "second_moment")]


class Kernel:
    """The compiled functions, bound to one shared memory."""

    def __init__(self, library: str, memory: mmap.mmap, size: MemorySize) -> None:
        self._size = size
        self._layout = layout(size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        functions = ctypes.CDLL(library)
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        of_all = [integer, ctypes.c_int64, pointer]  # whether bf16, elements, progress counter

        def bound(name: str, *arguments: Any) -> Any:
            function = getattr(functions, f"superoffload_{name}")
            function.argtypes, function.restype = [*arguments, *of_all], ctypes.c_double
            return function

        self._initialize = bound("initialize", *[pointer] * 5)
        self._accumulate = bound("accumulate", pointer, pointer, integer)
        self._step = bound("step", *[pointer] * 4, integer)
        self._speculate = bound("speculate", *[pointer] * 6, integer)
        self._restore = bound("restore", pointer, pointer)

    def run(self, command: Command) -> float:
        """Execute a command and return the gradient's sum of squares; 0 if it has none."""
        index, offsets = command.sub_group, self._layout
        of_all = int(self._size.weight_bytes == 2), self._size.numels[index], self._base
        current, other = self._states(command.states, index), self._states(1 - command.states, index)
        staging, new_weights = self._base + offsets.staging[index], self._base + offsets.new_weights[index]
        accumulated = self._base + offsets.accumulated[index] if offsets.accumulated else None
        summed = None if command.gradient == GradientSource.STAGING else accumulated
        add_staging = int(command.gradient != GradientSource.ACCUMULATED)
        match command.operation:
            case Operation.STEP:
                squares = self._step(ctypes.byref(adamw_scalars(command)), current, summed, staging, add_staging, *of_all)
            case Operation.SPECULATE:
                squares = self._speculate(
                    ctypes.byref(adamw_scalars(command)), current, other, summed, staging, new_weights, add_staging, *of_all
                )
            case Operation.ACCUMULATE:
                squares = self._accumulate(accumulated, staging, command.first_micro_batch, *of_all)
            case Operation.RESTORE:
                squares = self._restore(current, staging, *of_all)
            case _:
                second = new_weights if index in self._size.speculating else None
                squares = self._initialize(current, other, accumulated, staging, second, *of_all)
        return float(squares)

    def _states(self, which: int, index: int) -> Any:
        if which == 1 and index not in self._size.speculating:
            return ctypes.byref(States())
        return ctypes.byref(States(*(self._base + region[index] for region in self._layout.states[which])))


def serve(channel: socket.socket, kernel: Kernel) -> None:
    """Execute commands in order until the other side closes the socket, which it may do at any time."""
    with suppress(ConnectionError):
        while packet := channel.recv(COMMAND.size):
            command = Command(*COMMAND.unpack(packet))
            begin = time.monotonic()
            squares = kernel.run(command)
            result = Result(command.operation, command.sub_group, command.step, squares, time.monotonic() - begin)
            channel.send(RESULT.pack(*result))


def bytes_moved(command: Command, numel: int, weight_bytes: int) -> int:
    """Return the host memory traffic of a command: what it must read and write of a sub-group of ``numel`` parameters."""
    if command.operation == Operation.ACCUMULATE:
        return numel * ((4 if command.first_micro_batch else 8) + weight_bytes)
    if command.operation not in (Operation.STEP, Operation.SPECULATE):
        return 0
    gradient = {GradientSource.STAGING: weight_bytes, GradientSource.ACCUMULATED: 4}.get(GradientSource(command.gradient), 4 + weight_bytes)
    return numel * (24 + gradient + weight_bytes)


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
    numels, weight_bytes, accumulate, speculating = settings["size"]
    size = MemorySize(tuple(numels), weight_bytes, accumulate, tuple(speculating))
    with mmap.mmap(settings["memory"], 0) as memory, socket.socket(fileno=settings["channel"]) as channel:
        serve(channel, Kernel(settings["library"], memory, size))
        os._exit(0)  # the kernel still points into the memory, so leaving the block, which closes it, would fail


if __name__ == "__main__":
    main(sys.argv[1:])
