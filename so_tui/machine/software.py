"""Versions of what a run needs, found without importing any of it: package metadata, files, and programs that answer at once."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.tree import Tree
from so_tui.machine.types import NumaNode, Software

_PATIENCE_S = 5.0
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", re.MULTILINE)
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")


def read_software(tree: Tree, nodes: tuple[NumaNode, ...], allowed: tuple[int, ...], nvml_driver: str | None) -> Software:
    """Everything None for another machine's tree."""
    if not tree.live:
        return Software()
    return Software(
        python=platform.python_version(),
        torch=package_version("torch"),
        torch_cuda=_torch_cuda(),
        deepspeed=package_version("deepspeed"),
        transformers=package_version("transformers"),
        datasets=package_version("datasets"),
        flash_attn=package_version("flash-attn"),
        numactl=_numactl_version(),
        numactl_works=numactl_trial(*trial_place(nodes, allowed)),
        mempolicy_works=_mempolicy_works(),
        nvidia_driver=nvml_driver or _nvidia_driver(tree),
        cuda_toolkit=_cuda_toolkit(),
        compiler=_compiler(),
        ninja=package_version("ninja") or _first_version("ninja", "--version"),
    )


def package_version(name: str) -> str | None:
    """The installed distribution's version, from its metadata alone."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def trial_place(nodes: tuple[NumaNode, ...], allowed: tuple[int, ...]) -> tuple[int, str]:
    """A node with memory and the allowed CPUs on it, as numactl takes them."""
    for node in nodes:
        cpus = set(node.cpus) & set(allowed)
        if cpus and node.memory_total_bytes > 0:
            return node.id, cpu_ranges(cpus)
    return 0, cpu_ranges(allowed)


@functools.cache
def numactl_trial(node: int, cpus: str) -> bool:
    """Whether ``numactl -m NODE -C CPUS true`` works here; containers may forbid set_mempolicy."""
    return _run("numactl", "-m", str(node), "-C", cpus, "true") is not None


def _torch_cuda() -> str | None:
    """The CUDA version in torch's own version.py; None for a CPU build."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = _TORCH_CUDA.search(text)
    return match.group(1) if match else None


@functools.cache
def _numactl_version() -> str | None:
    """Releases before 2.0.17 have no --version, so the package manager is asked next."""
    if shutil.which("numactl") is None:
        return None
    asked = (("numactl", "--version"), ("dpkg-query", "-W", "-f", "${Version}", "numactl"), ("rpm", "-q", "numactl"))
    return next((version for command in asked if (version := _first_version(*command))), "installed")


def _mempolicy_works() -> bool | None:
    """Asks for the policy and changes none. get_mempolicy(2) has no wrapper in libc: its number is from asm/unistd_64.h."""
    import ctypes

    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if number is None:
        return None
    return bool(ctypes.CDLL(None).syscall(number, None, None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)) == 0)


@functools.cache
def _cuda_toolkit() -> str | None:
    """By CUDA_HOME or CUDA_PATH, else the nvcc on PATH, else the usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    match = re.search(r"release (\d+\.\d+)", _run(nvcc, "--version") or "")
    return match.group(1) if match else None


def _nvidia_driver(tree: Tree) -> str | None:
    match = _VERSION.search(tree.text("/proc/driver/nvidia/version") or "")
    return match.group() if match else None


@functools.cache
def _compiler() -> str | None:
    """The C++ compiler that builds CPU Adam, as torch's extension builder finds it."""
    name = os.environ.get("CXX") or "c++"
    answer = _run(name, "--version")
    return answer.splitlines()[0].strip() if answer else None


@functools.cache
def _first_version(*command: str) -> str | None:
    match = _VERSION.search(_run(*command) or "")
    return match.group() if match else None


def _run(*command: str) -> str | None:
    """What a program prints; None where it is missing, fails or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
