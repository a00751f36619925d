"""Optimizer states on disk. Every rank writes one file of its own, directly from the states or from
copies of them.

``rank_00000.states`` holds the fp32 master weights and the first and second moments of one
sub-group after another, as raw little-endian floats. ``rank_00000.json`` describes them and is
written last, so a state without it is incomplete. The bf16 weights are not saved: loading casts
them from the master weights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from so_tui.model.sharding import MOMENT_BLOCK, partition_numel
from superoffload.errors import OffloadError, StateMismatchError
from superoffload.gpu_states import Copies, SubGroupState

# A large file that reaches the disk while it is written, a piece at a time, and leaves no pages
# behind.
#
# Linux lets a tenth of the host's memory fill with data that is still to be written. Whoever then
# writes a line to the same disk, such as a rank that records its step, waits behind tens of GB,
# and memory that training needs has to be freed first. So each piece is sent to the disk at once,
# and the next but one is written when it is there: never more than two are on their way.


PIECE_BYTES = 32 << 20
"""Large enough for a disk's full rate: it has two of them to work on."""
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range(2)."""
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)


class _PacedFile:
    """A new file, written by one thread at a time, at any offsets.

    Args:
        path: Where it is; it is emptied if it exists.
        piece_bytes: Bytes that are sent to the disk at a time.

    Raises:
        OSError: By all methods, if the disk does not take it.
    """

    def __init__(self, path: Path, piece_bytes: int = PIECE_BYTES) -> None:
        self._file = path.open("wb", buffering=0)
        self._piece_bytes = piece_bytes
        self._on_their_way: deque[tuple[int, int]] = deque()
        """Offset and length of the pieces that were sent to the disk and may not be there yet."""

    def write(self, content: memoryview, offset: int) -> None:
        """Write bytes at an offset. Waits for the disk, but for the last two pieces."""
        while content:
            length = os.pwrite(self._file.fileno(), content[: self._piece_bytes], offset)
            self._send_to_disk(offset, length)
            content, offset = content[length:], offset + length

    def finish(self) -> None:
        """Wait until all is on the disk, drop the file's pages from memory, and close it."""
        os.fsync(self._file.fileno())
        self._drop_pages(0, 0)  # so that what is read back is what the disk has
        self.close()

    def close(self) -> None:
        """Close the file, whatever is in it. Safe to call twice."""
        self._file.close()

    def _send_to_disk(self, offset: int, length: int) -> None:
        if not self._sync(offset, length, _WRITE):
            os.fdatasync(self._file.fileno())
            self._drop_pages(0, 0)
            return
        self._on_their_way.append((offset, length))
        while len(self._on_their_way) > 2:
            piece = self._on_their_way.popleft()
            self._sync(*piece, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            self._drop_pages(*piece)

    def _drop_pages(self, offset: int, length: int) -> None:
        """Drop a piece from memory, once it is on the disk; with a length of 0, up to the end."""
        os.posix_fadvise(self._file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)

    def _sync(self, offset: int, length: int, flags: int) -> bool:
        """Call sync_file_range(2), which Python does not have; return whether this file system can
        do it.
        """
        if _sync_file_range(self._file.fileno(), offset, length, flags) == 0:
            return True
        if (code := ctypes.get_errno()) in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code), str(self._file.name))


_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_sync_file_range.restype = ctypes.c_int


SCHEMA = 2
_LARGEST_MANIFEST_BYTES = 64 << 20
_Count = Annotated[int, msgspec.Meta(ge=0)]
_SAMPLE_BYTES = 64 << 10
_SAMPLE_DISTANCE_BYTES = 64 << 20
"""``verify_state`` reads a thousandth of a file only, so checking hundreds of GB takes seconds. It
detects a file that was cut short, never reached the disk or holds something else, but not a
single flipped bit outside the samples.
"""


class SubGroupRecord(msgspec.Struct, frozen=True):
    """One sub-group in a manifest."""

    numel: _Count
    """Elements of this rank's shards, padding included."""
    device: str
    step: Annotated[_Count, msgspec.Meta(le=2**31)]
    moments: bool
    """Whether the moments were saved."""
    names: tuple[str, ...]
    numels: tuple[_Count, ...]
    """Elements of the whole parameters, over all ranks."""

    @classmethod
    def of(cls, state: SubGroupState, parameters: Sequence[tuple[str, int]]) -> SubGroupRecord:
        """Return the record of a state; ``parameters``: names, and elements over all ranks."""
        names, numels = zip(*parameters, strict=True)
        return cls(
            state.master_weights.numel(),
            state.device,
            state.step,
            state.moments is not None,
            names,
            numels,
        )

    @property
    def bytes(self) -> int:
        """Size of its tensors in the file."""
        return 4 * self.numel * (3 if self.moments else 1)

    @property
    def parameters(self) -> Iterable[tuple[str, int]]:
        """Name and elements of each parameter."""
        return zip(self.names, self.numels, strict=True)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one rank's state file."""

    schema: int = SCHEMA
    deepspeed: str
    mode: str
    engine: str
    ratio: float
    rank: int
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    byteorder: str = sys.byteorder
    samples: int = 0
    """CRC-32 of the sampled bytes."""
    sub_groups: tuple[SubGroupRecord, ...]

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.sub_groups)

    @property
    def moments(self) -> bool:
        """Whether all moments were saved; the same for all ranks."""
        return all(group.moments for group in self.sub_groups)


class Save:
    """This rank's state while it is being written, by one thread at a time. Training may continue
    meanwhile, since everything that it would change has been copied.

    Args:
        folder: The folder to write into; it is created.
        manifest: The manifest of what will be written.

    Attributes:
        copies: The copies still to be written, by sub-group, in the order in which they are
            written.
        attach: Prepares a thread for reading copies.
        release: Gives a copy's memory back.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.copies: Copies = {}
        self.attach: Callable[[], None] = lambda: None
        self.release: Callable[[int], None] = lambda index: None
        folder.mkdir(parents=True, exist_ok=True)
        data_path, self._manifest_path = _paths(folder, manifest.rank)
        self._manifest_path.unlink(missing_ok=True)
        self._manifest = manifest
        self._samples: dict[int, bytes] = {}
        """By sub-group, because they may be written in any order: a thousandth of what was
        written.
        """
        self._file = _PacedFile(data_path)

    def write(self, index: int, tensors: Iterable[Tensor]) -> None:
        """Write one sub-group's ``SubGroupState.tensors``, or copies of them. Raises OSError."""
        begin = sum(group.bytes for group in self._manifest.sub_groups[:index])
        samples: list[memoryview] = []
        for tensor in tensors:
            view = _bytes_of(tensor.detach().cpu().contiguous())
            samples += (view[start : start + length] for start, length in _sampled(len(view)))
            self._file.write(view, begin)
            begin += len(view)
        self._samples[index] = b"".join(samples)

    def finish(self) -> int:
        """Write the copies, sync the file to disk, complete it with its manifest and return the
        size of this rank's state. No collective runs, and no rank waits for another.

        Raises:
            OffloadError: If the Adam worker ended before it had copied everything.
            OSError: If the disk does not take it.
        """
        try:
            self.attach()
            for index in tuple(self.copies):
                self.write(index, self.copies[index]())
                del self.copies[index]
                self.release(index)
            self._file.finish()
        finally:
            self.close()
        samples = 0
        for index in range(len(self._manifest.sub_groups)):
            samples = zlib.crc32(self._samples[index], samples)
        manifest = msgspec.structs.replace(self._manifest, samples=samples)
        partial = self._manifest_path.with_suffix(".json.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        sync(partial)
        partial.replace(self._manifest_path)
        return manifest.bytes

    def close(self) -> None:
        """Give up what is not written. Safe to call twice."""
        self._file.close()
        while self.copies:
            self.release(self.copies.popitem()[0])


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, would survive a power failure.
    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_state(folder: Path) -> None:
    """Check that all ranks' files of a saved state exist, have the right size and hold what was
    written, by sampling a thousandth of it.

    One process checks the files of all ranks. No engine is needed.

    Raises:
        OffloadError: If one is missing, cut short (``torn``) or holds other bytes (``checksum``).
    """
    for manifest in manifests(Path(folder)):
        samples = 0
        with _open_states(Path(folder), manifest) as file:
            begin = 0
            for group in manifest.sub_groups:
                for _ in range(3 if group.moments else 1):
                    for start, length in _sampled(4 * group.numel):
                        samples = zlib.crc32(
                            os.pread(file.fileno(), length, begin + start), samples
                        )
                    begin += 4 * group.numel
        if samples != manifest.samples:
            raise OffloadError(
                f"{file.name} does not hold what was written: its checksum differs.",
                code="checksum",
            )


def manifests(folder: Path) -> tuple[Manifest, ...]:
    """Return the manifests of all ranks that saved, in order. Raises OffloadError if one is missing
    or cannot be read.
    """
    if folder.is_symlink():
        raise OffloadError(
            f"{folder} is a link, and what it points to is no part of the checkpoint.",
            code="unreadable",
        )
    found: list[Manifest] = []
    while not found or len(found) < found[0].ranks:
        _, path = _paths(folder, len(found))
        try:
            with _open_regular(path) as file:
                content = os.pread(file.fileno(), _LARGEST_MANIFEST_BYTES + 1, 0)
            if len(content) > _LARGEST_MANIFEST_BYTES:
                raise OffloadError(
                    f"{path} has more than {_LARGEST_MANIFEST_BYTES} bytes.", code="unreadable"
                )
            manifest = msgspec.json.decode(content, type=Manifest)  # noqa: TID251 -- bounded above
        except FileNotFoundError:
            raise OffloadError(
                f"{folder} holds no complete optimizer state of rank {len(found)}: {path.name} is "
                "missing.",
                code="incomplete",
            ) from None
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise OffloadError(f"{path} cannot be read: {error}", code="unreadable") from error
        first = found[0] if found else manifest
        if (
            manifest.rank != len(found)
            or manifest.ranks != first.ranks
            or not all(_consistent(group, first.ranks) for group in manifest.sub_groups)
            or list(map(_layout, manifest.sub_groups)) != list(map(_layout, first.sub_groups))
        ):
            raise OffloadError(
                f"{path} contradicts itself or the other ranks: its ranks, names or sizes "
                "are impossible.",
                code="unreadable",
            )
        found.append(manifest)
    return tuple(found)


def _layout(group: SubGroupRecord) -> tuple[object, ...]:
    """Return what decides where a parameter is in a rank's file. It is the same for all ranks."""
    return group.numel, group.moments, group.names, group.numels


def _consistent(group: SubGroupRecord, ranks: int) -> bool:
    """Return whether the parameters fit into the sub-group: no tensor is larger than its file."""
    return (
        len(group.names) == len(group.numels)
        and sum(partition_numel(numel, ranks) for numel in group.numels) <= group.numel
    )


def _sampled(size: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the length of the samples of a tensor of ``size`` bytes: one at
    regular distances, and one at the end.
    """
    for start in (*range(0, size, _SAMPLE_DISTANCE_BYTES), max(0, size - _SAMPLE_BYTES)):
        yield start, min(_SAMPLE_BYTES, size - start)


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank_{rank:05d}.states", folder / f"rank_{rank:05d}.json"


def _open_regular(path: Path) -> FileIO:
    """Open a regular file for reading. Raises OffloadError for a link, a pipe, a folder or a
    device, and OSError.
    """
    # A link leads out of the checkpoint, and a pipe would wait for a writer.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OffloadError(f"{path} cannot be read: it is not a regular file.", code="unreadable")
    return FileIO(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    )


def _open_states(folder: Path, manifest: Manifest) -> FileIO:
    """Open a rank's file for reading. Raises OffloadError if that fails or the size is wrong."""
    path, _ = _paths(folder, manifest.rank)
    try:
        file = _open_regular(path)
    except OSError as error:
        raise OffloadError(
            f"{path} cannot be read: {error.strerror}.", code="unreadable"
        ) from error
    if (size := os.fstat(file.fileno()).st_size) != manifest.bytes:
        file.close()
        raise OffloadError(
            f"{path} is torn: it has {size} bytes, its manifest says {manifest.bytes}.", code="torn"
        )
    return file


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def _read_into(file: FileIO, begin: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor from byte ``begin`` on. Raises OffloadError if the file ends
    before.
    """
    view = _bytes_of(target)
    while view:
        got = os.preadv(file.fileno(), [view], begin)
        if got == 0:
            raise OffloadError(f"{file.name} is torn: it ended early.", code="torn")
        view, begin = view[got:], begin + got


# Loading states that any number of ranks saved into the shards of this run's ranks. Parameters are
# matched by name, never by position.
#
# The state of AdamW (master weights, both moments, the step) is the same in every offload mode. How
# many ranks saved it, with which ratio and sub-groups, only determines in which files the shards of
# a parameter are, and where.


_MASTER_WEIGHTS = 0
"""Position of the master weights among the tensors of a sub-group; the moments follow."""
_SHOWN_PARAMETERS = 5
"""Most parameters that an error names."""


class Rounded(NamedTuple):
    """What a rank does not load as it was saved.

    Compact moments are rounded in two cases, though a run with the same format saved them. All
    moments restart from 0 if some were not saved or cannot be set: DeepSpeed's own SuperOffload
    keeps them in a process out of reach.
    """

    blocks: int
    """Blocks of 8-bit moments that saved shards had cut: their parts had exponents of their own."""
    numel: int
    """Parameters whose moments were on a GPU, in fp32."""
    restarted: int = 0
    """Parameters of this rank, padding included, whose moments restart from 0; all or none."""


def read(folder: Path, expected: Manifest, states: Iterable[SubGroupState]) -> Rounded:
    """Read this rank's shards of a saved state into ``states``, in place.

    Args:
        folder: Folder with the files of all ranks that saved.
        expected: This rank's manifest, as it would be saved now.
        states: This rank's states, in the order of ``expected.sub_groups``.

    Returns:
        The restarted moments, or the rounding of compact ones.

    Raises:
        StateMismatchError: If the state belongs to another model. Nothing was changed.
        OffloadError: If a file is missing or cut short.
    """
    saved = manifests(folder)
    if found := tuple(_mismatches(saved, expected)):
        raise StateMismatchError(folder, found)
    locations = _locations(saved[0])
    restarts = not (saved[0].moments and expected.moments)
    with ExitStack() as stack:
        files = [stack.enter_context(_open_states(folder, manifest)) for manifest in saved]
        for state, group in zip(states, expected.sub_groups, strict=True):
            tensors = state.tensors()
            targets = [
                tensor
                if tensor.device.type == "cpu"
                else torch.empty(tensor.shape, dtype=tensor.dtype)
                for tensor in tensors
            ]
            for kind, target in enumerate(targets):
                if restarts and kind != _MASTER_WEIGHTS:
                    target.zero_()
                    continue
                offset = 0
                for name, numel in group.parameters:
                    shard = target[offset : offset + partition_numel(numel, expected.ranks)]
                    _read_shard(
                        files, locations[name], kind, numel, expected.rank, expected.ranks, shard
                    )
                    offset += len(shard)
            tensors[_MASTER_WEIGHTS].copy_(targets[_MASTER_WEIGHTS])
            if state.moments is not None:
                state.set_moments(*targets[_MASTER_WEIGHTS + 1 :])
            state.set_step(0 if restarts else saved[0].sub_groups[0].step)
    if restarts:
        return Rounded(0, 0, sum(group.numel for group in expected.sub_groups))
    return _rounded(saved, expected)


def saved_master_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the fp32 weights, flat, of every parameter of a saved state, joined from
    all ranks' files one at a time.

    Raises:
        OffloadError: If a file is missing or cut short.
    """
    for name, kinds in saved_states(Path(folder), moments=False):
        yield name, kinds[_MASTER_WEIGHTS]


NamedStates = tuple[str, tuple[Tensor, ...]]
"""The name of a parameter, and its states over all ranks, flat, in fp32: the master weights and, if
they were saved, both moments.
"""


def saved_states(folder: Path, *, moments: bool = True) -> Iterator[NamedStates]:
    """Yield the states of every parameter of a saved state.

    Args:
        folder: Folder with the files of all ranks that saved.
        moments: Whether to read the moments, if all ranks saved them.

    Raises:
        OffloadError: If a file is missing or cut short.
    """
    saved = manifests(folder)
    locations = _locations(saved[0])
    kinds = range(3 if moments and saved[0].moments else 1)
    with ExitStack() as stack:
        files = [stack.enter_context(_open_states(folder, manifest)) for manifest in saved]
        for group in saved[0].sub_groups:
            for name, numel in group.parameters:
                wholes = tuple(torch.empty(numel, dtype=torch.float32) for _ in kinds)
                for kind, whole in zip(kinds, wholes, strict=True):
                    _read_shard(files, locations[name], kind, numel, 0, 1, whole)
                yield name, wholes


def _rounded(saved: Sequence[Manifest], expected: Manifest) -> Rounded:
    """Return what is rounded when the rank of ``expected`` loads a saved state. Only moments in
    host memory are compact.
    """
    were_on_gpu = {
        name for group in saved[0].sub_groups if group.device != "cpu" for name in group.names
    }
    blocks = loaded = 0
    for group in expected.sub_groups:
        if group.device != "cpu":
            continue
        for name, numel in group.parameters:
            begin, end = _bounds(numel, expected.rank, expected.ranks)
            if name in were_on_gpu:
                loaded += end - begin
            elif begin < end:
                saved_shard = partition_numel(numel, len(saved))
                cuts = range(begin - begin % saved_shard + saved_shard, end, saved_shard)
                blocks += len({cut // MOMENT_BLOCK for cut in cuts if cut % MOMENT_BLOCK})
    return Rounded(blocks, loaded)


def _mismatches(saved: Sequence[Manifest], expected: Manifest) -> Iterator[str]:
    """Yield every reason why saved states cannot be loaded by a rank that would save
    ``expected``.
    """
    for name in ("schema", "byteorder"):
        found, here = getattr(saved[0], name), getattr(expected, name)
        if found != here:
            yield f"{name}: saved with {found}, this run has {here}"
    steps = {group.step for manifest in saved for group in manifest.sub_groups}
    # DeepSpeed's own SuperOffload, which saves no moments, counts those on the GPU only.
    if len(steps) > 1 and saved[0].moments and expected.moments:
        yield f"its sub-groups are from different steps: {', '.join(map(str, sorted(steps)))}"
    before, now = _parameters(saved[0]), _parameters(expected)
    differing = sorted({name for name, _ in before.items() ^ now.items()})
    for name in differing[:_SHOWN_PARAMETERS]:
        yield (
            f"{name}: saved {before.get(name, 'no')} elements, this run has {now.get(name, 'none')}"
        )
    if further := len(differing[_SHOWN_PARAMETERS:]):
        yield f"{further} more parameters differ"


def _parameters(manifest: Manifest) -> dict[str, int]:
    return {name: numel for group in manifest.sub_groups for name, numel in group.parameters}


class _Location(NamedTuple):
    """Where a rank's shard of a parameter is in its file, in elements."""

    first: int
    """First element of its master weights."""
    distance: int
    """From its master weights to its first moment, and from there to its second."""


def _locations(manifest: Manifest) -> dict[str, _Location]:
    found: dict[str, _Location] = {}
    start = 0
    for group in manifest.sub_groups:
        offset = start
        for name, numel in group.parameters:
            found[name] = _Location(offset, group.numel)
            offset += partition_numel(numel, manifest.ranks)
        start += group.bytes // 4
    return found


def _read_shard(
    files: Sequence[FileIO],
    location: _Location,
    kind: int,
    numel: int,
    rank: int,
    ranks: int,
    shard: Tensor,
) -> None:
    """Fill ``shard``, one rank's shard of a parameter with its padding, from all files that hold a
    part of it.
    """
    position, end = _bounds(numel, rank, ranks)
    saved_shard, filled = partition_numel(numel, len(files)), 0
    while position < end:
        saved_rank, offset = divmod(position, saved_shard)
        length = min(saved_shard - offset, end - position)
        element = location.first + kind * location.distance + offset
        _read_into(files[saved_rank], 4 * element, shard[filled : filled + length])
        position, filled = position + length, filled + length
    shard[filled:].zero_()


def _bounds(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first element of a rank's shard and the one after its last; padding is left
    out.
    """
    shard = partition_numel(numel, ranks)
    return min(rank * shard, numel), min((rank + 1) * shard, numel)
