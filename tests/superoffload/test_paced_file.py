"""Files that reach the disk while they are written."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from superoffload import checkpoint
from superoffload.checkpoint import _PacedFile

PIECE = 1 << 20
SIZE = 16 * PIECE + 77


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache (mincore)."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return 0
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            view = ctypes.c_char.from_buffer(mapped)
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), pages
            )
            del view
        assert not failed
        return mmap.PAGESIZE * sum(page & 1 for page in pages)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """Return a path where files have a disk behind their pages, or skip the test."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(PIECE))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip("pages of files stay in memory here")
    return tmp_path / "file"


def written(path: Path, content: bytes, watch: Callable[[], None] = lambda: None) -> None:
    """Write the second half first, as copies may be."""
    file, view, half = (
        _PacedFile(path, PIECE),
        memoryview(content),
        len(content) // 2 // PIECE * PIECE,
    )
    for begin, end in ((half, len(content)), (0, half)):
        for at in range(begin, end, 4 * PIECE):
            file.write(view[at : min(at + 4 * PIECE, end)], at)
            watch()
    file.finish()
    file.close()


def test_no_more_than_two_pieces_are_in_memory_and_none_at_the_end(on_disk: Path) -> None:
    content = os.urandom(SIZE)
    seen: list[int] = []
    written(on_disk, content, lambda: seen.append(cached_bytes(on_disk)))
    assert len(seen) == 5
    assert max(seen) <= 2 * PIECE
    assert cached_bytes(on_disk) == 0
    assert on_disk.read_bytes() == content


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_it_gets_every_piece_synced(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    synced: list[int] = []
    monkeypatch.setattr(checkpoint, "_sync_file_range", refused)
    monkeypatch.setattr(
        os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_size)
    )
    content = os.urandom(3 * PIECE)
    written(tmp_path / "file", content)
    assert len(synced) == 3
    assert (tmp_path / "file").read_bytes() == content


def test_a_disk_that_fails_while_it_writes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(checkpoint, "_sync_file_range", failing)
    with pytest.raises(OSError, match="file") as caught:
        written(tmp_path / "file", bytes(PIECE))
    assert caught.value.errno == errno.EIO
