"""The Machine screen: the host as a tree, its software, and doctor's findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.screen import SIZES, opened


@pytest.mark.parametrize("size", SIZES)
async def test_the_tree_shows_what_belongs_together(runs_dir: Path, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as ui:
        await ui.press("5")
        await ui.until(lambda: "node 0" in ui.shown("#tree"))
        tree = ui.shown("#tree")
        for word in ("72 cores 216-287", "GPU 3", "node 28", "its own memory", "NVLink-C2C"):
            assert word in tree, word
        await ui.until(lambda: ui.app.findings is not None)
        assert "deepspeed 0.19.8" in ui.shown("#software")
