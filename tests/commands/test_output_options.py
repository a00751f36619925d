"""``--quiet``, ``--verbose`` and NO_COLOR: what is printed, and where."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.spec import InputError, Problem
from tests.support.hostile import IN_A_NAME, unsafe
from tests.support.machines import machine_json, superchips
from tests.support.make_run import write_run

COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


def so_tui(*argv: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "so_tui", *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONUTF8": "1"}
    )
    assert done.returncode == status, done.stderr
    return done


def test_quiet_leaves_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny"]) == 0
    full = capsys.readouterr().out
    for argv in (["plan", "tiny", "--quiet"], ["--quiet", "plan", "tiny"]):
        assert main(argv) == 0
        assert full.removeprefix(capsys.readouterr().out).startswith("\nto run it: so-tui run tiny")


def test_quiet_progress_is_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, steps=3, state="failed")
    assert main(["watch", str(run.path), "--plain"]) == 1
    full = capsys.readouterr().out.splitlines()
    assert main(["watch", str(run.path), "--plain", "-q"]) == 1
    quiet = capsys.readouterr().out.splitlines()
    assert any("step 3/" in line for line in full)
    assert quiet == full[-2:], "how it ended, and what to do next"


def test_quiet_helpers_say_nothing() -> None:
    done = so_tui("fetch", "tiny", "-q")
    assert (done.stdout, done.stderr) == ("", "")


def test_errors_are_printed_however_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no-such-preset", "--quiet"]) == 2
    assert "no-such-preset" in capsys.readouterr().err


def test_verbose_tells_on_stderr_what_is_decided_and_called(tmp_path: Path) -> None:
    file = tmp_path / f"{IN_A_NAME}.json"
    file.write_bytes(machine_json(superchips(2)))
    argv = ("plan", "tiny", "--machine", os.fspath(file))
    silent, verbose = so_tui(*argv), so_tui(*argv, "--verbose")
    assert silent.stdout == verbose.stdout
    assert silent.stderr == ""
    said = dict(line.split(": ", 1) for line in verbose.stderr.splitlines())
    assert said["so_tui.machine.known"].startswith(f"machine file {tmp_path}")
    assert said["so_tui.commands.common"].startswith("preset tiny: built-in, ")
    assert unsafe(verbose.stderr) == set()
    refused = so_tui("-v", "presets", "add", str(tmp_path / "absent"), status=2)
    assert "-m so_tui_trainer.tools.describe_model" in refused.stderr


@pytest.mark.parametrize(
    "command", ["plan", "plan tiny", "run tiny --dry-run", "doctor", "inspect", "presets", "runs"]
)
def test_no_color_is_honoured(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(tmp_path))
    write_run(tmp_path, steps=3, state="failed")
    main(command.split())
    coloured = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(command.split())
    plain = capsys.readouterr().out
    assert plain
    assert not COLOUR.search(plain)
    if command.startswith(("plan", "run ")):
        assert COLOUR.search(coloured)


def test_what_is_copied_is_not_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    argv = ["run", "tiny", "--dry-run", "--partition", "gh"]
    assert main([*argv, "--json"]) == 0
    launch = json.loads(capsys.readouterr().out)
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert launch["batch_script"] in shown
    assert shlex.join(launch["argv"]) in shown


@pytest.mark.parametrize("quiet", [True, False])
def test_checks_are_said_as_they_begin_beside_what_scripts_read(
    quiet: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    gated = Problem("gated", "model.id", "x", "m", "Ask.")

    def answer(*_: object, **__: object) -> dict[str, object]:
        said.append(capsys.readouterr())
        raise InputError([gated])

    monkeypatch.setattr("so_tui.launch.checks.call_tool", answer)
    monkeypatch.setattr("so_tui.launch.checks.findings", lambda *_: ())
    argv = ["run", "tiny", "--plain", "--runs-dir", str(tmp_path / "runs")]
    assert main([*argv, "-q"] if quiet else argv) == 2
    (before,) = said
    assert before.out == ""
    lines = [line for line in before.err.splitlines() if "checking" in line]
    assert len(lines) == (0 if quiet else 3)
    assert quiet or ("files" in lines[0] and "model" in lines[-1])
    assert capsys.readouterr().out == ""
