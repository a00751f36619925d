"""Tests use none of the user's folders and all of the installed modules."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from so_tui.folders import default_runs_dir, state_home, user_folder
from tests.support.python_path import ROOT, checkout_path


def test_tests_have_folders_of_their_own(tmp_path: Path) -> None:
    assert all(
        folder.is_relative_to(tmp_path)
        for folder in (default_runs_dir(), user_folder(), state_home())
    )
    assert tmp_path.is_relative_to(tempfile.gettempdir())


def test_a_process_of_a_test_finds_modules_on_the_python_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lies_only_here.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import lies_only_here, so_tui; print(so_tui.__file__)"
    environment = os.environ | {"PYTHONPATH": checkout_path()}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(ROOT)
