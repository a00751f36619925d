"""Two users without privileges who share a machine, for what one may make the other do.

They need no accounts, but only root can start their processes: else tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_FIRST_UID = 61_000
"""Above the numbers that systems give to accounts, below those of containers."""


@dataclass(frozen=True)
class User:
    """A user, and a home folder that only this user can open."""

    name: str
    uid: int
    home: Path
    interpreter: str
    """A Python that this user can start."""
    python_path: str
    """Where it finds so-tui and its dependencies."""
    groups: tuple[int, ...] = ()
    """Further groups. The own group of a user has the user's number."""

    def environment(self, **changes: str) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": self.python_path,
            **changes,
        }

    def start(self, *argv: str, umask: int = 0o022, **changes: str) -> subprocess.Popen[str]:
        """Start a command as this user, in a changed environment, with its output in pipes."""
        return subprocess.Popen(
            argv,
            user=self.uid,
            group=self.uid,
            extra_groups=self.groups,
            umask=umask,
            env=self.environment(**changes),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *argv: str, timeout_s: float = 60.0, umask: int = 0o022, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        with self.start(*argv, umask=umask, **changes) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def so_tui(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``so-tui`` as this user to its end, with the options of ``run``."""
        return self.run(self.interpreter, "-P", "-m", "so_tui", *arguments, **options)

    def python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.interpreter, "-P", "-c", code, *arguments)

    def give(self, *paths: Path) -> None:
        """Make files and folders, with all that is in them, belong to this user."""
        for path in paths:
            for found in (path, *path.rglob("*")):
                os.chown(found, self.uid, self.uid, follow_symlinks=False)


@dataclass(frozen=True)
class SharedMachine:
    """Two users and a folder that both can write, such as a scratch file system."""

    owner: User
    other: User
    scratch: Path
    """Everyone may create files here, and only their owner may remove them (mode 1777)."""


def host_folder_of(user: User) -> Path:
    """Return the folder in which a user's so-tui keeps what belongs to one host."""
    return Path(f"/tmp/so-tui-{user.uid}")


@pytest.fixture
def machine() -> Iterator[SharedMachine]:
    """Yield two users with empty homes, whose traces and processes go. Skips unless root."""
    if os.geteuid() != 0:
        pytest.skip("only root can run processes of other users")
    folder = Path(tempfile.mkdtemp(prefix="so-tui-users-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        owner, other = _user(folder, "ann", 0), _user(folder, "bob", 1)
        scratch = folder / "scratch"
        scratch.mkdir()
        scratch.chmod(0o1777)
        yield SharedMachine(owner, other, scratch)
        for user in (owner, other):
            # A process may signal all processes of its own user.
            user.python("import os, signal; os.kill(-1, signal.SIGKILL)")
            shutil.rmtree(host_folder_of(user), ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user(folder: Path, name: str, place: int) -> User:
    uid = _FIRST_UID + 2 * (os.getpid() % 1000) + place
    home = folder / name
    home.mkdir(mode=0o700)
    os.chown(home, uid, uid)
    # This interpreter, or the system's: a home folder may hide the first.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for interpreter in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        user = User(name, uid, home, interpreter, _python_path())
        with suppress(OSError):
            if user.python("import so_tui.cli, msgspec, textual").returncode == 0:
                return user
    pytest.skip(
        f"other users can read neither {sys.executable} nor another Python of this version, or "
        "not the checkout"
    )


def _python_path() -> str:
    """Return where this interpreter finds modules, but for Python's own library."""
    library = Path(os.__file__).parent
    return os.pathsep.join(
        path
        for path in sys.path
        if path and library not in (Path(path), Path(path).parent) and not path.endswith(".zip")
    )
