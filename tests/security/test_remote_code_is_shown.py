"""A run that executes Python code of a model says so wherever it is planned or started."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.folders import user_folder
from tests.support.screen import opened

NAMED = (
    "model.trust_remote_code is on: Python code of org/model, revision v1, runs with your rights"
)
PRESET = """
extends = "tiny"
name = "theirs"
title = "Theirs"
[model]
id = "org/model"
revision = "v1"
trust_remote_code = true
"""


@pytest.fixture(autouse=True)
def _preset() -> None:
    """Make a preset whose author wants the model's code to run."""
    user_folder().mkdir(parents=True)
    (user_folder() / "theirs.toml").write_text(PRESET)


@pytest.mark.parametrize("command", ["plan theirs", "run theirs --dry-run"])
def test_commands_name_the_model_whose_code_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    main([*command.split(), "--machine", "gh200-quad-120"])
    assert NAMED in capsys.readouterr().out


async def test_screens_name_the_model_whose_code_runs(tmp_path: Path) -> None:
    async with opened(tmp_path / "runs", (160, 45)) as ui:
        await ui.press("1", "slash", *"theirs", "enter", "enter")
        await ui.until(lambda: "trust_remote_code is on" in ui.text())
        assert NAMED in str(ui.shown("#plan-text"))
        await ui.press("f5")
        await ui.until(lambda: len(ui.app.screen_stack) == 2)
        assert "trust_remote_code is on" in ui.text()
