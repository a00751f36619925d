"""A run that executes Python code of a model says so wherever it is planned or started."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.folders import user_folder
from so_tui.plan.notes import RemoteCode
from so_tui.plan.planner import make_plan
from so_tui.spec import find_preset, with_values
from tests.support.machines import machine_json
from tests.support.make_run import quad_machine
from tests.support.screen import opened

NAMED = (
    "model.trust_remote_code is on: Python code of org/model, revision v1, runs with your rights"
)


@pytest.fixture
def preset() -> str:
    """A preset whose author wants the model's code to run."""
    user_folder().mkdir(parents=True)
    text = (
        'extends = "tiny"\nname = "theirs"\ntitle = "Theirs"\n[model]\nid = "org/model"\nrevision '
        '= "v1"\ntrust_remote_code = true\n'
    )
    (user_folder() / "theirs.toml").write_text(text)
    return "theirs"


@pytest.mark.parametrize("argv", [["plan", "theirs"], ["run", "theirs", "--dry-run"]])
def test_commands_name_the_model_whose_code_runs(
    argv: list[str],
    preset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "machine.json").write_bytes(machine_json(quad_machine()))
    main([*argv, "--machine", str(tmp_path / "machine.json")])
    assert NAMED in capsys.readouterr().out


async def test_screens_name_the_model_whose_code_runs(preset: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "runs", (160, 45)) as ui:
        await ui.press("1", "slash", *"theirs", "enter", "enter")
        await ui.until(lambda: "trust_remote_code is on" in ui.text())
        assert NAMED in str(ui.shown("#plan-text"))
        await ui.press("f5")
        await ui.until(lambda: len(ui.app.screen_stack) == 2)
        assert "trust_remote_code is on" in ui.text()


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        (
            {"model.id": "org/model", "model.revision": "v1"},
            RemoteCode(model="org/model", revision="v1"),
        ),
        ({"model.id": "/models/one"}, RemoteCode(model="/models/one", revision="")),
    ],
)
def test_a_plan_has_the_origin_of_the_code(values: dict[str, str], fact: RemoteCode) -> None:
    spec = with_values(find_preset("tiny").spec, values)
    assert not any(
        isinstance(warning, RemoteCode) for warning in make_plan(spec, quad_machine()).warnings
    )
    trusting = with_values(spec, {"model.trust_remote_code": "true"})
    assert fact in make_plan(trusting, quad_machine()).warnings
