"""Commands for the Adam worker and its results: fixed-size packets on a socket. Tensors never move.

The worker process imports this, ``memory_layout`` and ``adam``, which therefore use the standard
library only.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from superoffload.memory_layout import Moments


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
    """Of a sub-group that speculates."""
    COPY = 2
    """Of a sub-group with room for a copy of its states; never current."""


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
    """Position among the sub-groups of this worker."""
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


class Result(NamedTuple):
    operation: int
    sub_group: int
    step: int
    sum_of_squares: float
    """Of the gradient before scaling; not finite if the gradient is not."""
    seconds: float


_COMMAND = struct.Struct("<iiqiiii6d")
_RESULT = struct.Struct("<iiqdd")


def send(channel: socket.socket, command: Command) -> None:
    """Send a command to the worker. Raises OSError if it has ended."""
    channel.send(_COMMAND.pack(*command))


def receive(channel: socket.socket) -> Result | None:
    """Return the worker's next result; None if it has closed its end."""
    try:
        packet = channel.recv(_RESULT.size)
    except ConnectionError:
        return None
    return Result(*_RESULT.unpack(packet)) if packet else None


def serve(channel: socket.socket, run: Callable[[Command], float]) -> None:
    """Execute commands in order until the other side closes the socket, which it may do at any
    time.

    Args:
        channel: The worker's end.
        run: Executes a command and returns the sum of squares of its gradient.
    """
    with suppress(ConnectionError):
        while packet := channel.recv(_COMMAND.size):
            command = Command(*_COMMAND.unpack(packet))
            begin = time.monotonic()
            squares = run(command)
            result = Result(
                command.operation,
                command.sub_group,
                command.step,
                squares,
                time.monotonic() - begin,
            )
            channel.send(_RESULT.pack(*result))


def bytes_moved(
    command: Command, numel: int, weight_bytes: int, moments: Moments = Moments.FP32
) -> int:
    """Return the host memory traffic of a command: what it must read and write of a sub-group of
    ``numel`` parameters.
    """
    if command.operation == Operation.ACCUMULATE:
        return numel * ((4 if command.first_micro_batch else 8) + weight_bytes)
    if command.operation not in (Operation.STEP, Operation.SPECULATE):
        return 0
    gradient = {GradientSource.STAGING: weight_bytes, GradientSource.ACCUMULATED: 4}.get(
        GradientSource(command.gradient), 4 + weight_bytes
    )
    return numel * (8 + 4 * moments.element_bytes + gradient + weight_bytes)
