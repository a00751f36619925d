"""Files that others may have written or can read, and how long it takes to decode them."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.faults import shim
from so_tui.trust.decoding import DEEPEST, TooDeepError, decode_json
from so_tui.trust.files import (
    Distrust,
    UnfitFileError,
    distrust_of_file,
    distrust_of_folder,
    read_bounded,
    read_judged,
)
from tests.support.python_path import printed


def test_only_a_file_of_ones_own_is_trusted(tmp_path: Path) -> None:
    path, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    path.write_text("")
    link.symlink_to(path)
    os.mkfifo(pipe)
    for mode, distrust in ((0o644, None), (0o666, Distrust.OTHERS_CAN_WRITE)):
        path.chmod(mode)
        assert distrust_of_file(path) is distrust
    for wrong in (link, pipe, tmp_path):
        assert distrust_of_file(wrong) is Distrust.WRONG_KIND
    assert distrust_of_folder(path) is Distrust.WRONG_KIND
    for missing in (tmp_path / "none", path / "below"):
        assert distrust_of_file(missing) is Distrust.MISSING
    if os.geteuid() == 0:
        os.chown(path, 61_000, 61_000)
        assert distrust_of_file(path) is Distrust.OTHER_OWNER


def test_only_regular_files_are_read_up_to_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_bounded(path, 10) == b"x" * 10
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for unfit, code in (
        (path, "too-large"),
        (tmp_path / "pipe", "not-a-file"),
        (tmp_path / "zero", "not-a-file"),
        (tmp_path, "not-a-file"),
    ):
        with pytest.raises(UnfitFileError) as error:
            read_bounded(unfit, 9)
        assert (error.value.code, error.value.path) == (code, unfit)


STRANGER = 61_000


READ = """
import sys
from pathlib import Path
from so_tui.trust.files import read_bounded, read_own
path = Path(sys.argv[1])
print({read() for read in (lambda: read_own(path), lambda: read_bounded(path, 100)) for _ in "123"})
"""


def test_replaced_file_is_read_again(tmp_path: Path) -> None:
    """As on a network file system, where a supervisor replaces the state every second."""
    library = shim.build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    faults = shim.Shim(library, tmp_path / "control")
    path = tmp_path / "state.json"
    path.write_text("{}")
    path.chmod(0o600)
    faults.replace_while_read(str(path))
    read = printed("-c", READ, str(path), env=os.environ | faults.environment())
    assert read == "{b'{}'}\n"


BRACKETS = b"[" + b"{}," * DEEPEST
"""So many that their nesting is looked at."""


def seconds(content: bytes) -> float:
    began = time.process_time()
    with pytest.raises(msgspec.DecodeError):
        decode_json(content, object)
    return time.process_time() - began


@pytest.mark.parametrize("part", [b'\\"', b"\\\\", b'"\\"'])
def test_a_string_without_an_end_takes_no_longer_than_its_length(part: bytes) -> None:
    """Read again from each of its quotes, it would take half a minute for 50 kB."""
    assert seconds(BRACKETS + b'"' + part * 50_000) < 5


def test_brackets_in_strings_are_not_nesting() -> None:
    text = "[{" * DEEPEST + '"\\'
    assert decode_json(msgspec.json.encode([text, {}]), object) == [text, {}]
    with pytest.raises(TooDeepError):
        decode_json(msgspec.json.encode(text) + b"[" * (DEEPEST + 1), object)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_root_installed_is_judged_as_ones_own() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # TMPDIR may be closed to others
        path = Path(folder, "preset.toml")
        path.write_text("x")
        path.parent.chmod(0o755)
        try:
            judged = {}
            for mode, owner in ((0o644, 0), (0o666, 0), (0o644, 62_000)):
                os.seteuid(0)
                os.chown(path, owner, owner)
                path.chmod(mode)
                os.seteuid(STRANGER)
                judged[mode, owner] = read_judged(path, 10)[1]
        finally:
            os.seteuid(0)
    assert judged == {
        (0o644, 0): None,
        (0o666, 0): Distrust.OTHER_OWNER,
        (0o644, 62_000): Distrust.OTHER_OWNER,
    }
