from __future__ import annotations

import stat
from pathlib import Path

import pytest

from so_tui.launch import rendezvous
from so_tui.runs import RunDirectory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return RunDirectory(tmp_path / "runs" / "a")


def test_the_file_is_in_a_folder_that_only_this_user_can_open_and_vanishes(run: RunDirectory) -> None:
    file = rendezvous.make(run)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    rendezvous.remove(run)
    rendezvous.remove(run)
    assert not file.parent.exists()


def test_a_file_that_killed_ranks_left_is_not_met_again(run: RunDirectory) -> None:
    rendezvous.make(run).write_bytes(b"what earlier ranks said")
    assert not rendezvous.make(run).exists()


def test_runs_do_not_share_a_file(run: RunDirectory, tmp_path: Path) -> None:
    assert rendezvous.make(run) != rendezvous.make(RunDirectory(tmp_path / "elsewhere" / "a"))


def test_a_link_in_its_place_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    file = rendezvous.make(run)
    rendezvous.remove(run)
    target = tmp_path / "target"
    target.mkdir()
    file.parent.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        rendezvous.make(run)
    assert target.is_dir()
