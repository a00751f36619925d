"""Saving and loading of optimizer states, in every mode."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import math
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import superoffload
from so_tui.machine.software import known_versions
from so_tui.model.sharding import partition_numel
from superoffload import api, checkpoint
from superoffload.checkpoint import Rounded, SubGroupRecord, _PacedFile
from superoffload.deepspeed_adapter import engine as adapter
from superoffload.gpu_states import SubGroupState
from tests.support import engine as support
from tests.support.checkpoints import rank_manifest_of
from tests.support.problems import coded

MODES: list[tuple[support.Mode, float, support.Parameters]] = [
    ("gpu", 0.0, "none"),
    ("zerooffload", 1.0, "none"),
    ("superoffload", 0.8, "cpu"),
    ("zerooffload", 0.5, "none"),
    ("superoffload", 0.5, "none"),
    ("superoffload", 0.0, "none"),
]


@pytest.mark.slow
def test_any_mode_resumes_from_the_state_of_any_other(tmp_path: Path) -> None:
    """Each mode loads the state of the one before, with other sub-groups and the same values."""
    data = support.batches(10)
    with support.offloading(0.5) as first:
        support.train(first, data[:5])
        superoffload.save_state(first, tmp_path / "0")
        losses = support.train(first, data[5:])
    expected = support.by_name(tmp_path / "0")
    assert {step for step, _ in expected.values()} == {5}
    for number, (mode, ratio, parameters) in enumerate(MODES, start=1):
        run = support.spec(mode, ratio, sub_group_size=1000 * number, parameters=parameters)
        with support.engine(run) as made:
            support.train(made, support.batches(2, seed=9))
            superoffload.load_state(made, tmp_path / str(number - 1))
            superoffload.save_state(made, tmp_path / str(number))
            assert support.by_name(tmp_path / str(number)) == expected
            assert support.train(made, data[5:]) == pytest.approx(losses, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["superoffload", "gpu"])
def test_a_state_without_moments_begins_them_anew(mode: support.Mode, tmp_path: Path) -> None:
    """As DeepSpeed's own SuperOffload saves it: of the CPU neither moments nor steps."""
    with support.offloading(0.5) as saved:
        support.train(saved, support.batches(3))
        superoffload.synchronize(saved)
        states = [
            dataclasses.replace(state, moments=None, step=0) if state.device == "cpu" else state
            for state in adapter.sub_group_states(saved)
        ]
        file = checkpoint.Save(tmp_path, api._manifest(saved, states))
        for index, state in enumerate(states):
            file.write(index, state.tensors())
        file.finish()
        weights = dict(checkpoint.saved_master_weights(tmp_path))
    superoffload.verify_state(tmp_path)
    with support.engine(support.spec(mode, 0.7)) as loaded:
        support.train(loaded, support.batches(2, seed=9))
        restarted = superoffload.load_state(loaded, tmp_path).restarted
        assert restarted == sum(weight.numel() for weight in weights.values())
        superoffload.save_state(loaded, tmp_path / "again")
        for name, weight in checkpoint.saved_master_weights(tmp_path / "again"):
            assert torch.equal(weights.pop(name), weight)
        assert not weights
        for state in adapter.sub_group_states(loaded):
            assert state.step == 0
            assert state.moments is None or not any(moment.any() for moment in state.moments())
        assert all(math.isfinite(loss) for loss in support.train(loaded, support.batches(2)))


def test_a_state_of_another_model_is_refused_before_loading(tmp_path: Path) -> None:
    with support.engine(support.spec("zerooffload", 1.0)) as saved:
        support.train(saved, support.batches(1))
        superoffload.save_state(saved, tmp_path)
    wider = support.Model(vocabulary=52)
    wider.frozen.requires_grad_()
    with support.engine(support.spec("zerooffload", 0.5), model=wider) as other:
        before = support.states(other)
        with pytest.raises(superoffload.StateMismatchError) as caught:
            superoffload.load_state(other, tmp_path)
        assert caught.value.mismatches == (
            "embedding.weight: saved 1250 elements, this run has 1300",
            "frozen: saved no elements, this run has 25",
        )
        assert support.states(other) == before


NUMELS = (1, 2, 7, 8, 24, 25, 1000)


def described(numels: tuple[int, ...], rank: int, ranks: int) -> checkpoint.Manifest:
    """A sub-group in host memory, of parameters that are named after their place."""
    names = tuple(map(str, range(len(numels))))
    held = sum(partition_numel(numel, ranks) for numel in numels)
    record = SubGroupRecord(held, "cpu", 3, moments=True, names=names, numels=numels)
    return rank_manifest_of("so-tui", rank, ranks, (record,))


def states(numels: tuple[int, ...], rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's states, in which every element of a parameter is known by its place."""
    shards = []
    for numel in numels:
        shard = partition_numel(numel, ranks)
        places = torch.arange(rank * shard, (rank + 1) * shard) + 1.0
        shards.append(torch.where(places <= numel, places, 0.0))
    weights = torch.cat(shards)
    return weights, -weights, weights**2


def save(folder: Path, numels: tuple[int, ...], ranks: int) -> None:
    for rank in range(ranks):
        with closing(checkpoint.Save(folder, described(numels, rank, ranks))) as file:
            file.write(0, states(numels, rank, ranks))
            file.finish()


def load(folder: Path, numels: tuple[int, ...], rank: int, ranks: int) -> Rounded:
    """Load what was saved, and check that the rank has its own shards."""
    expected = states(numels, rank, ranks)
    weights, first, second = loaded = [torch.full_like(each, math.nan) for each in expected]
    state = SubGroupState(
        "cpu", weights, weights, lambda: (first, second), lambda *_: None, 3, lambda _: None
    )
    rounded = checkpoint.read(folder, described(numels, rank, ranks), [state])
    assert all(map(torch.equal, loaded, expected))
    return rounded


@pytest.mark.parametrize("saved_ranks", [1, 2, 3, 8])
def test_resharding_reads_every_element_once_in_order(saved_ranks: int, tmp_path: Path) -> None:
    save(tmp_path, NUMELS, saved_ranks)
    for ranks in (1, 2, 3, 5, 8):
        for rank in range(ranks):
            load(tmp_path, NUMELS, rank, ranks)
    with pytest.raises(superoffload.StateMismatchError) as caught:
        checkpoint.read(tmp_path, rank_manifest_of("so-tui"), ())
    assert caught.value.mismatches[-1] == "2 more parameters differ"


@pytest.mark.parametrize(
    ("numel", "saved_ranks", "ranks", "expected"),
    [
        (1024, 2, 1, [0]),  # shards of 512 end with a block
        (1000, 2, 1, [1]),  # at element 500
        (1000, 1, 2, [0, 0]),  # parts of a block keep its values
        (1200, 4, 2, [1, 1]),  # at 300, 600 and 900, of which 600 stays a boundary
        (1200, 2, 3, [0, 1, 0]),  # at 600, which is the second rank's
        (100, 8, 1, [1]),  # seven boundaries in one block
        (0, 2, 2, [0, 0]),
    ],
)
def test_blocks_that_lay_in_several_shards_are_counted(
    numel: int, saved_ranks: int, ranks: int, expected: list[int], tmp_path: Path
) -> None:
    save(tmp_path, (numel,), saved_ranks)
    loaded = [load(tmp_path, (numel,), rank, ranks) for rank in range(ranks)]
    assert loaded == [Rounded(blocks, numel=0) for blocks in expected]


def test_a_torn_missing_or_changed_state_is_refused(tmp_path: Path) -> None:
    with support.engine(support.spec("zerooffload", 1.0)) as made:
        with coded(superoffload.OffloadError, "incomplete", match=r"rank_00000\.json"):
            superoffload.load_state(made, tmp_path)
        superoffload.save_state(made, tmp_path)
        superoffload.verify_state(tmp_path)
        file = tmp_path / "rank_00000.states"
        written = file.read_bytes()
        file.write_bytes(written[:-4])
        with coded(superoffload.OffloadError, "torn"):
            superoffload.load_state(made, tmp_path)
    file.write_bytes(written[:-4] + b"\0\0\xc0\x7f")
    with coded(superoffload.OffloadError, "checksum", match=r"rank_00000\.states"):
        superoffload.verify_state(tmp_path)
    file.unlink()
    with coded(superoffload.OffloadError, "unreadable", match=r"rank_00000\.states .*No such file"):
        superoffload.verify_state(tmp_path)


def test_another_deepspeed_version_is_refused() -> None:
    bound = known_versions().bound_of("deepspeed")
    assert (bound.oldest, bound.newest) == (adapter.OLDEST, adapter.NEWEST)
    for version in ("0.18.9", "0.19.0", "0.19.8", "0.19.8+cu130"):
        adapter.check_version(version)
    for version in ("0.18.8", "0.19.9", "0.20.0", "1.0"):
        said = rf"DeepSpeed {version} is installed.*pip install deepspeed==0\.19\.8"
        with coded(superoffload.OffloadError, "deepspeed-version", match=said):
            adapter.check_version(version)


RECORD = SubGroupRecord(4, "cpu", 3, moments=True, names=("a", "b"), numels=(4, 4))


@pytest.mark.parametrize(
    "change",
    [{"names": ("b", "a")}, {"numels": (3, 4)}, {"numel": 5}, {"step": -1}, {"step": 2**70}],
)
def test_ranks_that_contradict_are_not_joined(change: dict[str, Any], tmp_path: Path) -> None:
    """Parameters are looked up where the first rank has them: others would be read there."""
    for rank, record in enumerate((RECORD, replace(RECORD, **change))):
        described = rank_manifest_of("so-tui", rank, 2, (record,))
        with closing(checkpoint.Save(tmp_path, described)) as file:
            file.write(0, (torch.ones(record.numel),) * 3)
            file.finish()
    for read in (superoffload.verify_state, lambda folder: list(checkpoint.saved_states(folder))):
        with coded(superoffload.OffloadError, "unreadable"):
            read(tmp_path)


PIECE = 1 << 12


@pytest.mark.parametrize("code", [0, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_paced_file_has_two_pieces_on_their_way_at_most(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole files are synced where ranges cannot be, unless the disk fails."""
    sent, waited, synced, dropped = list[int](), list[int](), list[int](), list[int]()

    def sync_file_range(descriptor: int, offset: int, length: int, flags: int) -> int:
        ctypes.set_errno(code)
        (sent if flags == checkpoint._WRITE else waited).append(offset)
        assert code or len(sent) - len(waited) <= 3
        return -1 if code else 0

    monkeypatch.setattr(checkpoint, "_sync_file_range", sync_file_range)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, *rest: dropped.append(offset))
    content = os.urandom(6 * PIECE + 77)
    file = _PacedFile(tmp_path / "file", PIECE)
    with closing(file):
        if code == errno.EIO:
            with pytest.raises(OSError, match="file") as caught:
                file.write(memoryview(content), 0)
            assert caught.value.errno == errno.EIO
            return
        for begin in (4 * PIECE, 0):  # the second part first, as copies may be
            file.write(memoryview(content)[begin : begin + 4 * PIECE], begin)
        file.finish()
    assert (tmp_path / "file").read_bytes() == content
    assert sent == [PIECE * place for place in (4, 5, 6, 0, 1, 2, 3)]
    assert (waited, len(synced)) == (([], 7) if code else (sent[:-2], 0))
    assert dropped == ([0] * 8 if code else [*waited, 0])
