"""Compiles ``adam.cpp`` for this CPU. It takes seconds and happens once: the user's cache serves
nodes without a compiler, too.

Only a library that nobody else can have written is loaded, from a folder that nobody else can
write.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from superoffload.errors import OffloadError

# Folders and files that only this user can have written, because whoever writes compiled code
# decides what this user runs.


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _make_private(folder: Path) -> bool:
    """Make a folder that only this user can open, or check that an existing one is this user's own
    and take others' rights from it.

    Returns:
        Whether the folder can be used. A link, another user's folder and one that others can write
        cannot.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        own = _is_own(found, stat.S_IFDIR)
        if own and stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError:
        return False
    return own and os.access(folder, os.W_OK)


def _open_own(path: Path) -> int | None:
    """Open a file for reading if it is this user's own: a regular file, no link, and nobody else
    can write it.

    The open file is checked, so nobody can replace it between the check and its use through the
    descriptor.

    Returns:
        The descriptor, or None for any other file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if _is_own(os.fstat(descriptor), stat.S_IFREG):
        return descriptor
    os.close(descriptor)
    return None


def _is_own(found: os.stat_result, kind: int) -> bool:
    """Return whether a file is of a kind, belongs to this user, and no other user can write it."""
    return (
        stat.S_IFMT(found.st_mode) == kind
        and found.st_uid == os.geteuid()
        and not found.st_mode & _OTHERS_WRITE
    )


def _is_own_file(path: Path) -> bool:
    descriptor = _open_own(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


SOURCE = Path(__file__).with_name("adam.cpp")
HEADER = SOURCE.with_name("moments.h")
# No -ffast-math: a NaN must stay one. Without errno and traps, square roots and selects are
# vectorised. The source says what is fused.
FLAGS = (
    *(
        "-O3",
        "-march=native",
        "-std=c++17",
        "-fopenmp",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=off",
    ),
    *("-shared", "-fPIC"),
)


def library() -> Path:
    """Return the compiled library, compiling it if necessary. Without a compiler, return one that
    was compiled for this CPU before.

    Raises:
        OffloadError: If there is neither (``no-compiler``), the compiler fails
            (``compiler-failed``), or no folder can be used (``no-cache-folder``).
    """
    compiler, folder = _compiler(), _cache_folder()
    if not _make_private(folder):
        folder = _folder_of_this_process(folder)
    if compiler is None:
        return _cached(folder)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    path = folder / f"adam-{_cpu_key()}-{_digest(compiler, version.stdout)}.so"
    if not _is_own_file(path):
        if os.path.lexists(path):
            warnings.warn(
                f"{path} is a link, belongs to another user or can be written by others; it is "
                "compiled anew",
                stacklevel=2,
            )
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / path.name
            done = subprocess.run(
                [compiler, *FLAGS, "-o", str(built), str(SOURCE)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise OffloadError(
                    f"{compiler} could not compile the CPU Adam kernel:\n"
                    f"{done.stderr.strip()[-2000:]}",
                    code="compiler-failed",
                )
            built.chmod(0o700)  # the umask of many sites lets the group write
            built.replace(
                path
            )  # atomic, so that ranks which compile at the same time do not disturb each other
    return path


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a compiled library to be loaded as ``loadable(descriptor)``, by this process or one that
    inherits the descriptor.

    Raises:
        OffloadError: Somebody else can have written it (``kernel-not-own``).
    """
    descriptor = _open_own(path)
    if descriptor is None:
        raise OffloadError(
            f"{path} is missing, a link, belongs to another user or can be written by others, so "
            f"it is not loaded. Remove it, and see who can write {path.parent}.",
            code="kernel-not-own",
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def loadable(descriptor: int) -> str:
    """Return a path by which a process that has this descriptor open loads exactly that file, even
    if another file has its name by then.
    """
    return f"/proc/self/fd/{descriptor}"


def _cache_folder() -> Path:
    """Return the folder for compiled kernels in the user's XDG cache. The doctor looks for them
    there, too.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (
        (base if base.is_absolute() else Path(os.environ.get("HOME") or Path.home()) / ".cache")
        / "so-tui"
        / "kernels"
    )


def _compiler() -> str | None:
    return next(
        (
            name
            for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++")
            if name and shutil.which(name)
        ),
        None,
    )


def _cached(folder: Path) -> Path:
    cached = sorted(path for path in folder.glob(f"adam-{_cpu_key()}-*.so") if _is_own_file(path))
    if not cached:
        raise OffloadError(
            "The CPU Adam kernel needs a C++ compiler with OpenMP (g++ or clang++; set CXX to "
            f"choose one). None was found, and {folder} has no kernel compiled for this CPU. Run "
            "`so-tui doctor --fix` on a machine with the same CPU and a compiler.",
            code="no-compiler",
        )
    return cached[-1]


@cache
def _folder_of_this_process(unusable: Path) -> Path:
    """Make a folder that only this user can open, and that is removed when this process ends."""
    try:
        # A name that others cannot predict and take first.
        made = Path(tempfile.mkdtemp(prefix="so-tui-kernels-"))
    except OSError as error:
        raise OffloadError(
            f"There is no folder of your own for the compiled CPU Adam kernel: {unusable} cannot "
            f"be used, and {error}. Set XDG_CACHE_HOME.",
            code="no-cache-folder",
        ) from error
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    warnings.warn(
        f"{unusable} cannot be written, or others can write it, so the CPU Adam kernel is "
        "compiled for this process only. Make it a folder of your own (mode 0700), or set "
        "XDG_CACHE_HOME.",
        stacklevel=3,
    )
    return made


def _cpu_key() -> str:
    """Return a key for the source, the flags and this CPU's instructions, since a home folder may
    serve different machines.
    """
    return _digest(
        SOURCE.read_text(), HEADER.read_text(), *FLAGS, platform.machine(), _instructions()
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _instructions() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
