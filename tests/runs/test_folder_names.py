from __future__ import annotations

import os
from pathlib import Path

import pytest

from so_tui.runs.directory import FolderNames


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were listed."""
    listed: list[Path] = []
    listdir = os.listdir

    def counted(folder: Path) -> list[str]:
        listed.append(folder)
        return listdir(folder)

    monkeypatch.setattr("so_tui.runs.directory.os.listdir", counted)
    return listed


def add(folder: Path, name: str) -> None:
    """Add a file without changing the time of its folder, as within one second of a file system
    that dates in seconds.
    """
    before = folder.stat()
    (folder / name).touch()
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_folder_that_does_not_change_is_not_listed_again(
    tmp_path: Path, listings: list[Path]
) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    clock = Clock()
    names = FolderNames(tmp_path, clock)
    first = names.poll()
    assert first == ("a", "b")
    clock.now += 4
    listed_until_now = (
        len(listings) + 1
    )  # once more, as it might have changed again in the same second
    assert names.poll() is first
    for _ in range(4):
        clock.now += 1
        assert names.poll() is first
    assert len(listings) <= listed_until_now
    (tmp_path / "c").touch()
    assert names.poll() == ("a", "b", "c")


def test_what_follows_within_the_same_second_is_found(tmp_path: Path) -> None:
    clock = Clock()
    names = FolderNames(tmp_path, clock)
    assert names.poll() == ()
    add(tmp_path, "a")
    clock.now += 1
    assert names.poll() == ("a",)


def test_a_folder_without_a_time_is_listed_every_few_seconds(tmp_path: Path) -> None:
    clock = Clock()
    names = FolderNames(tmp_path, clock)
    for _ in range(5):
        names.poll()
        clock.now += 1
    add(tmp_path, "a")
    clock.now += 5
    assert names.poll() == ("a",)


def test_a_folder_may_appear_disappear_and_be_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    names = FolderNames(folder, Clock())
    assert names.poll() == ()
    folder.mkdir()
    (folder / "a").touch()
    assert names.poll() == ("a",)
    folder.rename(tmp_path / "old")
    assert names.poll() == ()
    (tmp_path / "old").rename(folder)
    assert names.poll() == ("a",)
