"""The Adam worker: a process of its own that steps the CPU sub-groups of one rank, in memory it shares with the training process.

It is started as a script, isolated (``python -I -S worker.py``), and knows the standard library only: no torch, so no CUDA context, no
second OpenMP runtime, and it runs within milliseconds. Commands and results are fixed-size packets on a socket; tensors never move.

The training process imports this module too, for the packets and the layout of the shared memory.
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

ALIGNMENT = 65536
"""Of each region in the shared memory: the largest page size in use (aarch64)."""
LINE = 64
"""Of each sub-group in its region."""


class Operation(IntEnum):
    BEGIN = 0
    """Masters from the weights in the exchange, moments zero."""
    ACCUMULATE = 1
    """Add the gradient in the exchange to the accumulated one."""
    STEP = 2
    """AdamW; leaves the new weights in the exchange."""


class Command(NamedTuple):
    operation: int
    sub_group: int
    step: int = 0
    first: int = 0
    """ACCUMULATE: begin a new sum."""
    take_exchange: int = 1
    """STEP: the exchange holds a gradient."""
    take_accumulated: int = 0
    """STEP: the accumulated gradient counts."""
    scale: float = 1.0
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
    """Of the gradient, before scaling; not finite when the gradient is not."""
    seconds: float


COMMAND = struct.Struct("<iiqiii4x6d")
RESULT = struct.Struct("<iiqdd")


class Layout(NamedTuple):
    """Offsets, in bytes, of each sub-group's arrays in the shared memory. The first bytes hold the progress counter."""

    exchange: tuple[int, ...]
    master: tuple[int, ...]
    first_moment: tuple[int, ...]
    second_moment: tuple[int, ...]
    accumulated: tuple[int, ...]
    """Empty when gradients are not accumulated."""
    exchange_start: int
    exchange_bytes: int
    bytes: int


def layout(numels: tuple[int, ...], exchange_size: int, accumulate: bool) -> Layout:
    """Where everything lies. ``exchange_size``: bytes of one element of the weights. 14 bytes a parameter in bf16, 18 with accumulation."""
    end = ALIGNMENT
    regions = []
    for size in (exchange_size, 4, 4, 4) + ((4,) if accumulate else ()):
        offsets = []
        for numel in numels:
            offsets.append(end)
            end += -(-numel * size // LINE) * LINE
        end = -(-end // ALIGNMENT) * ALIGNMENT
        regions.append(tuple(offsets))
    exchange, master, first, second, *rest = regions
    exchange_end = master[0] if master else end
    return Layout(exchange, master, first, second, rest[0] if rest else (), ALIGNMENT, exchange_end - ALIGNMENT, end)


class Constants(ctypes.Structure):
    """As in ``adam.cpp``. Worked out in double precision, as torch does, and rounded once."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "scale",
            "keep",
            "beta1",
            "one_minus_beta1",
            "beta2",
            "one_minus_beta2",
            "step_size",
            "root_correction",
            "epsilon",
        )
    ]


def constants(command: Command) -> Constants:
    return Constants(
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

    def __init__(self, library: str, memory: mmap.mmap, numels: tuple[int, ...], exchange_size: int, accumulate: bool) -> None:
        self._numels = numels
        self._places = layout(numels, exchange_size, accumulate)
        self._is_bf16 = int(exchange_size == 2)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        functions = ctypes.CDLL(library)
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._begin, self._accumulate, self._step = functions.so_tui_begin, functions.so_tui_accumulate, functions.so_tui_step
        self._begin.argtypes = [pointer] * 5 + [integer, long, pointer]
        self._accumulate.argtypes = [pointer, pointer, integer, integer, long, pointer]
        self._step.argtypes = [pointer] * 6 + [integer, integer, long, pointer]
        for function in (self._begin, self._accumulate, self._step):
            function.restype = ctypes.c_double

    def run(self, command: Command) -> float:
        """Does what the command says; returns the gradient's sum of squares."""
        index = command.sub_group
        places, numel, progress = self._places, self._numels[index], self._base
        exchange, master, first, second = (
            self._base + region[index] for region in (places.exchange, places.master, places.first_moment, places.second_moment)
        )
        accumulated = self._base + places.accumulated[index] if places.accumulated else None
        if command.operation == Operation.STEP:
            source = accumulated if command.take_accumulated else None
            constant = ctypes.byref(constants(command))
            return float(
                self._step(constant, master, first, second, source, exchange, self._is_bf16, command.take_exchange, numel, progress)
            )
        if command.operation == Operation.ACCUMULATE:
            return float(self._accumulate(accumulated, exchange, self._is_bf16, command.first, numel, progress))
        return float(self._begin(master, first, second, accumulated, exchange, self._is_bf16, numel, progress))


def serve(channel: socket.socket, kernel: Kernel) -> None:
    """Runs commands in order until the other side closes, which it may do in the middle of them."""
    with suppress(ConnectionError):
        while packet := channel.recv(COMMAND.size):
            command = Command(*COMMAND.unpack(packet))
            begun = time.monotonic()
            squares = kernel.run(command)
            result = Result(command.operation, command.sub_group, command.step, squares, time.monotonic() - begun)
            channel.send(RESULT.pack(*result))


def _die_with(parent: int) -> None:
    """Have the kernel end this process when the training process ends, however it ends."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("The training process is gone.")


def main(arguments: list[str]) -> None:
    settings = json.loads(arguments[0])
    _die_with(settings["parent"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole group: the training process decides, and this one ends with it
    os.sched_setaffinity(0, settings["cpus"])  # before OpenMP is loaded: it makes its team from this
    numels = tuple(settings["numels"])
    with mmap.mmap(settings["memory"], 0) as memory, socket.socket(fileno=settings["channel"]) as channel:
        serve(channel, Kernel(settings["library"], memory, numels, settings["exchange_size"], settings["accumulate"]))
        os._exit(0)  # the kernel still points into the memory, which therefore cannot be closed first


if __name__ == "__main__":
    main(sys.argv[1:])
