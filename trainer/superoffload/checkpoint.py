"""Optimizer states on disk: every rank writes one file of its own, without copies in between.

``rank_00000.states`` holds, sub-group after sub-group, the fp32 master weights, the first and the second moments, as raw little-endian
floats; ``rank_00000.json`` says what they belong to and is written last, so a state without it is incomplete. The bf16 weights are not
saved: they are a cast of the masters, and are made from them on loading.

What is read is in ``resharding``.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from superoffload.deepspeed_adapter.engine import SubGroupState
from superoffload.errors import OffloadError

SCHEMA = 2
_SAMPLE_BYTES = 64 << 10
_SAMPLE_DISTANCE_BYTES = 64 << 20
"""A thousandth is read again to prove a file readable: what was torn, never reached the disk or belongs to another file shows, and the
proof of hundreds of GB takes seconds. A single bit that flipped elsewhere does not show."""


class SubGroupRecord(msgspec.Struct, frozen=True):
    numel: int
    """Of one rank's shares, padding included."""
    device: str
    step: int
    moments: bool
    names: tuple[str, ...]
    numels: tuple[int, ...]
    """Of the whole parameters, all ranks together."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's state file belongs to."""

    schema: int = SCHEMA
    deepspeed: str
    mode: str
    engine: str
    ratio: float
    rank: int
    ranks: int
    byteorder: str = sys.byteorder
    samples: int = 0
    """CRC-32 of the sampled bytes."""
    sub_groups: tuple[SubGroupRecord, ...]

    @property
    def bytes(self) -> int:
        return sum(length for _, length in _extents(self.sub_groups))


def records(states: Iterable[SubGroupState], parameters: Iterable[Sequence[tuple[str, int]]]) -> tuple[SubGroupRecord, ...]:
    """The manifest's view of the sub-groups; ``parameters``: name and elements (of all ranks) of each one in them."""
    return tuple(
        SubGroupRecord(
            state.master.numel(),
            state.device,
            state.step,
            state.exp_avg is not None,
            tuple(name for name, _ in members),
            tuple(numel for _, numel in members),
        )
        for state, members in zip(states, parameters, strict=True)
    )


def write(folder: Path, manifest: Manifest, states: Iterable[SubGroupState]) -> int:
    """Writes this rank's state, synced to disk; returns its bytes. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    data_path, manifest_path = _paths(folder, manifest.rank)
    manifest_path.unlink(missing_ok=True)
    samples = 0
    with data_path.open("wb", buffering=0) as file:
        for tensor in chain.from_iterable(map(tensors_of, states)):
            view = _bytes_of(tensor.detach().cpu().contiguous())
            for start, length in _sampled(len(view)):
                samples = zlib.crc32(view[start : start + length], samples)
            _write_all(file.fileno(), view)
        os.fsync(file.fileno())
        # Out of the page cache: whoever proves the file readable asks the disk, and the host's memory belongs to training.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    partial = manifest_path.with_suffix(".json.partial")
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, samples=samples))))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(manifest_path)
    return manifest.bytes


def verify(folder: Path) -> None:
    """Opens every rank's file again. Raises OffloadError, with what is wrong, when a file is missing, torn or holds something else."""
    for manifest in manifests(folder):
        samples = 0
        with open_states(folder, manifest) as file:
            for begin, size in _extents(manifest.sub_groups):
                for start, length in _sampled(size):
                    samples = zlib.crc32(os.pread(file.fileno(), length, begin + start), samples)
        if samples != manifest.samples:
            raise OffloadError(f"{file.name} does not hold what was written (its checksum is another).")


def manifests(folder: Path) -> tuple[Manifest, ...]:
    """Of all ranks that saved, in their order. Raises OffloadError when they are not complete or cannot be read."""
    found: list[Manifest] = []
    while not found or len(found) < found[0].ranks:
        _, path = _paths(folder, len(found))
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Manifest))
        except FileNotFoundError:
            raise OffloadError(f"{folder} holds no complete optimizer state of rank {len(found)}: {path.name} is missing.") from None
        except (OSError, msgspec.DecodeError) as error:
            raise OffloadError(f"{path} cannot be read: {error}") from error
    return tuple(found)


def _extents(sub_groups: Sequence[SubGroupRecord]) -> Iterator[tuple[int, int]]:
    """First byte and length of every tensor in a rank's file."""
    begin = 0
    for group in sub_groups:
        for _ in range(3 if group.moments else 1):
            yield begin, 4 * group.numel
            begin += 4 * group.numel


def _sampled(size: int) -> Iterator[tuple[int, int]]:
    """First byte and length of the stretches of a tensor of ``size`` bytes that are summed up: at regular distances, and the end."""
    for start in (*range(0, size, _SAMPLE_DISTANCE_BYTES), max(0, size - _SAMPLE_BYTES)):
        yield start, min(_SAMPLE_BYTES, size - start)


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank_{rank:05d}.states", folder / f"rank_{rank:05d}.json"


def open_states(folder: Path, manifest: Manifest) -> BinaryIO:
    """The rank's file, for reading. Raises OffloadError when it is not there or not of its size."""
    path, _ = _paths(folder, manifest.rank)
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise OffloadError(f"{path} cannot be read: {error.strerror}.") from error
    if (size := os.fstat(file.fileno()).st_size) != manifest.bytes:
        file.close()
        raise OffloadError(f"{path} has {size} bytes where its manifest says {manifest.bytes}: it is torn.")
    return file


def tensors_of(state: SubGroupState) -> Iterator[torch.Tensor]:
    """Master, first and second moment, in the order of the file; the master alone where the moments are out of reach."""
    yield state.master
    if state.exp_avg is not None and state.exp_avg_sq is not None:
        yield state.exp_avg
        yield state.exp_avg_sq


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def read_into(file: BinaryIO, begin: int, target: torch.Tensor) -> None:
    """Fills a contiguous CPU tensor from byte ``begin`` on. Raises OffloadError when the file ends before."""
    view = _bytes_of(target)
    while view:
        got = os.preadv(file.fileno(), [view], begin)
        if got == 0:
            raise OffloadError(f"{file.name} ended early: it is torn.")
        view, begin = view[got:], begin + got
