"""Nothing that other people wrote controls the terminal through a command's output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from so_tui.cli import main
from so_tui.commands.parser import build_parser
from so_tui.launch import helper_jobs
from so_tui.launch.helper_jobs import DataPreview, Progress
from so_tui.spec import RunSpec, find_preset
from so_tui.validation import report as reports
from so_tui.validation.report import Report
from tests.support.hostile import HOSTILE, IN_A_NAME, SURROGATE, HostileWorld, hostile_world, unsafe

COMMANDS: dict[str, list[list[str]]] = {
    "inspect": [["inspect"], ["inspect", "--json"], ["inspect", "--sysroot", HOSTILE]],
    "doctor": [
        ["doctor", "--machine", "MACHINE", "hostile"],
        ["doctor", "--machine", "MACHINE", "--json"],
        ["doctor", "--runs-dir", HOSTILE],
        ["doctor", "hostile", "--mpam"],
    ],
    "machines": [
        ["machines"],
        ["machines", "--json"],
        ["machines", HOSTILE],
        ["machines", HOSTILE, "--json"],
    ],
    "calibrate": [["calibrate", HOSTILE]],
    "validate": [
        ["validate", HOSTILE],
        ["validate", "--minutes", HOSTILE],
        ["validate", "--out", "REPORT"],
    ],
    "plan": [
        ["plan", "--machine", "MACHINE"],
        ["plan", "hostile", "--machine", "MACHINE"],
        ["plan", "hostile", "--machine", "MACHINE", "--json"],
        ["plan", "hostile", "--set", f"model.revision={HOSTILE}"],
        ["plan", "hostile", "--gpus", HOSTILE],
    ],
    "presets": [
        ["presets"],
        ["presets", "--json"],
        ["presets", "hostile"],
        ["presets", "hostile", "--json"],
        ["presets", HOSTILE],
        ["presets", "hostile", "--set", f"{HOSTILE}={HOSTILE}"],
        ["presets", "hostile", "--set", HOSTILE],
        ["presets", "add", HOSTILE],
    ],
    "data": [["data", "hostile"], ["data", "hostile", "--json"]],
    "fetch": [["fetch", HOSTILE]],
    "prepare": [["prepare", HOSTILE]],
    "run": [
        ["run", "hostile", "--dry-run", "--machine", "MACHINE"],
        ["run", "hostile", "--dry-run", "--machine", "MACHINE", "--json"],
        ["run", HOSTILE, "--plain"],
    ],
    "watch": [["watch", "RUN", "--plain"], ["watch", HOSTILE]],
    "runs": [["runs"], ["runs", "--json"]],
    "stop": [["stop", "RUN"], ["stop", HOSTILE]],
    "resume": [["resume", HOSTILE], ["resume", "RUN", "--set", f"train.steps={HOSTILE}"]],
    "logs": [["logs", "RUN"], ["logs", HOSTILE]],
    "export": [["export", HOSTILE]],
    "convert": [
        ["convert", HOSTILE, "--to", HOSTILE],
        ["convert", HOSTILE, "--as", "tiny"],
        ["convert", HOSTILE, "--as", HOSTILE],
    ],
    "generate": [
        ["generate", HOSTILE, "--prompt", "a"],
        ["generate", "RUN", "--prompt", "a", "--base", "\0" + HOSTILE],
    ],
    "chat": [["chat", HOSTILE], ["chat", "RUN"]],
    "export-metrics": [["export-metrics", HOSTILE], ["export-metrics", "RUN", "--to", HOSTILE]],
    "compare": [
        ["compare", "RUN", "RUN"],
        ["compare", "RUN", "RUN", "--json"],
        ["compare", "RUN", HOSTILE],
    ],
    "note": [
        ["note", "RUN", "--json"],
        ["note", HOSTILE],
        ["note", "RUN", "--text", HOSTILE],
        ["note", "RUN"],
        ["note", "RUN", "--tag", HOSTILE],
    ],
    "settings": [
        ["settings", HOSTILE],
        ["settings", f"{HOSTILE}={HOSTILE}"],
        ["settings", f"theme={HOSTILE}"],
    ],
    "completion": [["completion", "zsh"], ["completion", HOSTILE]],
    "supervise": [
        ["supervise", HOSTILE, "--attempt", "1"],
        ["supervise", "RUN", "--attempt", HOSTILE],
    ],
}
OWN_STYLING = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HostileWorld:
    """The hostile texts, written once."""
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        return hostile_world(folder)


@pytest.fixture(autouse=True)
def _presets_of_the_world(world: HostileWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(world.runs_dir.parent / "config"))


@pytest.fixture(scope="module")
def looked_at() -> dict[bytes, list[Progress | DataPreview]]:
    """What the helper process has said about data, by what was asked."""
    return {}


@pytest.fixture(autouse=True)
def _the_same_data_is_looked_at_once(
    looked_at: dict[bytes, list[Progress | DataPreview]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the helper process, which takes seconds, answer the same question once."""
    preview_data = helper_jobs.preview_data

    def remembered(spec: RunSpec, rows: int) -> Iterator[Progress | DataPreview]:
        asked = msgspec.json.encode((spec, rows))
        if asked not in looked_at:
            looked_at[asked] = list(preview_data(spec, rows))
        yield from looked_at[asked]

    monkeypatch.setattr(helper_jobs, "preview_data", remembered)


def called(
    argv: list[str], world: HostileWorld, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    names = {
        "MACHINE": str(world.machine_file),
        "RUN": str(world.run.path),
        "REPORT": str(world.runs_dir.parent / "report"),
    }
    if "REPORT" in argv:
        other = Report(
            so_tui=HOSTILE, begun=HOSTILE, host=HOSTILE, gpus=1, shape=HOSTILE, outcomes=()
        )
        reports.write(Path(names["REPORT"]), other)
    with_runs = "runs watch stop resume logs export generate chat export-metrics compare note"
    known = argv[0] in (*with_runs.split(), "supervise")
    where = ["--runs-dir", str(world.runs_dir)] if known else []
    with suppress(SystemExit):  # argparse ends so
        main([*(names.get(word, word) for word in argv), *where])
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_every_command_is_tried() -> None:
    actions = build_parser()._subparsers
    assert actions is not None
    known = {
        name
        for action in actions._group_actions
        if isinstance(action.choices, dict)
        for name in action.choices
    }
    assert known == set(COMMANDS)


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(argv, id=f"{argv[0]}-{i}")
        for argvs in COMMANDS.values()
        for i, argv in enumerate(argvs)
    ],
)
def test_commands_print_only_printable_characters(
    argv: list[str], world: HostileWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = called(argv, world, capsys)
    assert out or err
    assert unsafe(out) == set()
    assert unsafe(err) == set()
    assert not any(line.startswith("forged line") for line in out.splitlines()) or argv[0] in (
        "data",
        "logs",
    )
    if "--json" in argv and out:
        json.loads(out)


@pytest.mark.parametrize(
    "argv",
    [
        COMMANDS["presets"][0],
        COMMANDS["plan"][1],
        COMMANDS["run"][0],
        COMMANDS["runs"][0],
        COMMANDS["data"][0],
    ],
)
def test_only_so_tuis_own_colours_reach_a_terminal(
    argv: list[str],
    world: HostileWorld,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, _ = called(argv, world, capsys)
    assert "\x1b[8m" not in out, "text that is not shown"
    assert OWN_STYLING.search(out), "colours are forced"
    assert unsafe(OWN_STYLING.sub("", out)) == set()


def test_json_and_toml_still_say_what_was_written(
    world: HostileWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    title = find_preset("hostile").spec.title
    assert tomllib.loads(called(["presets", "hostile"], world, capsys)[0])["title"] == title
    assert json.loads(called(["presets", "hostile", "--json"], world, capsys)[0])["title"] == title
    (listed,) = json.loads(called(["runs", "--json"], world, capsys)[0])["runs"]
    assert (listed["name"], listed["reason"]) == (IN_A_NAME, HOSTILE)


def test_tracebacks_and_odd_bytes_are_printed_safely() -> None:
    code = (
        "import sys; from so_tui.trust.streams import guard_output; guard_output(); "
        "print(sys.argv[1]); raise OSError(sys.argv[1])"
    )
    argv = [sys.executable, "-c", code, HOSTILE + SURROGATE]
    done = subprocess.run(
        argv,
        capture_output=True,
        env={**os.environ, "PYTHONUTF8": "1"},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 1
    assert b"\\udc9b" in done.stdout
    assert b"OSError" in done.stderr
    assert unsafe(done.stdout.decode()) == unsafe(done.stderr.decode()) == set()
