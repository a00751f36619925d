"""What shells offer when TAB is pressed, tried in real ones."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from so_tui.folders import builtin_folder, default_runs_dir
from so_tui.machine.known import MACHINES
from so_tui.runs import create_run
from so_tui.spec import field_index, find_preset
from tests.support.hostile import IN_A_NAME
from tools.words import FILE, words

NOT_PLAIN = (
    *("$(touch made)", "`touch made`", "a;touch made", "*", "-rf", "--runs-dir=x", "two words"),
    *("it's", 'say "a"', "a&b", IN_A_NAME),
)
BUILT_IN = {path.stem for path in builtin_folder().glob("*.toml")}
Offers = Callable[..., list[set[str]]]
_READY = b"READY> "
_INSERT_ALL, _SAVE = "\x1b*", "\x0f"  # Alt-*, Ctrl-O
_SCRIPTS = Path(__file__).parents[1] / "data" / "shells"


def command_lines(
    shell: str, lines: Sequence[str], folder: Path, cwd: Path, environment: Mapping[str, str]
) -> list[str]:
    """Return each line after the shell has inserted all words that it offers."""
    typed = folder / "typed"
    typed.touch()
    options = ["--rcfile", str(_SCRIPTS / "bashrc")] if shell == "bash" else ["--no-globalrcs"]
    argv = [shell, *options, "-i"]
    own = {"TERM": "dumb", "TYPED": str(typed), "ZDOTDIR": str(_SCRIPTS)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(argv[0], argv, {**environment, **own})
    end, seen = time.monotonic() + 60, b""

    def read() -> bytes:
        assert time.monotonic() < end, seen
        return os.read(terminal, 65_536) if select.select([terminal], [], [], 0.05)[0] else b""

    try:
        while _READY not in seen:
            seen += read()
        os.write(terminal, "".join(f"{line}{_INSERT_ALL}{_SAVE}" for line in lines).encode())
        while len(left := typed.read_text(errors="surrogateescape").split("\0")[:-1]) < len(lines):
            seen += read()  # or the shell would wait for room to write
        return left
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "user" / "cwd").mkdir(parents=True)
    return tmp_path / "user" / "cwd"


@pytest.fixture(params=["bash", "zsh", "fish"])
def offers(request: pytest.FixtureRequest, cwd: Path) -> Offers:
    """Press TAB after lines in a shell, and return the words that it offers, as it would insert
    them, in place of the last one of each.
    """
    shell, home = request.param, cwd.parent / "home"
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    home.mkdir()
    command = cwd.parent / "bin" / "so-tui"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m so_tui "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "HOME": str(home)}
    environment["PATH"] = f"{cwd.parent / 'bin'}:{os.environ['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

    def offered(*lines: str) -> list[set[str]]:
        if shell == "fish":
            argv = ["fish", "--no-config", str(_SCRIPTS / "offered.fish"), *lines]
            found = subprocess.check_output(
                argv, cwd=cwd, env=environment, text=True, errors="surrogateescape", timeout=60
            )
            return [set(line.split()) for line in found.splitlines()]
        left = command_lines(shell, lines, home, cwd, environment)
        return [
            set(after[len(before) - len(before.split(" ")[-1]) :].split())
            for before, after in zip(lines, left, strict=True)
        ]

    return offered


def test_commands_options_and_keys(offers: Offers) -> None:
    commands, plan, options, machines, keys, modes, switch, probes = offers(
        "so-tui ",
        "so-tui pl",
        "so-tui run tiny --d",
        "so-tui plan --machine gh200-",
        "so-tui plan tiny --set offload.",
        "so-tui plan tiny --set offload.mode=",
        "so-tui plan tiny --set data.packing=",
        "so-tui plan tiny --probe=",
    )
    assert {"plan", "run", "watch", "completion"} <= commands
    assert not commands & {"supervise", "--version"}
    assert plan == {"plan"}
    assert options == {"--dry-run", "--detach"}
    assert machines == {name for name in MACHINES if name.startswith("gh200-")}
    assert keys == {f"{key}=" for key in field_index() if key.startswith("offload.")}
    assert {mode.rpartition("=")[2] for mode in modes} == {*field_index()["offload.mode"].choices}
    assert {value.rpartition("=")[2] for value in switch} == {"true", "false"}
    assert {value.rpartition("=")[2] for value in probes} == {"random", "spec"}


def test_presets_runs_and_files(
    offers: Offers, cwd: Path, own_presets: Path, tmp_path: Path
) -> None:
    (own_presets / "file.toml").write_text(
        'title = "x"\nname = "mine"\nextends = "tiny"\n[model]\nname = "other"\n'
    )
    (own_presets / "short.toml").write_text('extends = "tiny"\n')
    spec = find_preset("tiny").spec
    here, recorded, elsewhere = (
        create_run(spec, folder) for folder in (None, tmp_path / "more", tmp_path / "elsewhere")
    )
    (default_runs_dir() / "no-run").mkdir()
    (cwd / "zeta.toml").touch()
    presets, files, runs, only = offers(
        "so-tui plan ",
        "so-tui plan zet",
        "so-tui watch ",
        f"so-tui logs --runs-dir {tmp_path / 'elsewhere'} ",
    )
    assert presets == {*BUILT_IN, "mine", "short"}
    assert files == {"zeta.toml"}
    assert runs == {"latest", here.name, recorded.name, elsewhere.name}
    assert only == {"latest", elsewhere.name}


def test_nothing_that_a_shell_would_expand_is_offered(
    offers: Offers, cwd: Path, own_presets: Path
) -> None:
    run = create_run(find_preset("tiny").spec)
    for number, name in enumerate(NOT_PLAIN):
        (own_presets / f"{number}.toml").write_text(f'name = "{name}"\n', errors="surrogateescape")
        shutil.copytree(run.path, default_runs_dir() / name)
        (cwd / name).touch()
    presets, runs, *_ = offers(
        "so-tui plan ",
        "so-tui watch ",
        "so-tui watch '$(to",
        "so-tui plan ./",
        "so-tui export --to ",
    )
    assert {name for name in presets if not name.isalnum()} <= BUILT_IN
    assert runs == {"latest", run.name}
    assert sorted(path.name for path in cwd.iterdir()) == sorted(NOT_PLAIN)


@pytest.mark.repository
def test_the_words_are_current() -> None:
    assert FILE.read_text() == words(), "run: python tools/words.py"


@pytest.mark.parametrize("line", ["so-tui plan --set off", "so-tui watch ", "so-tui plan "])
def test_a_shell_does_not_wait_long(line: str, tmp_path: Path) -> None:
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "offered")
    command = [sys.executable, "-X", "importtime", "-m", "so_tui"]
    before, runs = os.times(), 3
    for _ in range(runs):
        done = subprocess.run(
            command, env={**os.environ, **asked}, capture_output=True, text=True, check=True
        )
    after = os.times()
    assert (tmp_path / "offered").read_text()
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"msgspec", "rich", "textual", "torch"} & imported
    user_s, system_s = (after[at] - before[at] for at in (2, 3))  # of children
    assert (user_s + system_s) / runs < 0.2
