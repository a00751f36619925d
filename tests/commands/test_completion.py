"""What shells offer when TAB is pressed, tried in real ones."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from so_tui.folders import builtin_folder, default_runs_dir, user_folder
from so_tui.machine.known import MACHINES
from so_tui.runs import create_run
from so_tui.spec import field_index, find_preset
from tests.support.hostile import IN_A_NAME
from tests.support.shells import install_command, offered
from tools.words import FILE, words

NOT_PLAIN = [
    "$(touch made)",
    "`touch made`",
    "a;touch made",
    "*",
    "-rf",
    "--runs-dir=x",
    "two words",
    "it's",
    'say "a"',
    "a&b",
    IN_A_NAME,
]
BUILT_IN = {path.stem for path in builtin_folder().glob("*.toml")}

shells = pytest.mark.parametrize(
    "shell",
    [
        pytest.param(
            shell,
            marks=pytest.mark.skipif(
                shutil.which(shell) is None, reason=f"{shell} is not installed"
            ),
        )
        for shell in ("bash", "zsh", "fish")
    ],
)


class Shell:
    """A shell of a user who has presets, runs and files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.cwd = folder / "cwd"
        self.cwd.mkdir()
        install_command(folder / "bin")

    def offers(self, shell: str, *lines: str) -> list[set[str]]:
        own = self._folder / shell
        own.mkdir()
        path = f"{self._folder / 'bin'}:{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            "HOME": str(own),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        return [set(found) for found in offered(shell, lines, own, self.cwd, environment)]


@pytest.fixture
def user(tmp_path: Path) -> Shell:
    folder = tmp_path / "user"
    folder.mkdir()
    return Shell(folder)


@shells
def test_commands_options_and_keys(shell: str, user: Shell) -> None:
    commands, plan, options, machines, keys, modes, switch, probes = user.offers(
        shell,
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


@shells
def test_presets_runs_and_files(shell: str, user: Shell, tmp_path: Path) -> None:
    user_folder().mkdir(parents=True)
    (user_folder() / "file.toml").write_text(
        'title = "x"\nname = "mine"\nextends = "tiny"\n[model]\nname = "other"\n'
    )
    (user_folder() / "short.toml").write_text('extends = "tiny"\n')
    spec = find_preset("tiny").spec
    here, recorded, elsewhere = (
        create_run(spec, folder) for folder in (None, tmp_path / "more", tmp_path / "elsewhere")
    )
    (default_runs_dir() / "no-run").mkdir()
    (user.cwd / "zeta.toml").touch()
    presets, files, runs, only = user.offers(
        shell,
        "so-tui plan ",
        "so-tui plan zet",
        "so-tui watch ",
        f"so-tui logs --runs-dir {tmp_path / 'elsewhere'} ",
    )
    assert presets == {*BUILT_IN, "mine", "short"}
    assert files == {"zeta.toml"}
    assert runs == {"latest", here.name, recorded.name, elsewhere.name}
    assert only == {"latest", elsewhere.name}


@shells
def test_nothing_that_a_shell_would_expand_is_offered(shell: str, user: Shell) -> None:
    user_folder().mkdir(parents=True)
    run = create_run(find_preset("tiny").spec)
    for number, name in enumerate(NOT_PLAIN):
        (user_folder() / f"{number}.toml").write_text(
            f'name = "{name}"\n', errors="surrogateescape"
        )
        shutil.copytree(run.path, default_runs_dir() / name)
        (user.cwd / name).touch()
    presets, runs, *_ = user.offers(
        shell,
        "so-tui plan ",
        "so-tui watch ",
        "so-tui watch '$(to",
        "so-tui plan ./",
        "so-tui export --to ",
    )
    assert {name for name in presets if not name.isalnum()} <= BUILT_IN
    assert runs == {"latest", run.name}
    assert sorted(path.name for path in user.cwd.iterdir()) == sorted(NOT_PLAIN)


@pytest.mark.repository
def test_the_words_are_current() -> None:
    assert FILE.read_text() == words(), "run: python tools/words.py"


@pytest.mark.parametrize("line", ["so-tui plan --set off", "so-tui watch ", "so-tui plan "])
def test_a_shell_does_not_wait_long(line: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
    }
    environment["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "offered")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    runs = 3
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "so_tui"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (tmp_path / "offered").read_text()
    assert not {"msgspec", "rich", "textual", "torch"} & {
        line.rpartition("|")[2].strip() for line in done.stderr.splitlines()
    }
    assert (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / runs < 0.2
