"""Adding a model from the Presets screen."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from so_tui.spec import SoTuiError, find_preset
from so_tui.ui.dialogs import AskText
from tests.support.held_threads import LateThreads
from tests.support.screen import Driver, opened

SLOW_S = 60


def answer(_: str, request: dict[str, Any], **__: object) -> Any:
    """Do here what a helper process does, which imports what it needs for several seconds."""
    from so_tui_trainer.tools.describe_model import describe

    return json.loads(json.dumps(list(describe(request))[-1]))


def asked(ui: Driver) -> bool:
    return isinstance(ui.screen, AskText)


async def test_a_model_is_added_and_selected(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("so_tui.launch.helper_jobs.call_tool", answer)
    model = tmp_path / "Small-Llama"
    model.mkdir()
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **counts}))
    async with opened(runs_dir, (80, 24)) as ui:
        table = await ui.presets()
        before = table.row_count
        await ui.press("a")
        await ui.type_text("owner")
        await ui.press("escape")
        await ui.until(lambda: not asked(ui))
        assert table.row_count == before
        await ui.press("a", "enter")
        await ui.until(lambda: "Type a hub id or a folder first" in ui.text())
        field = ui.find("#model", Input)
        field.value = absent = str(tmp_path / "absent")
        await ui.press("enter")
        await ui.until(lambda: "there is no such folder" in ui.shown("#said"), SLOW_S)
        assert "model.id =" not in ui.shown("#said"), "the field is in front of the reader"
        assert field.value == absent, "what was typed stays"
        field.value = str(model)
        await ui.press("enter")
        await ui.until(lambda: not asked(ui), SLOW_S)
        await ui.until(lambda: table.row_count == before + 1)
        assert find_preset("small-llama").spec.model.id == str(model)
        await ui.until(lambda: "Small Llama" in ui.shown("#detail-title"))


def refused(ui: Driver, model: str) -> bool:
    said = ui.shown("#said")
    return model in said and "reading" not in said


async def test_after_a_failure_the_next_name_is_taken_at_once(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []

    def describe(model: str, **_: object) -> None:
        named.append(model)
        raise ZeroDivisionError(model) if model == "broken" else SoTuiError(f"no {model}")

    monkeypatch.setattr("so_tui.launch.helper_jobs.describe_model", describe)
    async with opened(runs_dir) as ui:
        await ui.presets()
        await ui.press("a")
        threads = LateThreads()
        asyncio.get_running_loop().set_default_executor(threads)
        for model in ("first", "second", "broken"):
            await ui.type_text(model, replace=True)
            await ui.press("enter")
            if model == "broken":
                threads.release()
            await ui.until(partial(refused, ui, model))
        assert "ZeroDivisionError" in ui.shown("#said")
    assert named == ["first", "second", "broken"]
