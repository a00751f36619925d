"""Two users who share a machine, their folders, and the commands that they run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from tests.support import users
from tests.support.users import User

_ROOT = Path(__file__).parents[2]
PROJECT = 61_999
"""The number of a group of which both are members."""
SHORT = (
    "train.steps=4",
    "checkpoint.every_steps=2",
    "offload.mode=superoffload",
    "data.sequence_length=64",
    "train.micro_batch=1",
)
"""A run of seconds, of which most are the imports of its ranks."""
_POLL_S = 0.05
_CODE = """
import os, pathlib
name = f"{{os.getuid()}}-{{os.getpid()}}-{label}"
pathlib.Path({marks!r}, name).write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())
"""
"""What a hostile model's code does. Nobody can give a file to another user, so the owner of the
file is who ran it.
"""
_CLASSES = {
    "configuration_own": (
        "from transformers import Qwen3Config\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
    ),
    "tokenization_own": (
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    ),
}


class SkippedError(Exception):
    """An attack cannot be tried on this machine."""


@dataclass(frozen=True)
class Command:
    """A command that was started, with its output in a file."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        """Its output so far."""
        return self.output.read_text(errors="replace")

    def end(self, limit_s: float) -> str:
        """Wait for its end, kill it if that does not come, and return what it wrote."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.text

    def wait(self, come: Callable[[], object], limit_s: float) -> bool:
        """Wait until something has come, and return whether it did before the command ended."""
        deadline = time.monotonic() + limit_s
        while not (found := come()) and time.monotonic() < deadline:
            if self.process.poll() is not None:
                return bool(come())
            time.sleep(_POLL_S)
        return bool(found)


@dataclass
class Stage:
    """The users and their folders. Everything of it goes in the end."""

    folder: Path
    owner: User
    """Who is attacked."""
    other: User
    """Who attacks."""
    scratch: Path
    """Where everybody may create files and remove their own (mode 1777)."""
    marks: Path
    """Where hostile code tells who ran it."""
    ground: Ground
    _count: list[int] = field(default_factory=list)

    @property
    def rank(self) -> str:
        """What command lines of DeepSpeed's launcher and of ranks have; its group is the run."""
        return rf"--run\0({self.folder}[^\0]+)\0--attempt"

    def begin(
        self,
        user: User,
        *argv: str,
        umask: int = 0o022,
        group: int = 0,
        terminal: int | None = None,
        folder: Path = Path("/"),
        **changes: str,
    ) -> Command:
        """Start a command as a user, in a session of its own."""
        self._count.append(0)
        output = self.folder / f"output-{len(self._count)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                argv,
                user=user.uid,
                group=group or user.uid,
                extra_groups=[PROJECT],
                umask=umask,
                env=user.environment(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", **changes),
                cwd=folder,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=file if terminal is None else terminal,
                stderr=subprocess.STDOUT if terminal is None else terminal,
                start_new_session=True,
            )
        return Command(process, output)

    def so_tui(self, *arguments: str, **options: Any) -> Command:
        """Start ``so-tui`` as the owner."""
        return self.begin(
            self.owner, self.owner.interpreter, "-P", "-m", "so_tui", *arguments, **options
        )

    def train(self, *arguments: str, how: str = "--plain", **options: Any) -> Command:
        """Start a short run of the owner's."""
        settings = (word for setting in SHORT for word in ("--set", setting))
        given = ("run", "tiny", how, "--no-preflight", *settings, *arguments)
        return self.so_tui(*given, **options)

    def attacks(self, what: str, *arguments: object) -> Command:
        """Start a part of ``benchmarks.attacks.attacker`` as the other user."""
        module = ("-P", "-m", "benchmarks.attacks.attacker", what)
        return self.begin(self.other, self.other.interpreter, *module, *map(str, arguments))

    def shared(self, name: str, mode: int = 0o2770) -> Path:
        """Make a folder of the project, in which both can write."""
        folder = self.folder / name
        folder.mkdir()
        os.chown(folder, 0, PROJECT)
        folder.chmod(mode)
        return folder

    def planted(self, name: str) -> Path:
        """Let the attacker make a folder in the sticky one, which everybody can write."""
        folder = self.scratch / name
        folder.mkdir()
        self.other.give(folder)
        folder.chmod(0o777)
        return folder

    def ran(self, label: str) -> str:
        """Return which process of the owner ran the code with this label; empty if none did."""
        for path in self.marks.iterdir():
            if path.name.endswith(f"-{label}") and path.stat().st_uid == self.owner.uid:
                words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"the attacker's code ran as the owner in `{words[:90].strip()}`"
        return ""

    def code(self, label: str) -> str:
        """Return Python that tells who ran it."""
        return _CODE.format(label=label, marks=str(self.marks))

    def model(self, folder: Path, user: User, label: str = "", **config: Any) -> Path:
        """Make the folder of a model without weights, with code of its own if it has a label."""
        shutil.copytree(self.ground.tokenizer, folder, dirs_exist_ok=True)
        tree = _toml(_ROOT / "presets/tiny.toml")["model"]["config"] | config
        if label:
            tree["model_type"] = "own"
            tree["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
            for name, lines in _CLASSES.items():
                (folder / f"{name}.py").write_text(self.code(label) + lines)
            path = folder / "tokenizer_config.json"
            names = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
            own = {"auto_map": names, "tokenizer_class": "OwnTokenizer"}
            path.write_text(json.dumps(json.loads(path.read_text()) | own))
        (folder / "config.json").write_text(json.dumps(tree))
        user.give(folder)
        return folder

    def preset(self, path: Path, user: User, **changes: Any) -> Path:
        """Write the embedded preset with changes: keys, and tables that are added to its own."""
        tree = _toml(_ROOT / "presets/tiny.toml")
        for key, value in changes.items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(tree))
        user.give(path)
        return path

    def run_of(self, user: User, folder: Path) -> Path:
        """Give a user a copy of a run that has finished, which everybody can read."""
        shutil.copytree(self.ground.run, folder)
        return self.published(folder, user)

    def published(self, folder: Path, user: User) -> Path:
        """Give a user a folder that everybody can read."""
        user.give(folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        return folder

    def exported(self, folder: Path, user: User, template: str = "") -> Path:
        """Give a user an export that everybody can read, with a chat template."""
        shutil.copytree(self.ground.export, folder)
        if template:
            (folder / "chat_template.jinja").write_text(template)
        return self.published(folder, user)

    def slurm(self) -> tuple[str, Path]:
        """Return a PATH with a Slurm that only records, slowly, and where it writes a script."""
        record, bin_folder = self.scratch / "submitted", self.folder / "bin"
        bin_folder.mkdir()
        stubs = {
            "sbatch": f'sleep 1; for last; do :; done; [ -f "$last" ] || last=-\n'
            f'cat "$last" > {record}; echo 7',
            "scontrol": "echo 'ClusterName = here'",
            **dict.fromkeys(("squeue", "sacct", "scancel", "sinfo"), ":"),
        }
        for name, lines in stubs.items():
            path = bin_folder / name
            path.write_text(f"#!/bin/sh\n{lines}\n")
            path.chmod(0o755)
        return f"{bin_folder}:/usr/bin:/bin", record

    def processes(self, user: User, words: str = "") -> list[psutil.Process]:
        """Return a user's living processes whose command line has these words."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.uids().real == user.uid
                if mine and process.status() != "zombie" and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """Kill every process of both users."""
        for user in (self.owner, self.other):
            user.python("import os, signal; os.kill(-1, signal.SIGKILL)")


@dataclass
class Ground:
    """What is made once, by the owner, and copied: a run that has finished, and its export."""

    folder: Path
    owner: User

    @property
    def tokenizer(self) -> Path:
        return _ROOT / "presets" / "tiny"

    @cached_property
    def run(self) -> Path:
        """A run of four steps with two checkpoints."""
        settings = (word for setting in SHORT for word in ("--set", setting))
        given = ("run", "tiny", "--plain", "--no-preflight", *settings)
        runs = self.owner.home / "runs"
        done = self.owner.so_tui(*given, "--runs-dir", str(runs), timeout_s=240.0)
        if done.returncode:
            raise RuntimeError(f"the run to copy failed: {done.stdout[-300:]} {done.stderr[-300:]}")
        return next(path.parent for path in runs.glob("*/spec.json"))

    @cached_property
    def export(self) -> Path:
        """The model of that run."""
        done = self.owner.so_tui("export", str(self.run), timeout_s=240.0)
        if done.returncode:
            raise RuntimeError(f"the export to copy failed: {done.stderr[-300:]}")
        return self.run / "export"


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """Yield what attacks have in common. Raises SkippedError without two users."""
    if os.geteuid() != 0:
        raise SkippedError("only root can run processes of other users")
    folder = Path(tempfile.mkdtemp(prefix="so-tui-attacks-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield Ground(folder, _user(folder, "ann", 0))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def stage(common: Ground) -> Iterator[Stage]:
    """Yield two users with empty homes. Their files and processes go in the end."""
    folder = Path(tempfile.mkdtemp(prefix="so-tui-attack-", dir="/tmp"))
    folder.chmod(0o755)
    scratch, marks = folder / "scratch", folder / "marks"
    for path in (scratch, marks):
        path.mkdir()
        path.chmod(0o1777)
    made = Stage(folder, _user(folder, "ann", 0), _user(folder, "bob", 1), scratch, marks, common)
    try:
        yield made
    finally:
        made.kill_all()
        for path in (
            folder,
            *(Path(f"/tmp/so-tui-{user.uid}") for user in (made.owner, made.other)),
        ):
            shutil.rmtree(path, ignore_errors=True)


def _user(folder: Path, name: str, place: int) -> User:
    try:
        return users._user(folder, name, place)
    except pytest.skip.Exception as error:
        raise SkippedError(str(error)) from error


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
