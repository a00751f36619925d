"""Adding a model from the Presets screen, with the real helper process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_screens import opened, presets_ready, screen_text, until
from textual.widgets import Input

from so_tui.spec import find_preset
from so_tui.ui.screens.add_model import AddModel


async def test_a_model_is_added_and_selected(runs_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "Small-Llama"
    model.mkdir()
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    async with opened(runs_dir, (80, 24)) as pilot:
        table = await presets_ready(pilot)
        before = table.row_count
        await pilot.press("a", "enter")
        assert "Type a hub id or a folder first" in screen_text(pilot)
        field = pilot.app.screen.query_one("#model", Input)
        field.value = str(tmp_path / "absent")
        await pilot.press("enter")
        await until(pilot, lambda: "there is no such folder" in " ".join(screen_text(pilot).split()), 60)
        assert field.value == str(tmp_path / "absent"), "what was typed stays"
        field.value = str(model)
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(pilot.app.screen, AddModel), 60)
        await until(pilot, lambda: table.row_count == before + 1)
        assert find_preset("small-llama").spec.model.id == str(model)
        await until(pilot, lambda: "Small Llama" in str(pilot.app.screen.query_one("#detail-title").render()))


async def test_leaving_the_dialog_adds_nothing(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        table = await presets_ready(pilot)
        before = table.row_count
        await pilot.press("a", *"owner", "escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, AddModel))
        assert table.row_count == before
