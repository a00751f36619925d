"""Compiles ``adam.cpp`` for this CPU. It takes seconds and happens once: the user's cache serves
nodes without a compiler, too.

Only a library that nobody else can have written is loaded, from a folder that nobody else can
write.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from so_tui.folders import UNCACHED_COMPILERS, host_folder, kernel_folder
from so_tui.trust.files import distrust_of_file, open_own
from so_tui.trust.folders import code_folder
from superoffload.errors import OffloadError

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
    if compiler is None:
        return _cached(folder)
    uncached = {**os.environ, **UNCACHED_COMPILERS}
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False, env=uncached
    )
    path = folder / f"adam-{_cpu_key()}-{_digest(compiler, version.stdout)}.so"
    if distrust_of_file(path) is not None:
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
                env=uncached,
                cwd=scratch,  # where linkers look first for what they link
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
    try:
        descriptor = open_own(path)
    except OSError as error:
        raise OffloadError(
            f"{path} is missing, a link, belongs to another user or can be written by others, so "
            f"it is not loaded. Remove it, and see who can write {path.parent}.",
            code="kernel-not-own",
        ) from error
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
    """Make the folder for compiled kernels: in the user's XDG cache, where the doctor looks for
    them, too, or one of this host alone if others could exchange that.
    """
    try:
        return code_folder(kernel_folder(os.environ), "kernels", host_folder())
    except OSError as error:
        raise OffloadError(
            f"There is no folder of your own for the compiled CPU Adam kernel: {error}. Set "
            "XDG_CACHE_HOME.",
            code="no-cache-folder",
        ) from error


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
    found = folder.glob(f"adam-{_cpu_key()}-*.so")
    cached = sorted(path for path in found if distrust_of_file(path) is None)
    if not cached:
        raise OffloadError(
            "The CPU Adam kernel needs a C++ compiler with OpenMP (g++ or clang++; set CXX to "
            f"choose one). None was found, and {folder} has no kernel compiled for this CPU. Run "
            "`so-tui doctor --fix` on a machine with the same CPU and a compiler.",
            code="no-compiler",
        )
    return cached[-1]


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
