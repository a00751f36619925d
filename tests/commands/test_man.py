"""The manual page is current, and no formatter of such pages finds fault with it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from docs.make_man import PAGE, page


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def told(*argv: str) -> tuple[str, str]:
    done = subprocess.run(
        [*argv, str(PAGE)], capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout, done.stderr


@pytest.mark.repository
def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python docs/make_man.py"


@needs("groff")
def test_groff_finds_no_fault() -> None:
    shown, faults = told("groff", "-man", "-ww", "-Tascii", "-P-cbou")
    assert faults == ""
    assert "so-tui run [options] PRESET|FILE" in shown
    assert "--dry-run" in shown


@needs("mandoc")
def test_mandoc_finds_no_fault() -> None:
    lint, _ = told("mandoc", "-T", "lint", "-W", "warning")
    assert [line for line in lint.splitlines() if "missing date" not in line] == [], (
        "a date would need to be renewed"
    )
