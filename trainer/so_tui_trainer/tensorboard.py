"""Write TensorBoard's event files without TensorBoard: length-prefixed, checksummed protocol buffers.

Event {1: wall time, 2: step, 3: file version, 5: summary, 7: session log}, Summary {1: Value {1: tag, 2: float}}, SessionLog {1: status}.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_CASTAGNOLI = 0x82F63B78
_SESSION_START = b"\x08\x01"


class EventFile:
    """One file of scalars; a later attempt adds another file to the folder. Every method raises OSError if the disk is full."""

    def __init__(self, folder: Path, *, purge_after: int | None = None) -> None:
        """Create a file.

        Args:
            folder: Where to create it.
            purge_after: The step that a resumed run continues from; TensorBoard then ignores later steps in earlier files.
        """
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1_000_000_000:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(time.time(), 0, _bytes(3, b"brain.Event:2"))
        if purge_after is not None:
            self._write(time.time(), purge_after + 1, _bytes(7, _SESSION_START))

    def scalars(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Write the values of a step.

        Args:
            values: Values by tag.
            step: The step.
            when: Unix time in seconds.
        """
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in values.items()
        )
        self._write(when, step, _bytes(5, summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, when: float, step: int, content: bytes) -> None:
        event = (
            b"\x09" + struct.pack("<d", when) + (b"\x10" + _varint(step) if step else b"") + content
        )
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_checksum(length) + event + _masked_checksum(event))


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of ``data``."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked_checksum(data: bytes) -> bytes:
    """Return the checksum rotated and shifted, so that checksums of data that contain checksums stay meaningful."""
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_CASTAGNOLI if value & 1 else 0)
    return value


_TABLE = tuple(map(_table_entry, range(256)))
