"""``--quiet``, ``--verbose`` and NO_COLOR: what is printed, and where."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from so_tui.spec import InputError, Problem
from tests.support.commands import Call, in_a_process
from tests.support.hostile import IN_A_NAME, unsafe
from tests.support.machines import machine_json, superchips
from tests.support.make_run import write_run

COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


def test_quiet_leaves_the_result_and_errors(tmp_path: Path, call: Call) -> None:
    whole = call("plan tiny").out
    for line in ("plan tiny --quiet", "--quiet plan tiny"):
        assert whole.removeprefix(call(line).out).startswith("\nto run it: so-tui run tiny")
    run = write_run(tmp_path, steps=3, state="failed")
    full, quiet = (call(f"watch {run.path} --plain {option}") for option in ("", "-q"))
    assert (full.code, quiet.code, "step 3/" in full.out) == (1, 1, True)
    assert quiet.out.splitlines() == full.out.splitlines()[-2:], "how it ended, and what to do next"
    code, _, err = call("plan no-such-preset --quiet")
    assert (code, "no-such-preset" in err) == (2, True)
    done = in_a_process("fetch", "tiny", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "helpers say nothing"


def test_verbose_tells_on_stderr_what_is_decided_and_called(tmp_path: Path) -> None:
    file = tmp_path / f"{IN_A_NAME}.json"
    file.write_bytes(machine_json(superchips(2)))
    argv = ("plan", "tiny", "--machine", os.fspath(file))
    silent, verbose, refused = (
        in_a_process(*argv, env={**os.environ, "PYTHONUTF8": "1"})
        for argv in (argv, (*argv, "-v"), ("-v", "presets", "add", str(tmp_path / "absent")))
    )
    assert (silent.stdout, silent.stderr) == (verbose.stdout, "")
    said = dict(line.split(": ", 1) for line in verbose.stderr.splitlines())
    assert said["so_tui.machine.known"].startswith(f"machine file {tmp_path}")
    assert said["so_tui.commands.common"].startswith("preset tiny: built-in, ")
    assert unsafe(verbose.stderr) == set()
    assert refused.returncode == 2
    assert "-m so_tui_trainer.tools.describe_model" in refused.stderr


@pytest.mark.parametrize(
    "line", ["plan", "plan tiny", "run tiny --dry-run", "doctor", "inspect", "presets", "runs"]
)
def test_no_color_is_honoured(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(tmp_path))
    write_run(tmp_path, steps=3, state="failed")
    coloured = call(line).out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = call(line).out
    assert plain
    assert not COLOUR.search(plain)
    assert COLOUR.search(coloured) or not line.startswith(("plan", "run "))


def test_what_is_copied_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    line = "run tiny --dry-run --partition gh"
    launch, shown = json.loads(call(f"{line} --json").out), call(line).out
    assert launch["batch_script"] in shown
    assert shlex.join(launch["argv"]) in shown


@pytest.mark.parametrize("option", ["", "-q"])
def test_checks_are_said_as_they_begin_beside_what_scripts_read(
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
) -> None:
    said = []

    def answer(*_: object, **__: object) -> dict[str, object]:
        said.append(capsys.readouterr())
        raise InputError([Problem("gated", "model.id", "x", "m", "Ask.")])

    monkeypatch.setattr("so_tui.launch.checks.call_tool", answer)
    monkeypatch.setattr("so_tui.launch.checks.findings", lambda *_: ())
    assert call(f"run tiny --plain --runs-dir {tmp_path / 'runs'} {option}")[:2] == (2, "")
    ((out, err),) = said
    lines = [line for line in err.splitlines() if "checking" in line]
    assert (out, len(lines)) == ("", 0 if option else 3)
    assert option or ("files" in lines[0] and "model" in lines[-1])
