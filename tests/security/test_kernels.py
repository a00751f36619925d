"""Compiled code that others could have written is never loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.users import SharedMachine
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow

PLANTED = '__attribute__((constructor)) static void run(void) { puts("planted"); }\n'
LOAD = """
import ctypes, sys
from superoffload import kernel
path = kernel.library()
with kernel.opened(path) as descriptor:
    ctypes.CDLL(kernel.loadable(descriptor)).superoffload_step
print("loaded", path)
"""


def plant(machine: SharedMachine, cache: Path) -> None:
    """Let the other user replace the owner's kernels by a library that runs code when loaded."""
    source = machine.scratch / "planted.c"
    source.write_text("#include <stdio.h>\n" + PLANTED)
    code = (
        "import glob, os, subprocess, sys\n"
        "source, folder = sys.argv[1:]\n"
        "for path in glob.glob(folder + '/adam-*.so'):\n"
        "    os.unlink(path)\n"
        "    subprocess.run(['gcc', '-shared', '-fPIC', '-o', path, source], check=True)\n"
        "    os.chmod(path, 0o755)\n"
        "    print(path)\n"
    )
    done = machine.other.python(code, str(source), str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stdout, "the attack needs something to replace"


def fast_compiler(machine: SharedMachine) -> str:
    """Return a compiler that does not optimise: the speed of a kernel does not matter here."""
    path = machine.scratch / "fast-compiler"
    if not path.exists():
        path.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
        path.chmod(0o755)
    return str(path)


def load(machine: SharedMachine, cache: Path, umask: int = 0o022) -> str:
    user = machine.owner
    python = (user.interpreter, "-P", "-c", LOAD)
    cxx = fast_compiler(machine)
    done = user.run(*python, umask=umask, XDG_CACHE_HOME=str(cache), CXX=cxx)
    assert done.returncode == 0, done.stderr
    assert "planted" not in done.stdout
    return done.stdout + done.stderr


def shared_cache(machine: SharedMachine) -> Path:
    cache = machine.scratch / "cache"
    cache.mkdir()
    machine.owner.give(cache)
    return cache


def test_a_kernel_in_a_writable_folder_is_not_used(machine: SharedMachine) -> None:
    cache = shared_cache(machine)
    load(machine, cache)
    folder = cache / "so-tui" / "kernels"
    for path in (cache, cache / "so-tui", folder):
        path.chmod(0o777)
    plant(machine, folder)
    output = load(machine, cache)
    assert str(folder / "adam") not in output
    assert "compiled for this process only" in output


@pytest.mark.parametrize("name", ["file", "link"])
def test_a_kernel_of_another_user_is_replaced(machine: SharedMachine, name: str) -> None:
    cache = shared_cache(machine)
    folder = cache / "so-tui" / "kernels"
    load(machine, cache)
    folder.chmod(0o777)
    plant(machine, folder)
    if name == "link":
        (planted,) = folder.glob("adam-*.so")
        planted.rename(machine.scratch / "planted.so")
        planted.symlink_to(machine.scratch / "planted.so")
    folder.chmod(0o700)
    assert "compiled anew" in load(machine, cache)
    (path,) = folder.glob("adam-*.so")
    found = path.lstat()
    assert stat.S_ISREG(found.st_mode)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (machine.owner.uid, 0o700)


def test_a_folder_that_another_user_made_first_is_not_used(machine: SharedMachine) -> None:
    folder = machine.scratch / "cache" / "so-tui" / "kernels"
    folder.mkdir(parents=True, mode=0o777)
    machine.other.give(machine.scratch / "cache")
    folder.chmod(0o777)
    assert "compiled for this process only" in load(machine, machine.scratch / "cache")
    assert list(folder.iterdir()) == []


def test_a_kernel_that_the_group_can_write_is_replaced(machine: SharedMachine) -> None:
    cache = shared_cache(machine)
    load(machine, cache, umask=0o002)
    (path,) = (cache / "so-tui" / "kernels").glob("adam-*.so")
    assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (
        0o700,
        0o700,
    )
    path.chmod(0o720)
    assert "compiled anew" in load(machine, cache)


def test_a_kernel_exchanged_after_the_check_is_not_loaded(machine: SharedMachine) -> None:
    """The other user holds the folder above the owner's, and exchanges the owner's."""
    cache = shared_cache(machine)
    load(machine, cache)
    (cache / "so-tui").chmod(0o777)
    race = """
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
    user, folder = machine.owner, cache / "so-tui" / "kernels"
    with user.start(
        user.interpreter, "-P", "-c", race, XDG_CACHE_HOME=str(cache), CXX=fast_compiler(machine)
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "checked\n", process.communicate()[1]
        (name,) = os.listdir(folder)  # noqa: PTH208 - the name alone
        source = machine.scratch / "planted.c"
        source.write_text("#include <stdio.h>\n" + PLANTED)
        code = (
            "import os, subprocess, sys\n"
            "folder, name, source = sys.argv[1:]\n"
            "os.rename(folder, os.path.join(os.path.dirname(folder), 'moved'))\n"
            "os.mkdir(folder, 0o755)\n"
            "subprocess.run(['gcc', '-shared', '-fPIC', '-o', os.path.join(folder, name), source], "
            "check=True)\n"
        )
        done = machine.other.python(code, str(folder), name, str(source))
        assert done.returncode == 0, done.stderr
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "loaded\n"), err
