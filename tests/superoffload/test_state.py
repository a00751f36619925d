"""Saving and loading of optimizer states, in every mode."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import math
import mmap
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import superoffload
from so_tui.model.sharding import partition_numel
from superoffload import api, checkpoint
from superoffload.checkpoint import _cut_blocks, _overlaps, _PacedFile
from superoffload.deepspeed_adapter import engine as adapter
from superoffload.errors import Mismatch
from tests.support import engine as support
from tests.support.problems import coded

MODES: list[tuple[support.Mode, float]] = [
    ("gpu", 0.0),
    ("zerooffload", 1.0),
    ("zerooffload", 0.5),
    ("superoffload", 1.0),
    ("superoffload", 0.5),
    ("superoffload", 0.0),
]


@pytest.mark.slow
def test_any_mode_resumes_from_the_state_of_any_other(tmp_path: Path) -> None:
    """Each mode loads the state of the one before, with other sub-groups and the same values."""
    data = support.batches(10)
    with support.engine(support.spec("superoffload", 0.5)) as first:
        support.train(first, data[:5])
        superoffload.save_state(first, tmp_path / "0")
        losses = support.train(first, data[5:])
    expected = support.by_name(tmp_path / "0")
    for number, (mode, ratio) in enumerate(MODES, start=1):
        with support.engine(support.spec(mode, ratio, sub_group_size=1000 * number)) as made:
            support.train(made, support.batches(2, seed=9))
            superoffload.load_state(made, tmp_path / str(number - 1))
            superoffload.save_state(made, tmp_path / str(number))
            found = support.by_name(tmp_path / str(number))
            assert {name: step for name, (step, _) in found.items()} == dict.fromkeys(expected, 5)
            assert found == expected
            assert support.train(made, data[5:]) == pytest.approx(losses, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["superoffload", "gpu"])
def test_a_state_without_moments_begins_them_anew(mode: support.Mode, tmp_path: Path) -> None:
    """As DeepSpeed's own SuperOffload saves it: of the CPU neither moments nor steps."""
    folder = tmp_path / "saved"
    with support.engine(support.spec("superoffload", 0.5)) as saved:
        support.train(saved, support.batches(3))
        superoffload.synchronize(saved)
        states = [
            dataclasses.replace(state, moments=None, step=0) if state.device == "cpu" else state
            for state in adapter.sub_group_states(saved)
        ]
        file = checkpoint.Save(folder, api._manifest(saved, states))
        for index, state in enumerate(states):
            file.write(index, state.tensors())
        file.finish()
        weights = dict(checkpoint.saved_master_weights(folder))
    superoffload.verify_state(folder)
    with support.engine(support.spec(mode, 0.7)) as loaded:
        support.train(loaded, support.batches(2, seed=9))
        assert superoffload.load_state(loaded, folder).restarted == sum(
            weight.numel() for weight in weights.values()
        )
        superoffload.save_state(loaded, tmp_path / "again")
        again = dict(checkpoint.saved_master_weights(tmp_path / "again"))
        assert again.keys() == weights.keys()
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        states = adapter.sub_group_states(loaded)
        assert {state.step for state in states} == {0}
        assert not any(
            moment.any() for state in states if state.moments for moment in state.moments()
        )
        assert all(math.isfinite(loss) for loss in support.train(loaded, support.batches(2)))


def test_a_state_of_another_model_is_refused_before_loading(tmp_path: Path) -> None:
    with support.engine(support.spec("zerooffload", 1.0)) as saved:
        support.train(saved, support.batches(1))
        superoffload.save_state(saved, tmp_path / "saved")
    wider = support.Model(vocabulary=52)
    wider.frozen.requires_grad_()
    with support.engine(support.spec("zerooffload", 0.5), model=wider) as other:
        before = support.states(other, tmp_path / "before")
        with pytest.raises(superoffload.StateMismatchError) as caught:
            superoffload.load_state(other, tmp_path / "saved")
        assert caught.value.mismatches == (
            Mismatch("only-here", "1 parameters are only in this run: frozen", ("frozen",)),
            Mismatch(
                "size",
                "embedding.weight: saved 1250 elements, this run has 1300",
                ("embedding.weight",),
            ),
        )
        assert support.states(other, tmp_path / "after") == before


@pytest.mark.parametrize("saved_ranks", [1, 2, 3, 8])
def test_resharding_reads_every_element_once_in_order(saved_ranks: int) -> None:
    for ranks, numel in itertools.product((1, 2, 3, 5, 8), (1, 2, 7, 8, 24, 25, 1000)):
        saved_shard, shard = partition_numel(numel, saved_ranks), partition_numel(numel, ranks)
        whole = list(range(numel))
        saved = [
            whole[rank * saved_shard : (rank + 1) * saved_shard] for rank in range(saved_ranks)
        ]
        for rank in range(ranks):
            filled: list[int] = []
            for overlap in _overlaps(numel, saved_ranks, rank, ranks):
                assert overlap.offset == len(filled)
                filled += saved[overlap.saved_rank][
                    overlap.saved_offset : overlap.saved_offset + overlap.numel
                ]
            assert filled == whole[rank * shard : (rank + 1) * shard]


@pytest.mark.parametrize(
    ("numel", "saved_ranks", "ranks", "expected"),
    [
        (1024, 2, 1, [0]),  # shards of 512 end with a block
        (1000, 2, 1, [1]),  # at element 500
        (1000, 1, 2, [0, 0]),  # parts of a block keep its values
        (1200, 4, 2, [1, 1]),  # at 300, 600 and 900, of which 600 stays a boundary
        (1200, 3, 2, [1, 1]),  # at 400 and 800
        (1200, 2, 3, [0, 1, 0]),  # at 600, which is the second rank's
        (100, 8, 1, [1]),  # seven boundaries in one block
    ],
)
def test_blocks_that_lay_in_several_shards_are_counted(
    numel: int, saved_ranks: int, ranks: int, expected: list[int]
) -> None:
    assert [_cut_blocks(numel, saved_ranks, rank, ranks) for rank in range(ranks)] == expected


def test_a_torn_or_missing_state_is_refused(tmp_path: Path) -> None:
    run = support.spec("zerooffload", 1.0)
    with support.engine(run) as made:
        with coded(superoffload.OffloadError, "incomplete", match=r"rank_00000\.json"):
            superoffload.load_state(made, tmp_path)
        superoffload.save_state(made, tmp_path)
        file = tmp_path / "rank_00000.states"
        file.write_bytes(file.read_bytes()[:-4])
        with coded(superoffload.OffloadError, "torn"):
            superoffload.load_state(made, tmp_path)


def test_a_file_that_is_whole_but_not_what_was_written_is_found(tmp_path: Path) -> None:
    run = support.spec("superoffload", 0.5)
    with support.engine(run) as made:
        superoffload.save_state(made, tmp_path)
        superoffload.verify_state(tmp_path)
        file = tmp_path / "rank_00000.states"
        written = file.read_bytes()
        file.write_bytes(written[:-4] + b"\0\0\xc0\x7f")
        with coded(superoffload.OffloadError, "checksum", match=r"rank_00000\.states"):
            superoffload.verify_state(tmp_path)
        file.write_bytes(written)
        superoffload.verify_state(tmp_path)
        file.unlink()
        with coded(
            superoffload.OffloadError, "unreadable", match=r"rank_00000\.states .*No such file"
        ):
            superoffload.verify_state(tmp_path)


def test_another_deepspeed_version_is_refused() -> None:
    from superoffload.deepspeed_adapter.engine import check_version

    for version in ("0.18.9", "0.19.0", "0.19.8", "0.19.8+cu130"):
        check_version(version)
    for version in ("0.18.8", "0.19.9", "0.20.0", "1.0"):
        with coded(
            superoffload.OffloadError,
            "deepspeed-version",
            match=rf"DeepSpeed {version} is installed.*pip install deepspeed==0\.19\.8",
        ):
            check_version(version)


def test_the_doctor_knows_the_versions_that_the_engine_supports() -> None:
    from so_tui.machine.software import known_versions
    from superoffload.deepspeed_adapter.engine import NEWEST, OLDEST

    bound = known_versions().bound_of("deepspeed")
    assert (bound.oldest, bound.newest) == (OLDEST, NEWEST)


def rank_files(folder: Path, *records: checkpoint.SubGroupRecord) -> None:
    """Write the states of ranks with a sub-group each."""
    for rank, record in enumerate(records):
        described = checkpoint.Manifest(
            deepspeed="0",
            mode="superoffload",
            engine="so-tui",
            ratio=1.0,
            rank=rank,
            ranks=len(records),
            sub_groups=(record,),
        )
        with closing(checkpoint.Save(folder, described)) as file:
            file.write(0, (torch.ones(record.numel),) * 3)
            file.finish()


@pytest.mark.parametrize("change", [("names", ("b", "a")), ("numels", (3, 4)), ("numel", 5)])
def test_other_layouts_of_ranks_are_not_joined(change: tuple[str, Any], tmp_path: Path) -> None:
    """Parameters are looked up where the first rank has them: others would be read there."""
    same = checkpoint.SubGroupRecord(4, "cpu", 3, moments=True, names=("a", "b"), numels=(4, 4))
    rank_files(tmp_path, same, replace(same, **dict([change])))
    for read in (superoffload.verify_state, lambda folder: list(checkpoint.saved_states(folder))):
        with coded(superoffload.OffloadError, "unreadable"):
            read(tmp_path)


@pytest.mark.parametrize("step", [-1, 2**70])
def test_an_impossible_step_of_a_state_is_refused(step: int, tmp_path: Path) -> None:
    record = checkpoint.SubGroupRecord(1, "cpu", step, moments=True, names=("a",), numels=(1,))
    rank_files(tmp_path, record)
    with coded(superoffload.OffloadError, "unreadable"):
        superoffload.verify_state(tmp_path)


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


def test_a_paced_file_keeps_two_pieces_in_memory_at_most(on_disk: Path) -> None:
    content = os.urandom(SIZE)
    seen: list[int] = []
    written(on_disk, content, lambda: seen.append(cached_bytes(on_disk)))
    assert len(seen) == 5
    assert max(seen) <= 2 * PIECE
    assert cached_bytes(on_disk) == 0
    assert on_disk.read_bytes() == content


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_pieces_are_synced_where_ranges_cannot_be_unless_the_disk_fails(
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
    if code == errno.EIO:
        with pytest.raises(OSError, match="file") as caught:
            written(tmp_path / "file", content)
        assert caught.value.errno == errno.EIO
        return
    written(tmp_path / "file", content)
    assert len(synced) == 3
    assert (tmp_path / "file").read_bytes() == content
