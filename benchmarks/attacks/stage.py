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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
COMMAND_S = 120.0
"""The longest time for most commands."""
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
_EACH = """
import json, os, signal, sys, tempfile
from so_tui.cli import main

for arguments in json.load(open(sys.argv[1])):
    with tempfile.TemporaryFile() as output:
        if not os.fork():
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(10 if arguments[0] == "watch" else 90)
            sys.exit(main(arguments))
        code = os.waitstatus_to_exitcode(os.wait()[1])
        output.seek(0)
        print(json.dumps([arguments, code, output.read().decode(errors="replace")]), flush=True)
print("told all")
"""
Word = str | Path
"""A part of a command."""
Content = str | bytes | Path | list[Any] | dict[str, Any] | None
"""What ``write`` writes."""


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

    @property
    def code(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it lives."""
        return self.process.poll()

    def end(self, limit_s: float = COMMAND_S) -> str:
        """Wait for its end, kill it if that does not come, and return what it wrote. Raises
        RuntimeError if the attack called it wrongly.
        """
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.text.startswith("usage:"):
            raise RuntimeError(f"the attack calls the command wrongly: {self.text[-200:]}")
        return self.text

    def ready(self, word: str = "ready") -> Command:
        """Wait until it has written a word. Raises RuntimeError if that does not come."""
        if not self.wait(lambda: word in self.text, 20):
            raise RuntimeError(f"it wrote no {word!r}: {self.text[-300:]}")
        return self

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
        *argv: Word,
        umask: int = 0o022,
        group: int = 0,
        terminal: int | None = None,
        folder: Path = Path("/"),
        **changes: Any,
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
                env=user.environment(
                    **{"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | changes
                ),
                cwd=folder,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=file if terminal is None else terminal,
                stderr=subprocess.STDOUT if terminal is None else terminal,
                start_new_session=True,
            )
        return Command(process, output)

    def so_tui(self, *arguments: Word, **options: Any) -> Command:
        """Start ``so-tui`` as the owner."""
        return self.begin(
            self.owner, self.owner.interpreter, "-P", "-m", "so_tui", *arguments, **options
        )

    def said(self, *arguments: Word, limit_s: float = COMMAND_S, **options: Any) -> str:
        """Run ``so-tui`` as the owner to its end, and return what it wrote."""
        return self.so_tui(*arguments, **options).end(limit_s)

    def answered(self, model: Path) -> Command:
        """Let the owner ask a model, and wait for the end of it."""
        victim = self.so_tui("generate", model, "--prompt", "hello")
        victim.end()
        return victim

    def complaints(self, longest_s: float, *arguments: Word, **options: Any) -> list[str]:
        """Run ``so-tui`` on hostile input, and return what is wrong: a traceback, a signal that
        ended it, or a time of more than ``longest_s``.
        """
        began, victim = time.monotonic(), self.so_tui(*arguments, **options)
        said = victim.end(longest_s)
        killed = victim.code is None or victim.code < 0
        crashed = killed or any(word in said for word in ("Traceback", "panicked", "\0"))
        took_s = time.monotonic() - began
        shown = (
            f"{' '.join(map(str, arguments))[-100:]} ({victim.code}, {took_s:.0f} s): {said[-150:]}"
        )
        return [shown] if crashed else []

    def each(
        self, commands: Sequence[tuple[Word, ...]], *more: Word
    ) -> Iterator[tuple[list[str], int, str]]:
        """Run many commands of ``so-tui`` as the owner, in forks of one process, those that
        wait for a run for ten seconds. Yield each with its exit code and what it wrote.
        """
        given = json.dumps([[*command, *more] for command in commands], default=str)
        listed = write(self.folder / "commands", given)
        told = self.python(self.owner, _EACH, listed).end(COMMAND_S + 10 * len(commands))
        if "told all" not in told:
            raise RuntimeError(f"not every command was run: {told[-500:]}")
        for line in told.splitlines()[:-1]:
            arguments, exit_code, said = json.loads(line)
            yield arguments, exit_code, said

    def train(self, *arguments: Word, how: str = "--plain", **options: Any) -> Command:
        """Start a short run of the owner's."""
        settings = (word for setting in SHORT for word in ("--set", setting))
        given = ("run", "tiny", how, "--no-preflight", *settings, *arguments)
        return self.so_tui(*given, **options)

    def attacks(self, what: str, *arguments: Word) -> Command:
        """Start a part of ``benchmarks.attacks.attacker`` as the other user."""
        module = ("-P", "-m", "benchmarks.attacks.attacker", what)
        return self.begin(self.other, self.other.interpreter, *module, *arguments)

    def python(self, user: User, code: str, *arguments: Word) -> Command:
        """Start Python code as a user."""
        return self.begin(user, user.interpreter, "-P", "-c", code, *arguments)

    def shared(self, name: str, mode: int = 0o2770) -> Path:
        """Make a folder of the project, in which both can write."""
        folder = self.folder / name
        folder.mkdir()
        os.chown(folder, 0, PROJECT)
        folder.chmod(mode)
        return folder

    def writable(self, *paths: Path, access: str = "W_OK") -> list[str]:
        """Return which of these the other user can write, without the group of the project."""
        code = f"import os, sys; print(*[p for p in sys.argv[1:] if os.access(p, os.{access})])"
        return self.other.python(code, *map(str, paths)).stdout.split()

    def private(self, name: str, content: Content) -> Path:
        """Make a file that only the owner can read."""
        path = write(self.owner.home / name, content)
        path.chmod(0o600)
        self.owner.give(path)
        return path

    def foreign(self, name: str, files: Mapping[str, Content], user: User | None = None) -> Path:
        """Give the other user, or ``user``, a folder in ``scratch`` that everybody can read."""
        for each, content in files.items():
            write(self.scratch / name / each, content)
        return self.published(self.scratch / name, user)

    def _place(self, where: Path | str, user: User | None) -> Path:
        """Return a path in the owner's home, or in ``scratch`` for what is of the other user."""
        return (self.owner.home if user is self.owner else self.scratch) / where

    def link(self, path: Path, target: Path) -> Path:
        """Let the attacker make a link in a folder of the project."""
        path.symlink_to(target)
        os.chown(path, self.other.uid, PROJECT, follow_symlinks=False)
        return path

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

    def model(
        self, where: Path | str, user: User | None = None, label: str = "", **config: Any
    ) -> Path:
        """Make the folder of a model without weights, with code of its own if it has a label."""
        folder = self._place(where, user)
        shutil.copytree(self.ground.tokenizer, folder, dirs_exist_ok=True)
        tree = _toml(_ROOT / "presets/tiny.toml")["model"]["config"] | config
        if label:
            tree["model_type"] = "own"
            tree["auto_map"] = {"AutoConfig": "configuration_own.OwnConfig"}
            for name, lines in _CLASSES.items():
                (folder / f"{name}.py").write_text(self.code(label) + lines)
            names = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
            path = folder / "tokenizer_config.json"
            changed(path, auto_map=names, tokenizer_class="OwnTokenizer")
        write(folder / "config.json", tree)
        return self.published(folder, user)

    def preset(self, where: Path | str, user: User | None = None, **changes: Any) -> Path:
        """Write the embedded preset with changes: keys, and tables that are added to its own."""
        path = self._place(where, user)
        tree = _toml(_ROOT / "presets/tiny.toml")
        for key, value in changes.items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(tree))
        (user or self.other).give(path)
        return path

    def run_of(self, user: User, where: Path | str, **model: Any) -> Path:
        """Give a user a copy of a run that has finished, which everybody can read.

        Args:
            user: Its owner. The folder above it is made for the same user if it is missing.
            where: Its path, from the home of the owner or from ``scratch``.
            model: Other values of its spec's model.
        """
        folder = self._place(where, user)
        above = folder.parent
        if not above.exists():
            above.mkdir()
            user.give(above)
        shutil.copytree(self.ground.run, folder)
        if model:
            spec = read(folder / "spec.json")
            changed(folder / "spec.json", model=spec["model"] | model)
        return self.published(folder, user)

    def published(self, folder: Path, user: User | None = None) -> Path:
        """Give the other user, or ``user``, a folder that everybody can read."""
        (user or self.other).give(folder)
        for path in (folder, *folder.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        return folder

    def exported(
        self, where: Path | str = "model", user: User | None = None, template: str = ""
    ) -> Path:
        """Give the other user, or ``user``, an export that everybody can read, with a chat
        template.
        """
        folder = self._place(where, user)
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


def write(path: Path, content: Content) -> Path:
    """Write text, bytes or a tree for JSON, or make a link to a path, or a pipe for None, in the
    place of what is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(path)
    elif isinstance(content, Path):
        path.symlink_to(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content, default=str))
    return path


def changed(path: Path, **changes: Any) -> Path:
    """Change keys of a JSON file, or make one with them."""
    tree = read(path) if path.exists() else {}
    path.write_text(json.dumps(tree | changes, default=str))
    return path


def read(path: Path) -> Any:
    """Return what a JSON file holds."""
    return json.loads(path.read_text())


def cases(text: str) -> list[Any]:
    """Return what lines of JSON hold."""
    return [json.loads(line) for line in text.strip().splitlines()]


def open_to_all(*paths: Path) -> None:
    """Let everybody write files and folders, with all that is in them."""
    for above in paths:
        for path in (above, *above.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)


def _user(folder: Path, name: str, place: int) -> User:
    try:
        return users._user(folder, name, place)
    except pytest.skip.Exception as error:
        raise SkippedError(str(error)) from error


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
