"""The page of published chat templates is what they give, and every difference is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import chat_templates
from benchmarks.chat_templates import ROWS, UnavailableError

pytestmark = pytest.mark.system


def test_answers_of_published_templates_are_proven(tmp_path: Path) -> None:
    try:
        templates = chat_templates.templates(tmp_path)
    except UnavailableError as error:
        pytest.skip(f"TRL's wheel cannot be fetched: {error}")
    cells = chat_templates.judged(templates, chat_templates.opened_rows(tmp_path))
    assert len(cells) == 41 * len(ROWS) == 41 * 13
    assert {cell.verdict for cell in cells.values()} == {"proven", "split", "unproven", "refused"}
    assert chat_templates.problems(cells) == []
    assert chat_templates.page(cells) == chat_templates.PAGE.read_text(encoding="utf-8")
