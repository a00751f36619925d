"""Compiled and downloaded code, and locks of GPUs, are in the user's own folders."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from so_tui.launch.helper import ToolProcess
from so_tui.machine.software import code_folders
from tests.support.users import SharedMachine, User, host_folder_of

USE = """
import os
from so_tui.machine.software import code_folders, make_code_folders
environment = os.environ | code_folders(os.environ, several_hosts="SEVERAL_HOSTS" in os.environ)
environment |= make_code_folders(environment)
for name in code_folders({}):
    print(environment[name])
"""
LOCKS = "from so_tui.launch.supervisor.host_check import lock_folder; print(lock_folder())"
PRIVATE = 0o700


def use(
    machine: SharedMachine, changes: Mapping[str, str] | None = None, code: str = USE
) -> tuple[int, list[Path], str]:
    """Let the owner make and use the folders, with a lax umask: exit code, folders and errors."""
    user = machine.owner
    argv = (user.interpreter, "-P", "-c", code)
    done = user.run(*argv, timeout_s=60.0, umask=0o002, **(changes or {}))
    return done.returncode, [Path(line) for line in done.stdout.splitlines()], done.stderr


def rights(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_uid, stat.S_IMODE(found.st_mode)


def test_the_folders_are_private_whatever_the_umask(machine: SharedMachine) -> None:
    code, folders, errors = use(machine)
    assert code == 0, errors
    assert len(folders) == len(code_folders({"HOME": "/"}))
    for folder in folders:
        assert folder.is_relative_to(machine.owner.home)
        assert rights(folder) == (machine.owner.uid, PRIVATE)


def bait_of(user: User, machine: SharedMachine) -> Path:
    """Return a folder of a user that all can write."""
    bait = machine.scratch / "bait"
    bait.mkdir()
    bait.chmod(0o777)
    user.give(bait)
    return bait


@pytest.mark.parametrize("how", ["another's", "link to another's", "that all can write"])
def test_a_prepared_code_folder_is_not_used(machine: SharedMachine, how: str) -> None:
    user = machine.owner if how == "that all can write" else machine.other
    named = planted = bait_of(user, machine)
    if how.startswith("link"):
        named = machine.scratch / "link"
        named.symlink_to(planted)
    code, folders, errors = use(machine, dict.fromkeys(code_folders({"HOME": "/"}), str(named)))
    assert code == 0, errors
    assert named not in folders
    assert all(folder.is_relative_to(machine.owner.home) for folder in folders)
    assert list(planted.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_planted_code_folder_is_not_used(machine: SharedMachine, kind: str) -> None:
    """The owner's cache is on a scratch file system that all users share."""
    cache = machine.scratch / "cache" / "so-tui" / "compiled"
    cache.mkdir(parents=True)
    machine.owner.give(machine.scratch / "cache")
    bait = bait_of(machine.other, machine)
    if kind == "link":
        (cache / "triton").symlink_to(bait)
    else:
        bait.rename(cache / "triton")
    code, folders, errors = use(machine, {"XDG_CACHE_HOME": str(machine.scratch / "cache")})
    assert code == 0, errors
    elsewhere = [folder for folder in folders if not folder.is_relative_to(cache)]
    assert elsewhere == [host_folder_of(machine.owner) / "compiled" / "triton"]
    assert rights(elsewhere[0]) == (machine.owner.uid, PRIVATE)
    assert str(cache / "triton") in errors


PROJECT = 61_999
"""A group of several users."""


@pytest.mark.parametrize("how", ["made first", "group can write", "another's project"])
def test_code_is_not_kept_where_others_can_rename(machine: SharedMachine, how: str) -> None:
    """Whoever renames a folder above exchanges what is loaded from the private one in it."""
    above = machine.scratch / "cache"
    above.mkdir()
    (machine.other if how != "group can write" else machine.owner).give(above)
    if how != "made first":
        os.chown(above, -1, PROJECT)
    above.chmod({"made first": 0o777, "group can write": 0o775}.get(how, 0o2770))
    owner = replace(machine.owner, groups=(PROJECT,))
    code, folders, errors = use(
        replace(machine, owner=owner), {"XDG_CACHE_HOME": str(above), "CUDA_CACHE_PATH": "/"}
    )
    assert code == 0, errors
    assert all(folder.is_relative_to(host_folder_of(owner)) for folder in folders)
    assert {rights(folder) for folder in folders} == {(owner.uid, PRIVATE)}
    assert list(above.iterdir()) == []
    done = owner.so_tui("doctor", XDG_CACHE_HOME=str(above))
    assert "Others could exchange the folder of compiled code" in done.stdout
    assert str(above) in done.stdout


def test_a_cache_that_is_a_link_into_scratch_is_kept(machine: SharedMachine) -> None:
    target = machine.scratch / "ann"
    target.mkdir()
    (machine.owner.home / ".cache").symlink_to(target)
    machine.owner.give(target, machine.owner.home)
    code, folders, errors = use(machine)
    assert (code, errors) == (0, "")
    assert all(folder.resolve().is_relative_to(target) for folder in folders)


@pytest.mark.skipif(shutil.which("ccache") is None, reason="needs ccache")
@pytest.mark.parametrize("how", ["CCACHE_DIR", "CCACHE_REMOTE_STORAGE", "configuration"])
def test_no_compiler_takes_objects_from_a_shared_cache(machine: SharedMachine, how: str) -> None:
    """Debian's PATH and torch put ccache before the compiler; a site shares its cache."""
    shared = machine.scratch / "ccache"
    shared.mkdir()
    shared.chmod(0o777)
    variables = {"PATH": "/usr/lib/ccache:/usr/bin:/bin", "CCACHE_DIR": str(shared)}
    if how == "CCACHE_REMOTE_STORAGE":
        variables |= {how: f"file:{shared}", "CCACHE_DIR": str(machine.owner.home / "ccache")}
    ran = machine.scratch / "ran"
    if how == "configuration":
        compiler = machine.scratch / "c++"
        compiler.write_text(f"#!/bin/sh\ntouch {ran}\nexec g++ $*\n")
        compiler.chmod(0o755)
        (shared / "ccache.conf").write_text(f"path = {machine.scratch}\n")
    compiling = """
import os, subprocess, sys
from pathlib import Path
from so_tui.folders import UNCACHED_COMPILERS
from so_tui.machine.software import _compiler
assert _compiler()
os.environ |= UNCACHED_COMPILERS if sys.argv[1] == "uncached" else {}
source = Path(sys.argv[2])
subprocess.run(["c++", "-c", source.name, "-o", "out.o"], cwd=source.parent, check=True)
print(subprocess.run(["ccache", "-s", "-v"], capture_output=True, text=True).stdout)
"""
    folder = machine.owner.home / "source"
    folder.mkdir()
    source = folder / "source.cpp"
    source.write_text("int main() { return 0; }\n")
    machine.owner.give(folder)

    def compile_it(how: str) -> subprocess.CompletedProcess[str]:
        argv = (machine.owner.interpreter, "-P", "-c", compiling, how, str(source))
        return machine.owner.run(*argv, timeout_s=60.0, umask=0o022, **variables)

    for _ in range(2):
        done = compile_it("uncached")
        assert done.returncode == 0, done.stderr
        assert [path.name for path in shared.rglob("*") if path.is_file()] == (
            ["ccache.conf"] if how == "configuration" else []
        )
    assert not ran.exists()
    # Without the variables the shared cache is used: the attack is a real one.
    compile_it("cached")
    assert ran.exists() if how == "configuration" else list(shared.iterdir())


@pytest.fixture(params=[False, True], ids=["", "squatted"])
def squatted(request: pytest.FixtureRequest, machine: SharedMachine) -> Iterator[Path | None]:
    """The owner's usual folder in /tmp, if the other user has made it; else None."""
    usual = host_folder_of(machine.owner)
    if request.param:
        assert machine.other.run("mkdir", "-m", "777", str(usual)).returncode == 0
    yield usual if request.param else None
    left = list(usual.iterdir())
    shutil.rmtree(usual)
    assert not request.param or left == []


def test_a_squatted_folder_in_tmp_is_refused(squatted: Path | None, machine: SharedMachine) -> None:
    """Its owner could exchange the folders in it, whoever made those."""
    code, folders, errors = use(machine, {"SEVERAL_HOSTS": "1"})
    assert (code, "NotOwnError" in errors) == ((1, True) if squatted else (0, False)), errors
    in_tmp = [folder.is_relative_to(host_folder_of(machine.owner)) for folder in folders]
    assert any(in_tmp) != bool(squatted)


def test_gpu_locks_are_the_same_in_all_shells(
    squatted: Path | None, machine: SharedMachine
) -> None:
    """With XDG_RUNTIME_DIR and without it."""
    _, (folder,), _ = use(machine, code=LOCKS)
    _, (other,), _ = use(machine, {"XDG_RUNTIME_DIR": str(machine.owner.home)}, LOCKS)
    assert folder == other != squatted
    assert rights(folder) == (machine.owner.uid, PRIVATE)


def test_a_chosen_private_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert code_folders({"HOME": "/home/a"}).keys() == {
        *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        *("CUDA_CACHE_PATH", "NUMBA_CACHE_DIR", "HF_MODULES_CACHE"),
    }
    chosen = {"TRITON_CACHE_DIR": str(tmp_path), "HOME": "/home/a"}
    assert "TRITON_CACHE_DIR" not in code_folders(chosen)
    tmp_path.chmod(0o755)
    assert code_folders(chosen)["TRITON_CACHE_DIR"] == "/home/a/.cache/so-tui/compiled/triton"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir(mode=0o700)
    assert "TRITON_CACHE_DIR" in code_folders({**os.environ, "TRITON_CACHE_DIR": "here"})


OWN_KERNEL = """
import os, sys
from superoffload import kernel
os.chdir(sys.argv[1])
kernel.library()
"""


@pytest.mark.slow
def test_a_linker_takes_nothing_from_the_working_folder(machine: SharedMachine) -> None:
    """It looks there first for what a linker script names, such as that of ``libgcc_s.so``."""
    bait = bait_of(machine.other, machine)
    source, planted = bait / "planted.c", bait / "libgcc_s.so.1"
    source.write_text("__attribute__((constructor, used)) static void planted(void) {}")
    subprocess.run(["cc", "-c", "-fPIC", "-o", planted, source], check=True)
    machine.other.give(bait)
    user = machine.owner
    done = user.run(user.interpreter, "-P", "-c", OWN_KERNEL, str(bait), timeout_s=300.0)
    assert done.returncode == 0, done.stderr
    (kernel,) = (user.home / ".cache" / "so-tui" / "kernels").glob("*.so")
    assert b"planted" not in kernel.read_bytes()


@pytest.mark.parametrize("name", ["build_ops", "calibrate", "generate"])
def test_a_helper_that_compiles_works_in_no_folder_of_others(name: str) -> None:
    """Triton and DeepSpeed run compilers and linkers in the working folder."""
    with closing(ToolProcess(name)) as process:
        assert Path(f"/proc/{process._process.pid}/cwd").readlink() == Path("/")
