"""The reference of keys is generated from the types and up to date."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from docs.make_presets import PAGE, page
from so_tui.spec import RunSpec
from so_tui.spec.keys import field_index


@pytest.mark.repository
def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/make_presets.py"


def test_every_key_of_the_types_is_described() -> None:
    sections = {field.name: field.type for field in msgspec.structs.fields(RunSpec)}
    assert {info.path.split(".")[0] for info in field_index().values()} == set(sections)
    assert all(info.description.endswith(".") for info in field_index().values())


def test_the_spec_loads_nothing_heavy() -> None:
    heavy = ("textual", "rich", "torch", "transformers", "psutil", "tomli_w", "difflib")
    code = f"import sys, so_tui.spec; print(sorted(set({heavy}) & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
