from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import shim
from so_tui.trust.files import UnfitFileError, read_bounded


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_bounded(path, 10) == b"x" * 10
    with pytest.raises(UnfitFileError) as error:
        read_bounded(path, 9)
    assert (error.value.code, error.value.path, error.value.limit_bytes) == (
        "too-large",
        path,
        9,
    )


def test_devices_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(UnfitFileError) as error:
            read_bounded(path, 100)
        assert error.value.code == "not-a-file"


def test_replaced_file_is_read_again(tmp_path: Path) -> None:
    """As on a network file system, where a supervisor elsewhere replaces the state once a
    second.
    """
    library = shim.build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    faults = shim.Shim(library, tmp_path / "control")
    path = tmp_path / "state.json"
    path.write_text("{}")
    path.chmod(0o600)
    faults.replace_while_read(str(path))
    code = """
import sys
from pathlib import Path
from so_tui.trust.files import read_own
from so_tui.trust.files import read_bounded
print({read(Path(sys.argv[1])) for read in (read_own, lambda path: read_bounded(path, 100)) for _ in range(3)})
"""  # noqa: E501
    argv = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(
        argv,
        env=os.environ | faults.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "{b'{}'}\n"
