"""A command called in this process: its exit code, and what it printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.commands.common import show_notes
from so_tui.folders import user_folder
from so_tui.runs import RunDirectory, create_run
from so_tui.spec import find_preset
from tests.support.commands import Call, Called
from tests.support.records import change_state


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Call the command of a line; words after it are taken as they are."""

    def called(line: str, *words: object) -> Called:
        capsys.readouterr()
        code = main([*shlex.split(line), *map(str, words)])
        return Called(code, *capsys.readouterr())

    yield called
    show_notes(True)


@pytest.fixture
def own_presets() -> Path:
    user_folder().mkdir(parents=True)
    return user_folder()


@pytest.fixture
def failed_run(tmp_path: Path) -> RunDirectory:
    """A run that failed for a reason that rich would take for markup."""
    run = create_run(find_preset("tiny").spec, tmp_path / "runs")
    reason = "[/lib/gloo/pair.cc:553] closed [bold] by :x: peer"
    change_state(run, state="failed", reason=reason, attempt=1, exit_code=1)
    return run
