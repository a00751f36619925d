"""Nothing that other people wrote controls the terminal through a command's output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from so_tui.cli import main
from so_tui.launch import helper_jobs
from so_tui.launch.helper_jobs import DataPreview, Progress
from so_tui.spec import RunSpec, find_preset
from so_tui.validation import report as reports
from so_tui.validation.report import Report
from tests.support.hostile import HOSTILE, IN_A_NAME, SURROGATE, HostileWorld, hostile_world, unsafe

TESTS = Path(__file__).parents[1]
COMMANDS = (TESTS / "data" / "hostile_commands.txt").read_text().splitlines()
"""In capitals, what a test puts in their place."""
OF_RUNS = (
    *("runs", "watch", "stop", "resume", "logs", "export", "generate", "chat"),
    *("export-metrics", "compare", "note", "supervise"),
)
OWN_STYLING = re.compile(r"\x1b\[[0-9;]*m")

Call = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileWorld]:
    """The hostile texts, and one answer of the helper process for each question."""
    folder = tmp_path_factory.mktemp("hostile")
    answers: dict[bytes, list[Progress | DataPreview]] = {}
    preview_data = helper_jobs.preview_data

    def remembered(
        spec: RunSpec, rows: int, *, numbers: Sequence[int]
    ) -> Iterator[Progress | DataPreview]:
        asked = msgspec.json.encode((spec, rows, numbers))
        if asked not in answers:
            answers[asked] = list(preview_data(spec, rows, numbers=numbers))
        yield from answers[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setattr(helper_jobs, "preview_data", remembered)
        yield hostile_world(folder)


@pytest.fixture
def call(
    world: HostileWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Call a command in the hostile world, and return its output and its errors."""
    folder = world.runs_dir.parent
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    names = {
        "HOSTILE": HOSTILE,
        "NUL": "\0",
        "MACHINE": str(world.machine_file),
        "RUN": str(world.run.path),
        "REPORT": str(folder / "report"),
    }
    other = Report(so_tui=HOSTILE, begun=HOSTILE, host=HOSTILE, gpus=1, shape=HOSTILE, outcomes=())
    reports.write(folder / "report", other)

    def called(command: str) -> tuple[str, str]:
        argv = [
            re.sub("|".join(names), lambda found: names[found[0]], word) for word in command.split()
        ]
        where = ["--runs-dir", str(world.runs_dir)] if argv[0] in OF_RUNS else []
        with suppress(SystemExit):  # argparse ends so
            main([*argv, *where])
        return capsys.readouterr()

    return called


def test_every_command_is_tried() -> None:
    known = tomllib.loads((TESTS.parent / "so_tui/commands/commands.toml").read_text())["commands"]
    assert known.keys() == {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_print_only_printable_characters(command: str, call: Call) -> None:
    out, err = call(command)
    assert out or err
    assert unsafe(out) == unsafe(err) == set()
    forged = any(line.startswith("forged line") for line in out.splitlines())
    assert not forged or command.startswith(("data", "logs"))
    if "--json" in command and out:
        json.loads(out)


@pytest.mark.parametrize(
    "command",
    [
        *("presets", "plan hostile --machine MACHINE", "runs", "data hostile"),
        "run hostile --dry-run --machine MACHINE",
    ],
)
def test_only_so_tuis_own_colours_reach_a_terminal(
    command: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, _ = call(command)
    assert "\x1b[8m" not in out, "text that is not shown"
    assert OWN_STYLING.search(out), "colours are forced"
    assert unsafe(OWN_STYLING.sub("", out)) == set()


def test_json_and_toml_still_say_what_was_written(call: Call) -> None:
    title = tomllib.loads(call("presets hostile")[0])["title"]
    assert title == json.loads(call("presets hostile --json")[0])["title"]
    assert title == find_preset("hostile").spec.title
    (listed,) = json.loads(call("runs --json")[0])["runs"]
    assert (listed["name"], listed["reason"]) == (IN_A_NAME, HOSTILE)


def test_tracebacks_and_odd_bytes_are_printed_safely() -> None:
    code = (
        "import sys; from so_tui.trust.streams import guard_output; guard_output(); "
        "print(sys.argv[1]); raise OSError(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, HOSTILE + SURROGATE],
        capture_output=True,
        env={**os.environ, "PYTHONUTF8": "1"},
        cwd=TESTS.parent,
        check=False,
    )
    assert done.returncode == 1
    assert b"\\udc9b" in done.stdout
    assert b"OSError" in done.stderr
    assert unsafe(done.stdout.decode()) == unsafe(done.stderr.decode()) == set()
