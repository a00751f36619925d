"""Segments without a usable index: read completely, with an index of the reader's own, and nothing
written into the run.
"""

from __future__ import annotations

import os
import stat
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from so_tui.folders import cache_home
from so_tui.runs import MetricsWriter, RunDirectory, index
from so_tui.runs.index import (
    POSITIONS,
    VERSION,
    IndexCache,
    SegmentIndex,
    _fingerprint,
    index_path,
    segments,
)
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import CheckpointRecord, StepRecord

Step = Callable[..., StepRecord]
STEPS = 300


@pytest.fixture
def made(run: RunDirectory, step: Step) -> RunDirectory:
    """A run of several segments, all with an index but the newest."""
    writer = MetricsWriter(run, 1, segment_bytes=40_000)
    for number in range(1, STEPS + 1):
        writer.append(step(number, loss=float(number)))
        if number == 20:
            writer.append(
                CheckpointRecord(attempt=1, time=1e9, step=20, path="/c", bytes=1, seconds=1.0)
            )
    return run


def opened(run: RunDirectory, cache: IndexCache | None = None) -> MetricsReader:
    reader = MetricsReader(run, cache)
    while reader.poll(limit_records=10_000, limit_s=10.0).more:
        continue
    return reader


def is_complete(reader: MetricsReader) -> bool:
    blocks = reader.blocks(["loss"])
    whole = sum(range(1, STEPS + 1))
    return (
        reader.unread_share == 0
        and [record.step for record in reader.steps(0, STEPS)] == list(range(1, STEPS + 1))
        and (sum(blocks["records"]), sum(blocks["loss.finite"]), sum(blocks["loss.sum"]))
        == (STEPS, STEPS, whole)
        and [saved.step for saved in reader.checkpoints] == [20]
    )


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def older(path: Path) -> None:
    """Make an index of the first version, as far as a reader looks."""
    header, _, columns = path.read_bytes().partition(b"\n")
    path.write_bytes(
        msgspec.json.encode(msgspec.json.decode(header) | {"v": VERSION - 1}) + b"\n" + columns
    )


def of_another_segment(path: Path) -> None:
    path.write_bytes(index_path(path.with_name("000002.jsonl")).read_bytes())


@pytest.mark.parametrize(
    "harm", [Path.unlink, flip, older, of_another_segment, lambda path: path.write_bytes(b"")]
)
def test_a_segment_without_a_usable_index_is_indexed_in_the_users_cache(
    made: RunDirectory, harm: Callable[[Path], object]
) -> None:
    first = segments(made.metrics_dir)[1]
    harm(index_path(first))
    before = state_of(made.metrics_dir)
    assert is_complete(opened(made))
    assert state_of(made.metrics_dir) == before, "a reader does not write into a run"
    kept = list((cache_home() / "metrics").iterdir())
    assert [path.stem for path in kept] == [_fingerprint(first)]
    assert stat.S_IMODE(kept[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(kept[0].parent.stat().st_mode) == 0o700
    again = MetricsReader(made)
    first_poll = again.poll(limit_records=10_000, limit_s=10.0)
    assert not first_poll.more
    assert is_complete(again)


def test_what_is_still_to_be_read_is_known_and_the_newest_steps_come_first(
    made: RunDirectory,
) -> None:
    for path in segments(made.metrics_dir).values():
        index_path(path).unlink(missing_ok=True)
    reader = MetricsReader(made)
    shares = []
    while reader.poll(limit_records=10_000, limit_s=0.0).more:
        shares.append(reader.unread_share)
        assert reader.latest is not None
        assert reader.latest.step == STEPS
        blocks = reader.blocks(["loss"])
        assert sum(blocks["records"]) == STEPS + 1 - blocks["first"][0], (
            "no hole between what is known"
        )
    assert shares == sorted(shares, reverse=True)
    assert 0.5 < shares[0] < 1
    assert is_complete(reader)


def test_taking_indexes_is_bounded_and_the_newest_steps_do_not_wait_for_it(
    made: RunDirectory,
) -> None:
    reader = MetricsReader(made)
    assert reader.poll(limit_records=10_000, limit_s=0.0).more
    assert reader.latest is not None
    assert reader.latest.step == STEPS
    assert reader.unread_share > 0.5
    while reader.poll(limit_records=10_000, limit_s=0.0).more:
        continue
    assert is_complete(reader)


def test_a_kept_index_is_checked_before_it_is_used(made: RunDirectory) -> None:
    first = segments(made.metrics_dir)[1]
    index_path(first).unlink()
    opened(made)
    (kept,) = (cache_home() / "metrics").iterdir()
    for harm in (flip, older, lambda path: path.write_bytes(b"x"), lambda path: path.chmod(0o666)):
        harm(kept)
        assert is_complete(opened(made))
        assert SegmentIndex(kept).segment_bytes == first.stat().st_size, "and it is made again"
        kept.chmod(0o600)


def test_a_segment_that_changed_has_no_kept_index(made: RunDirectory, step: Step) -> None:
    first = segments(made.metrics_dir)[1]
    index_path(first).unlink()
    opened(made)
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[1:]))
    assert [record.step for record in opened(made).recent(STEPS)] == list(range(2, STEPS + 1))


@pytest.mark.parametrize("taken", ["file", "link", "others"])
def test_without_a_folder_of_ones_own_indexes_stay_in_memory(
    made: RunDirectory, tmp_path: Path, taken: str
) -> None:
    index_path(segments(made.metrics_dir)[1]).unlink()
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if taken == "file":
        folder.write_text("")
    elif taken == "link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert is_complete(opened(made, IndexCache(folder)))
    assert not list(elsewhere.iterdir())
    assert taken != "others" or not list(folder.iterdir())


def test_the_cache_is_bounded_and_keeps_what_was_used_last(
    made: RunDirectory, tmp_path: Path
) -> None:
    paths = list(segments(made.metrics_dir).values())
    for path in paths:
        index_path(path).unlink(missing_ok=True)
    folder = tmp_path / "cache"
    unbounded = IndexCache(folder)
    opened(made, unbounded)
    one = max(path.stat().st_size for path in folder.iterdir())
    assert len(list(folder.iterdir())) == len(paths) - 1
    for path in folder.iterdir():
        path.unlink()
    small = IndexCache(folder, limit_bytes=3 * one)
    reader = opened(made, small)
    assert 1 <= len(list(folder.iterdir())) <= 3
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3 * one
    # What was deleted is made again where it is needed.
    for _ in range(len(paths)):
        reader.blocks(["loss"])
        if not reader.unread_share:
            break
        while reader.poll(limit_records=10_000, limit_s=10.0).more:
            continue


def test_an_index_that_disappears_is_made_again(made: RunDirectory) -> None:
    reader = opened(made)
    index_path(segments(made.metrics_dir)[1]).unlink()
    assert sum(reader.blocks(["loss"])["records"]) < STEPS
    assert reader.unread_share > 0
    assert reader.poll(limit_records=10_000, limit_s=10.0).redraw
    assert is_complete(reader)


def test_a_reader_never_deletes_what_it_kept_itself(made: RunDirectory, tmp_path: Path) -> None:
    paths = list(segments(made.metrics_dir).values())
    for path in paths:
        index_path(path).unlink(missing_ok=True)
    folder = tmp_path / "cache"
    opened(made, IndexCache(folder))
    one = max(path.stat().st_size for path in folder.iterdir())
    for path in folder.iterdir():
        path.unlink()
    reader = opened(made, IndexCache(folder, limit_bytes=2 * one))
    for _ in range(3):
        assert is_complete(reader)
    kept = [path for path in folder.iterdir() if path.is_file()]
    assert len(kept) == 1, "the others are in memory"


def test_what_readers_hold_in_memory_is_bounded(
    made: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in segments(made.metrics_dir).values():
        index_path(path).unlink(missing_ok=True)
    monkeypatch.setattr(index, "MEMORY_BYTES", 0)
    reader = opened(made, IndexCache(tmp_path / "cache", limit_bytes=0))
    assert not list((tmp_path / "cache").glob("*"))
    assert reader.unread_share == 0
    shown = [record.step for record in reader.steps(0, STEPS)]
    assert shown == list(range(shown[0], STEPS + 1)), "the newest segment is followed"
    assert shown[0] > 1


def test_room_is_made_beside_a_folder_that_is_no_entry(made: RunDirectory, tmp_path: Path) -> None:
    index_path(segments(made.metrics_dir)[1]).unlink()
    folder, limit_bytes = tmp_path / "cache", 1 << 20
    (folder / "subfolder").mkdir(parents=True)
    os.utime(folder / "subfolder", (0, 0))
    (folder / "other.index").write_bytes(b"x" * limit_bytes)
    opened(made, IndexCache(folder, limit_bytes))
    first = segments(made.metrics_dir)[1]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["subfolder", f"{_fingerprint(first)}.index"]
    )


def test_a_kept_index_is_used_only_from_a_folder_that_others_cannot_write(
    made: RunDirectory,
) -> None:
    first, kept = kept_index(made)
    assert IndexCache().load(first) is not None
    kept.parent.chmod(0o777)
    assert IndexCache().load(first) is None


def test_a_segment_that_was_changed_and_dated_back_has_no_kept_index(made: RunDirectory) -> None:
    first, _ = kept_index(made)
    before = first.stat()
    flip(first)
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert IndexCache().load(first) is None


def kept_index(run: RunDirectory) -> tuple[Path, Path]:
    """Open a run of which the first segment has no index. Return that segment, and its index in the
    cache.
    """
    first = segments(run.metrics_dir)[1]
    index_path(first).unlink()
    opened(run)
    (kept,) = (cache_home() / "metrics").iterdir()
    return first, kept


def test_an_index_with_more_blocks_than_its_segment_has_room_for_is_refused() -> None:
    columns = array("d", [1.0, 51.0, 101.0] * 2 + [1.0] * 3 + [0.0] * 3).tobytes()
    header = {
        "v": VERSION,
        "attempt": 1,
        "segment_bytes": 1000,
        "rows": 3,
        "columns": POSITIONS,
        "crc32": zlib.crc32(columns),
        "events": [],
        "step_is_newer": False,
    }
    assert (
        SegmentIndex.in_memory(msgspec.json.encode(header) + b"\n" + columns).segment_bytes == 1000
    )
    with pytest.raises(msgspec.DecodeError, match="more blocks"):
        SegmentIndex.in_memory(
            msgspec.json.encode(header | {"segment_bytes": 100}) + b"\n" + columns
        )
