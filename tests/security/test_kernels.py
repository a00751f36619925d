"""Compiled code that others could have written is never loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.users import SharedMachine, host_folder_of
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow

PLANTED = (
    '#include <stdio.h>\n__attribute__((constructor)) static void run(void) { puts("planted"); }\n'
)
LOAD = """
import ctypes, sys
from superoffload import kernel
path = kernel.library()
with kernel.opened(path) as descriptor:
    ctypes.CDLL(kernel.loadable(descriptor)).superoffload_step
print("loaded", path)
"""
LOAD_LATE = """
import ctypes, os, sys, time
from pathlib import Path
from superoffload import kernel
path = kernel.library()
with kernel.opened(path) as descriptor:
    print("checked", flush=True)
    while not (path.parent.with_name("moved")).exists() or not path.exists():
        time.sleep(0.01)
    assert os.stat(path).st_uid != os.getuid(), "the path leads to the other's file now"
    ctypes.CDLL(kernel.loadable(descriptor)).superoffload_step
print("loaded", flush=True)
"""
PLANT = """
import os, subprocess, sys
path, source, how = sys.argv[1:]
folder = os.path.dirname(path)
if how == "folder":
    os.rename(folder, os.path.join(os.path.dirname(folder), "moved"))
    os.mkdir(folder, 0o755)
else:
    os.unlink(path)
subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
os.chmod(path, 0o755)
"""


def kernel_in(folder: Path) -> Path:
    (path,) = folder.glob("adam-*.so")
    return path


def plant(machine: SharedMachine, path: Path, how: str = "file") -> None:
    """Let the other user replace the owner's kernel by a library that runs code when loaded."""
    source = machine.scratch / "planted.c"
    source.write_text(PLANTED)
    done = machine.other.python(PLANT, str(path), str(source), how)
    assert done.returncode == 0, done.stderr


def environment(machine: SharedMachine) -> dict[str, str]:
    """Name the owner's cache, and a compiler that does not optimise, as speed does not matter."""
    compiler = machine.scratch / "fast-compiler"
    if not compiler.exists():
        compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
        compiler.chmod(0o755)
    return {"XDG_CACHE_HOME": str(machine.scratch / "cache"), "CXX": str(compiler)}


def load(machine: SharedMachine, umask: int = 0o022) -> str:
    user = machine.owner
    done = user.run(
        user.interpreter, "-P", "-c", LOAD, umask=umask, timeout_s=LIMIT_S, **environment(machine)
    )
    assert done.returncode == 0, done.stderr
    assert "planted" not in done.stdout
    return done.stdout + done.stderr


@pytest.fixture
def folder(machine: SharedMachine) -> Path:
    """The owner's folder of kernels, below a cache that all users share."""
    cache = machine.scratch / "cache"
    cache.mkdir()
    machine.owner.give(cache)
    return cache / "so-tui" / "kernels"


@pytest.mark.parametrize("made_first", [False, True])
def test_a_kernel_in_a_writable_folder_is_not_used(
    machine: SharedMachine, folder: Path, made_first: bool
) -> None:
    load(machine)
    for path in (folder.parent.parent, folder.parent, folder):
        path.chmod(0o777)
    plant(machine, kernel_in(folder))
    if made_first:
        machine.other.give(machine.scratch / "cache")
    planted = sorted(folder.iterdir())
    output = load(machine)
    assert sorted(folder.iterdir()) == planted
    assert str(folder / "adam") not in output
    assert f"kept in {host_folder_of(machine.owner) / 'compiled' / 'kernels'}" in output


@pytest.mark.parametrize("name", ["file", "link", "the group's"])
def test_kernel_of_others_is_replaced(machine: SharedMachine, folder: Path, name: str) -> None:
    load(machine, umask=0o002)
    path = kernel_in(folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder, path)] == [0o700, 0o700]
    folder.parent.chmod(0o711)
    folder.chmod(0o777)
    if name == "the group's":
        path.chmod(0o720)
    else:
        plant(machine, path)
    if name == "link":
        path.symlink_to(path.rename(machine.scratch / "planted.so"))
    folder.chmod(0o700)
    assert "compiled anew" in load(machine)
    found = kernel_in(folder).lstat()
    assert stat.S_ISREG(found.st_mode)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (machine.owner.uid, 0o700)


def test_a_kernel_exchanged_after_the_check_is_not_loaded(
    machine: SharedMachine, folder: Path
) -> None:
    """The other user comes to hold the folder above the owner's, and exchanges the owner's."""
    load(machine)
    user = machine.owner
    argv = (user.interpreter, "-P", "-c", LOAD_LATE)
    with user.start(*argv, umask=0o022, **environment(machine)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "checked\n", process.communicate()[1]
        folder.parent.chmod(0o777)
        (name,) = os.listdir(folder)  # noqa: PTH208 - the name alone
        plant(machine, folder / name, "folder")
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "loaded\n"), err
