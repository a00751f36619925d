"""Compiles ``adam.cpp`` for this CPU. It takes a second and happens once: the user's cache serves nodes without a compiler, too."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from superoffload.errors import OffloadError

SOURCE = Path(__file__).with_name("adam.cpp")
# No -ffast-math: a NaN must stay one. Without errno and traps, square roots and selects are vectorised.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def library() -> Path:
    """Return the compiled library, compiling it if necessary. Without a compiler, return one that was compiled for this CPU before.

    Raises:
        OffloadError: If there is neither (``no-compiler``), the compiler fails (``compiler-failed``), or no folder can be used
            (``no-cache-folder``).
    """
    compiler, folder = _compiler(), _usable_cache_folder()
    if compiler is None:
        return _cached(folder)
    path = folder / f"adam-{_cpu_key()}-{_compiler_key(compiler)}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / path.name
            done = subprocess.run([compiler, *FLAGS, "-o", str(built), str(SOURCE)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise OffloadError(
                    f"{compiler} could not compile the CPU Adam kernel:\n{done.stderr.strip()[-2000:]}", code="compiler-failed"
                )
            built.replace(path)  # atomic, so that ranks which compile at the same time do not disturb each other
    return path


def cache_folder() -> Path:
    """Return the folder for compiled kernels in the user's XDG cache. The doctor looks for them there, too."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path(os.environ.get("HOME") or Path.home()) / ".cache") / "so-tui" / "kernels"


def _compiler() -> str | None:
    return next((name for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name and shutil.which(name)), None)


def _cached(folder: Path) -> Path:
    cached = sorted(folder.glob(f"adam-{_cpu_key()}-*.so"))
    if not cached:
        raise OffloadError(
            "The CPU Adam kernel needs a C++ compiler with OpenMP (g++ or clang++; set CXX to choose one). None was found, and "
            f"{folder} has no kernel compiled for this CPU. Run `so-tui doctor --fix` on a machine with the same CPU and a compiler.",
            code="no-compiler",
        )
    return cached[-1]


def _usable_cache_folder() -> Path:
    """Return a folder that belongs to this user alone, because whoever can write there decides what the worker runs."""
    folders = (cache_folder(), Path(tempfile.gettempdir()) / f"so-tui-kernels-{os.getuid()}")
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    raise OffloadError(
        f"There is no folder of your own for the compiled CPU Adam kernel: neither {folders[0]} nor {folders[1]} can be used. "
        "Set XDG_CACHE_HOME.",
        code="no-cache-folder",
    )


def _cpu_key() -> str:
    """Return a key for the source, the flags and this CPU's instructions, since a home folder may serve different machines."""
    return _digest(SOURCE.read_text(), *FLAGS, platform.machine(), _instructions())


def _compiler_key(compiler: str) -> str:
    return _digest(compiler, subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _instructions() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
