"""Texts that the user changes in an editor."""

from __future__ import annotations

import pytest

from so_tui.cli import main
from so_tui.launch.slurm.script import edited
from so_tui.spec import SoTuiError


def test_what_the_editor_saves_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "false")
    monkeypatch.setenv("VISUAL", "sed -i 's/one hour/two hours/'")
    assert edited("#!/bin/bash\n# one hour\n") == "#!/bin/bash\n# two hours\n"


@pytest.mark.parametrize(
    "editor", ["false", "truncate -s 0", "rm", "/nowhere/editor", "'unbalanced"]
)
def test_failing_editor_ends_the_start(editor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", editor)
    with pytest.raises(SoTuiError, match="editor"):
        edited("#!/bin/bash\n")


def test_a_run_on_this_machine_has_no_script_to_edit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", "--edit"]) == 2
    assert "--partition" in capsys.readouterr().err


def test_an_interrupt_reaches_the_editor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vi, Ctrl-C ends typing. The terminal sends it to so-tui too."""
    monkeypatch.setenv("VISUAL", "sh -c 'kill -INT $PPID; echo typed > \"$0\"'")
    assert edited("#!/bin/bash\n") == "typed\n"
