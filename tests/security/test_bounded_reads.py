"""JSON that somebody else could have written is read through ``so_tui.trust.decoding``, which bounds its size and its nesting."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.python_path import ROOT

EXEMPT = {
    "so_tui/trust/decoding.py",
    "so_tui/plan/rates.py",
    "so_tui/launch/supervisor/host_check.py",
}
"""The decoder itself, a file of the package, and 4 KiB of a file in a folder that only the user can open."""
SOURCES = sorted(
    {*(ROOT / "so_tui").rglob("*.py"), *(ROOT / "trainer" / "so_tui_trainer").glob("*.py")}
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_json_is_decoded_with_bounds(path: Path) -> None:
    if str(path.relative_to(ROOT)) in EXEMPT:
        return
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert "msgspec.json.decode" not in calls
