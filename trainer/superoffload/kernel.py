"""Compiles ``adam.cpp`` for this CPU, once: a second of work, kept in the user's cache, also for nodes without a compiler."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from so_tui.spec.folders import kernel_folder
from superoffload.errors import OffloadError

SOURCE = Path(__file__).with_name("adam.cpp")
# No -ffast-math: a NaN must stay one. Without errno and traps, square roots and selects are vectorised.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def library() -> Path:
    """The compiled library; where there is no compiler, one that was kept for this CPU.

    Raises OffloadError when there is neither, or the compiler fails.
    """
    compiler, folder = _compiler(), _cache_folder()
    if compiler is None:
        return _kept(folder)
    path = folder / f"adam-{_of_this_cpu()}-{_made_by(compiler)}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / path.name
            done = subprocess.run([compiler, *FLAGS, "-o", str(built), str(SOURCE)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise OffloadError(f"{compiler} could not compile the CPU Adam kernel:\n{done.stderr.strip()[-2000:]}")
            built.replace(path)  # atomic, so ranks that compile at the same time do not disturb each other
    return path


def _compiler() -> str | None:
    return next((name for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name and shutil.which(name)), None)


def _kept(folder: Path) -> Path:
    kept = sorted(folder.glob(f"adam-{_of_this_cpu()}-*.so"))
    if not kept:
        raise OffloadError(
            "The CPU Adam kernel needs a C++ compiler with OpenMP (g++ or clang++; set CXX to choose one). None was found, and "
            f"{folder} keeps no kernel for this CPU: `so-tui doctor --fix` on a machine like it, with a compiler, puts one there."
        )
    return kept[-1]


def _cache_folder() -> Path:
    """Ours alone: whoever can write there decides what the worker runs. Raises OffloadError when there is no such place."""
    places = (kernel_folder(os.environ), Path(tempfile.gettempdir()) / f"so-tui-kernels-{os.getuid()}")
    for folder in places:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    raise OffloadError(
        f"No folder of your own to keep the compiled CPU Adam kernel in: tried {places[0]} and {places[1]}. Set XDG_CACHE_HOME."
    )


def _of_this_cpu() -> str:
    """Changes with the source, the flags and the instructions of this CPU (a home folder may serve different machines)."""
    return _digest(SOURCE.read_text(), *FLAGS, platform.machine(), _instructions())


def _made_by(compiler: str) -> str:
    return _digest(compiler, subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _instructions() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
