"""Commands offered for copying do in a shell what they say, whatever names people chose."""

from __future__ import annotations

import os
import re
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from so_tui.commands.common import chosen_options
from so_tui.launch.supervisor.ending import Outcome, outcome_text
from so_tui.runs.records import OutcomeCode
from so_tui.trust.text import so_tui_command
from tests.support.doctor import found, healthy, only
from tests.support.hostile import IN_A_NAME

INJECTION = "x; touch owned; $(touch owned) `touch owned` 'touch owned'"


@pytest.fixture(params=[INJECTION, "--to=/etc", IN_A_NAME])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def arguments_of(command: str, folder: Path) -> list[str]:
    shell = f"""{command.split()[0]}() {{ printf '%s\\0' "$@"; }}; {command}"""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["bash", "-c", shell], capture_output=True, cwd=folder, check=True)
    assert list(folder.iterdir()) == [], "nothing but the command ran"
    return [os.fsdecode(argument) for argument in done.stdout.split(b"\0")[:-1]]


def test_names_of_shared_memory_are_quoted(name: str, tmp_path: Path) -> None:
    left = f"/dev/shm/torch_4711_99_{name.replace('/', '|')}"
    (tmp_path / "t/dev/shm").mkdir(parents=True)
    with (tmp_path / "t" / left[1:]).open("wb") as file:
        file.truncate(40 << 20)
    finding = only(found(healthy(), {}, tmp_path / "t"))
    assert finding.evidence.isprintable()
    offered = re.search(r"`(rm .*)`", finding.remedy)
    assert offered
    assert arguments_of(offered[1], tmp_path / "shell") == [left]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_anothers_link_in_shared_memory_is_not_reported(tmp_path: Path) -> None:
    files = {"/home/me/large": "x" * (40 << 20), "/dev/shm/sem.mp-abc": "x"}
    assert found(healthy(), files, tmp_path) == ()
    link = tmp_path / "dev/shm" / f"torch_4711_99_{INJECTION.replace('/', '|')}"
    link.symlink_to(tmp_path / "home/me/large")
    os.chown(link, 61_000, 61_000, follow_symlinks=False)
    assert found(healthy(), {}, tmp_path) == ()


def test_the_name_of_a_failed_run_is_quoted_in_what_to_do_next(name: str, tmp_path: Path) -> None:
    _, suggestion = outcome_text(
        Outcome(state="failed", code=OutcomeCode.UNEXPECTED, exit_code=1), name
    )
    assert suggestion.isprintable()
    for verb in ("logs", "resume"):
        command = so_tui_command(verb, name)
        assert f"`{command}`" in suggestion
        words = arguments_of(command, tmp_path / "shell")
        assert [word for word in words if word != "--"] == [verb, name]


def test_the_command_of_a_plan_is_quoted(name: str, tmp_path: Path) -> None:
    change = f"model.revision={name}"
    options = chosen_options(Namespace(set=[change]))
    command = so_tui_command("run", name, *options)
    words = arguments_of(command, tmp_path / "shell")
    assert (words[0], words.count(name)) == ("run", 1)
    assert f"model.revision={name}" in words
    assert not name.startswith("-") or words[-2:] == ["--", name]
