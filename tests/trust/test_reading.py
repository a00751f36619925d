from __future__ import annotations

import os
from pathlib import Path

import pytest

from so_tui.trust.reading import Unfit, UnfitFileError, read_bounded


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_bounded(path, 10) == b"x" * 10
    with pytest.raises(UnfitFileError) as error:
        read_bounded(path, 9)
    assert (error.value.unfit, error.value.path, error.value.limit_bytes) == (Unfit.TOO_LARGE, path, 9)


def test_devices_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(UnfitFileError) as error:
            read_bounded(path, 100)
        assert error.value.unfit is Unfit.NOT_A_FILE
