from __future__ import annotations

import os
from pathlib import Path

import pytest

from so_tui.trust.files import is_shared, make_run_folder, umask_of, wanted


@pytest.fixture(params=[0o000, 0o022, 0o077])
def _umask(request: pytest.FixtureRequest) -> object:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize(("shared", "mode", "umask"), [(False, 0o700, 0o077), (True, 0o750, 0o027)])
def test_mode_ignores_the_umask(shared: bool, mode: int, umask: int, tmp_path: Path) -> None:
    make_run_folder(tmp_path / "run", shared=shared)
    assert (tmp_path / "run").stat().st_mode & 0o777 == mode
    assert (is_shared(tmp_path / "run"), umask_of(tmp_path / "run")) == (shared, umask)


def test_only_one_value_shares() -> None:
    assert [wanted({"SO_TUI_SHARE": value}) for value in ("group", "", "world")] == [
        True,
        False,
        False,
    ]
    assert not wanted({})
