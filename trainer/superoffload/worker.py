"""The Adam worker: a process that runs AdamW on one rank's CPU sub-groups, in memory that it shares
with the training process. Commands and results are fixed-size packets on a socket, which the
functions of ``adam.cpp`` execute; tensors never move.

The training process starts this file as an isolated script (``python -I -S worker.py PARENT``) and
writes the settings to its stdin, as a line of JSON. It uses the standard library only: without
torch it needs no CUDA context and no second OpenMP runtime, and it starts within milliseconds. The
training process imports it too.
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
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

# The memory: which arrays each sub-group has, and where.


REGION_ALIGNMENT = 65536
"""Bytes. The largest page size in use (aarch64), so that a region can be pinned without its
neighbours.
"""
SUB_GROUP_ALIGNMENT = 64
"""Bytes. A cache line, so that threads working on adjacent sub-groups share none."""
BLOCK = 128
"""Elements of 8-bit moments that have one exponent, counted from the start of the whole parameter
(``so_tui.model.sharding.MOMENT_BLOCK``, which the worker process cannot import).
"""


class Moments(IntEnum):
    """Format of Adam's moments (``moments.h``)."""

    FP32 = 0
    BF16 = 1
    INT8 = 2

    @property
    def element_bytes(self) -> int:
        """Bytes of one moment; 8-bit moments have an exponent for each block besides."""
        return (4, 2, 1)[self]


class Segment(NamedTuple):
    """This rank's shard of one parameter, in a sub-group."""

    numel: int
    place: int = 0
    """Its first element, in the whole parameter."""
    random: int = 0
    """32 bits that select the random bits by which compact moments are rounded."""

    @property
    def blocks(self) -> int:
        """Blocks of 8-bit moments that it has a part of."""
        return (self.place + self.numel - 1) // BLOCK - self.place // BLOCK + 1 if self.numel else 0


class MemorySize(NamedTuple):
    """What decides the layout of the shared memory."""

    sub_groups: tuple[tuple[Segment, ...], ...]
    """All sub-groups of the rank; those whose states are on the GPU without segments."""
    weight_bytes: int
    """Size of one weight: 2 for bf16, 4 for fp32."""
    accumulate: bool
    """Whether there is room for accumulated gradients."""
    speculating: tuple[int, ...] = ()
    """The sub-groups that have a second set of states."""
    moments: Moments = Moments.FP32
    copied: tuple[int, ...] = ()
    """The sub-groups that have room for a copy of their states."""
    host_weights: bool = False
    """Whether the weights are in host memory, in a second shared memory (``region_layout``)."""

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each sub-group."""
        return tuple(sum(segment.numel for segment in segments) for segments in self.sub_groups)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Exponents of each sub-group's first or second moments."""
        if self.moments is not Moments.INT8:
            return (0,) * len(self.sub_groups)
        return tuple(sum(segment.blocks for segment in segments) for segments in self.sub_groups)


class _StateOffsets(NamedTuple):
    """Byte offsets of one set of states."""

    master_weights: tuple[int, ...]
    first_moment: tuple[int, ...]
    second_moment: tuple[int, ...]
    first_exponents: tuple[int, ...]
    """One byte for each block of 8-bit moments; of no size in other formats."""
    second_exponents: tuple[int, ...]


class _MemoryLayout(NamedTuple):
    """Byte offsets of each sub-group's arrays in the shared memory, whose first 8 bytes hold the
    progress counter.
    """

    staging: tuple[int, ...]
    new_weights: tuple[int, ...]
    """Where SPECULATE leaves the weights. Of no size for a sub-group that does not speculate, as
    the second set of states, and where the weights are in host memory.
    """
    states: tuple[_StateOffsets, ...]
    """By ``StatesSet``; of no size where a sub-group lacks the set."""
    accumulated: tuple[int, ...]
    """Empty without gradient accumulation."""
    staging_bytes: int
    bytes: int
    """Size of the whole memory."""


def _memory_size(values: Sequence[Any]) -> MemorySize:
    """Return a size of which only plain lists are left, as after JSON."""
    size = MemorySize(*values)
    segments = tuple(tuple(Segment(*segment) for segment in group) for group in size.sub_groups)
    return size._replace(sub_groups=segments, moments=Moments(size.moments))


def layout(size: MemorySize) -> _MemoryLayout:
    """Lay out the shared memory.

    With bf16 weights it has 14 bytes per parameter, 10 with bf16 moments and 8 with 8-bit moments
    (and 2 for every block). A parameter that speculates takes as many again, gradient accumulation
    4 more, and a copy the size of the states.
    """
    end = REGION_ALIGNMENT
    numels, blocks, moment_bytes = size.numels, size.blocks, size.moments.element_bytes
    all_of_them = range(len(numels))

    def region(
        element_bytes: int, sizes: Sequence[int], having: Sequence[int] = all_of_them
    ) -> tuple[int, ...]:
        nonlocal end
        kept = [each if index in having else 0 for index, each in enumerate(sizes)]
        offsets, end = region_layout(kept, element_bytes, end)
        return offsets

    staging = region(size.weight_bytes, numels)
    new_weights = region(size.weight_bytes, numels, () if size.host_weights else size.speculating)
    staging_bytes = end - REGION_ALIGNMENT
    states = tuple(
        _StateOffsets(
            region(4, numels, having),
            region(moment_bytes, numels, having),
            region(moment_bytes, numels, having),
            region(1, blocks, having),
            region(1, blocks, having),
        )
        for having in (all_of_them, size.speculating, size.copied)
    )
    accumulated = region(4, numels) if size.accumulate else ()
    return _MemoryLayout(staging, new_weights, states, accumulated, staging_bytes, end)


def region_layout(
    numels: Sequence[int], element_bytes: int, start: int = 0
) -> tuple[tuple[int, ...], int]:
    """Return the byte offset of each sub-group's elements in a region, and the region's end. The
    memory of the weights is one region.
    """
    offsets, end = [], start
    for numel in numels:
        offsets.append(end)
        end += -(-numel * element_bytes // SUB_GROUP_ALIGNMENT) * SUB_GROUP_ALIGNMENT
    return tuple(offsets), -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT


# Commands and results.


class Operation(IntEnum):
    INITIALIZE = 0
    """Copy the weights, in the staging buffer or in host memory, to the fp32 master weights, and
    zero the moments.
    """
    ACCUMULATE = 1
    """Add the gradient in the staging buffer to the accumulated gradient."""
    STEP = 2
    """Run AdamW in place and leave the new weights in the staging buffer, or in host memory where
    the weights are.
    """
    SPECULATE = 3
    """Run AdamW from the current set of states into the other one, and leave the new weights in the
    second buffer, or as STEP does.
    """
    RESTORE = 4
    """Leave the weights of the current set of states where STEP does."""
    COPY = 5
    """Copy the current set of states into another one, from which a checkpoint is written."""


class StatesSet(IntEnum):
    """The sets of states that a sub-group may have. The first two take turns in being current."""

    FIRST = 0
    SECOND = 1
    """The other set of a sub-group that speculates."""
    COPY = 2
    """The copy of a sub-group's states, where there is room for one; never current."""


class GradientSource(IntEnum):
    """Where STEP finds the gradient."""

    STAGING = 0
    """In the staging buffer: there is only one micro-batch."""
    ACCUMULATED = 1
    """In the accumulated gradient, which includes every micro-batch."""
    ACCUMULATED_AND_STAGING = 2
    """The accumulated gradient of all earlier micro-batches, plus the last micro-batch's in the
    staging buffer.
    """


class Command(NamedTuple):
    operation: int
    sub_group: int
    step: int = 0
    first_micro_batch: int = 0
    """ACCUMULATE: overwrite the accumulated gradient instead of adding to it."""
    gradient: int = GradientSource.STAGING
    """STEP, SPECULATE: a ``GradientSource``."""
    states: int = 0
    """STEP, SPECULATE, RESTORE, COPY: which set of states is current."""
    into: int = 0
    """COPY: the set that is overwritten."""
    scale: float = 1.0
    """STEP, SPECULATE: factor of the gradient, from clipping."""
    learning_rate: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    weight_decay: float = 0.0

    def bytes_moved(self, numel: int, weight_bytes: int, moments: Moments = Moments.FP32) -> int:
        """Return the host memory traffic: what must be read and written of a sub-group of ``numel``
        parameters.
        """
        if self.operation == Operation.ACCUMULATE:
            return numel * ((4 if self.first_micro_batch else 8) + weight_bytes)
        if self.operation not in (Operation.STEP, Operation.SPECULATE):
            return 0
        gradient = (weight_bytes, 4, 4 + weight_bytes)[self.gradient]
        return numel * (8 + 4 * moments.element_bytes + gradient + weight_bytes)


class Result(NamedTuple):
    """What a command came to. Results come in the order of the commands."""

    sum_of_squares: float
    """Sum over the gradient before scaling; not finite if the gradient is not."""
    seconds: float


COMMAND_PACKET = struct.Struct("<iiqiiii6d")
RESULT_PACKET = struct.Struct("<dd")


class _AdamWScalars(ctypes.Structure):
    """The scalars of one AdamW step, as in ``moments.h``: computed in double precision, as torch
    does, and rounded once.
    """

    _fields_ = [
        *(
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
        ),
        ("random", ctypes.c_uint32),
    ]


def _adamw_scalars(command: Command) -> _AdamWScalars:
    """Return the scalars for a STEP or SPECULATE command."""
    return _AdamWScalars(
        command.scale,
        1 - command.learning_rate * command.weight_decay,
        command.beta1,
        1 - command.beta1,
        command.beta2,
        1 - command.beta2,
        command.learning_rate / (1 - command.beta1**command.step),
        math.sqrt(1 - command.beta2**command.step),
        command.epsilon,
        command.step * 0x9E3779B1 & 0xFFFFFFFF,  # odd, so that no two of 2**32 steps have the same
    )


class _States(ctypes.Structure):
    """One set of a sub-group's arrays, as in ``adam.cpp``; all null for a set that does not
    exist.
    """

    _fields_ = [(name, ctypes.c_void_p) for name in _StateOffsets._fields]


class _SegmentFields(ctypes.Structure):
    """A ``Segment``, as in ``adam.cpp``."""

    _fields_ = [(name, ctypes.c_int64) for name in Segment._fields]


class _SubGroupFields(ctypes.Structure):
    """A sub-group, as in ``adam.cpp``."""

    _fields_ = [
        ("segments", ctypes.POINTER(_SegmentFields)),
        ("segment_count", ctypes.c_int64),
        ("has_bf16_weights", ctypes.c_int32),
        ("format", ctypes.c_int32),
    ]


def _fields_of(segments: tuple[Segment, ...], size: MemorySize) -> _SubGroupFields:
    array = (_SegmentFields * len(segments))(*(_SegmentFields(*segment) for segment in segments))
    return _SubGroupFields(array, len(segments), size.weight_bytes == 2, size.moments)


_ARGUMENTS = {
    Operation.INITIALIZE: ("current", "other", "accumulated", "weights", "second buffer"),
    Operation.ACCUMULATE: ("accumulated", "staging", "overwrite"),
    Operation.STEP: ("scalars", "current", "summed", "staging", "weights", "add staging"),
    Operation.SPECULATE: (
        "scalars",
        "current",
        "other",
        "summed",
        "staging",
        "new weights",
        "add staging",
    ),
    Operation.RESTORE: ("current", "weights"),
    Operation.COPY: ("current", "into"),
}
"""What the functions of ``adam.cpp`` take, one for each operation: addresses, and two flags. The
sub-group and the address of the progress counter follow.
"""
_FLAGS = ("overwrite", "add staging")


class Kernel:
    """The compiled functions, bound to one shared memory, and to that of the weights where they are
    in host memory.

    Without the latter it can do no more than ``decode`` and ``encode`` them.
    """

    def __init__(
        self, library: str, memory: mmap.mmap, size: MemorySize, weights: mmap.mmap | None = None
    ) -> None:
        self._size = size
        self._layout = layout(size)
        self._memory = ctypes.c_char.from_buffer(memory)  # which keeps it mapped
        self._base = ctypes.addressof(self._memory)
        self._weights = None if weights is None else ctypes.c_char.from_buffer(weights)
        self._weights_offsets, _ = region_layout(size.numels, size.weight_bytes)
        self._sub_groups = [_fields_of(segments, size) for segments in size.sub_groups]
        functions = ctypes.CDLL(library)
        self._functions: dict[int, Any] = {}
        for operation, names in _ARGUMENTS.items():
            function = getattr(functions, f"superoffload_{operation.name.lower()}")
            kinds = [ctypes.c_int if name in _FLAGS else ctypes.c_void_p for name in names]
            function.argtypes = [*kinds, ctypes.c_void_p, ctypes.c_void_p]
            function.restype = ctypes.c_double
            self._functions[operation] = function
        self._decode, self._encode = functions.superoffload_decode, functions.superoffload_encode
        for function in (self._decode, self._encode):
            function.argtypes, function.restype = [ctypes.c_void_p] * 4, None

    def run(self, command: Command) -> float:
        """Execute a command and return the gradient's sum of squares; 0 if it has none."""
        operation, index, offsets = Operation(command.operation), command.sub_group, self._layout
        staging = self._base + offsets.staging[index]
        new_weights = self._base + offsets.new_weights[index]
        accumulated = self._base + offsets.accumulated[index] if offsets.accumulated else None
        second_buffer = new_weights if index in self._size.speculating else None
        weights = staging
        if self._weights is not None:
            second_buffer = staging
            weights = ctypes.addressof(self._weights) + self._weights_offsets[index]
            new_weights = weights
        updates = operation in (Operation.STEP, Operation.SPECULATE)
        arguments = {
            "scalars": ctypes.byref(_adamw_scalars(command)) if updates else None,
            "current": self._states(command.states, index),
            "other": self._states(1 - command.states, index),
            "into": self._states(command.into, index),
            "staging": staging,
            "weights": weights,
            "new weights": new_weights,
            "second buffer": second_buffer,
            "accumulated": accumulated,
            "summed": None if command.gradient == GradientSource.STAGING else accumulated,
            "add staging": int(command.gradient != GradientSource.ACCUMULATED),
            "overwrite": command.first_micro_batch,
        }
        taken = (arguments[name] for name in _ARGUMENTS[operation])
        group = ctypes.byref(self._sub_groups[index])
        return float(self._functions[operation](*taken, group, self._base))

    def decode(self, index: int, states: int, first: int, second: int) -> None:
        """Write the moments of one set of states to two fp32 arrays at these addresses."""
        self._decode(
            self._states(states, index), first, second, ctypes.byref(self._sub_groups[index])
        )

    def encode(self, index: int, states: int, first: int, second: int) -> None:
        """Set the moments of one set of states, rounded to nearest. Those that ``decode`` returned
        are set without rounding.
        """
        self._encode(
            self._states(states, index), first, second, ctypes.byref(self._sub_groups[index])
        )

    def _states(self, which: int, index: int) -> Any:
        having = {StatesSet.SECOND: self._size.speculating, StatesSet.COPY: self._size.copied}
        if index not in having.get(StatesSet(which), (index,)):
            return ctypes.byref(_States())
        regions = self._layout.states[which]
        existing = regions if self._size.moments is Moments.INT8 else regions[:3]
        return ctypes.byref(_States(*(self._base + region[index] for region in existing)))


# The process.


def _main() -> None:
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
    # Not to the end: a process that was forked meanwhile may have the pipe open.
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        sys.exit("The training process is gone.")
    settings = json.loads(line)
    # Before OpenMP is loaded, which creates its threads accordingly.
    os.sched_setaffinity(0, settings["cpus"])
    size = _memory_size(settings["size"])
    weights = mmap.mmap(settings["weights"], 0) if size.host_weights else None
    with (
        mmap.mmap(settings["memory"], 0) as memory,
        socket.socket(fileno=settings["channel"]) as channel,
    ):
        kernel = Kernel(settings["library"], memory, size, weights)
        # Until the other side closes the socket, which it may do at any time.
        with suppress(ConnectionError):
            while packet := channel.recv(COMMAND_PACKET.size):
                begin = time.monotonic()
                squares = kernel.run(Command(*COMMAND_PACKET.unpack(packet)))
                channel.send(RESULT_PACKET.pack(*Result(squares, time.monotonic() - begin)))
        # the kernel still points into the memory, so leaving the block, which closes it, would fail
        os._exit(0)


if __name__ == "__main__":
    _main()
