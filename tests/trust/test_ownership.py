from __future__ import annotations

import os
from pathlib import Path

import pytest

from so_tui.trust.files import (
    Distrust,
    NotOwnError,
    distrust_of_file,
    distrust_of_folder,
    private_folder,
)


def test_a_file_of_ones_own_is_trusted_until_others_can_write_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    path.chmod(0o644)
    assert distrust_of_file(path) is None
    path.chmod(0o664)
    assert distrust_of_file(path) is Distrust.OTHERS_CAN_WRITE


def test_links_pipes_and_missing_files_are_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert distrust_of_file(tmp_path / "link") is Distrust.WRONG_KIND
    assert distrust_of_file(tmp_path / "pipe") is Distrust.WRONG_KIND
    assert distrust_of_file(tmp_path) is Distrust.WRONG_KIND
    assert distrust_of_folder(tmp_path / "file") is Distrust.WRONG_KIND
    assert distrust_of_file(tmp_path / "none") is Distrust.MISSING
    assert distrust_of_file(tmp_path / "file" / "below") is Distrust.MISSING


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_a_file_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    os.chown(path, 61_000, 61_000)
    assert distrust_of_file(path) is Distrust.OTHER_OWNER


def test_a_private_folder_is_made_and_an_open_one_closed(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700, 0o700]
    made.chmod(0o755)
    assert private_folder(made).stat().st_mode & 0o777 == 0o700


def test_open_folder_or_link_does_not_become_private(tmp_path: Path) -> None:
    tmp_path.joinpath("open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotOwnError) as error:
        private_folder(tmp_path / "open")
    assert error.value.distrust is Distrust.OTHERS_CAN_WRITE
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotOwnError) as error:
        private_folder(tmp_path / "link")
    assert error.value.distrust is Distrust.WRONG_KIND
