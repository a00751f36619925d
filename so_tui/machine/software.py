"""Find the versions of required software without importing it: from package metadata, files and quick commands."""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from so_tui.machine.cpulist import cpu_ranges
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import NumaNode, Software
from so_tui.trust.printable import quoted

INSTALL_TRAINING = (
    "Install so-tui's wheel with the extra `train`, or run `make install` in its checkout"
)
"""What to do where training packages are missing. Never a name for pip alone: anybody could register it."""
_LOG = logging.getLogger(__name__)
_COMMAND_TIMEOUT_S = 5.0
_TORCH_BUILD = re.compile(r"^(cuda|hip)\b[^=]*=\s*['\"]([^'\"]+)", re.MULTILINE)
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")


def read_software(
    files: SystemFiles,
    nodes: tuple[NumaNode, ...],
    allowed: tuple[int, ...],
    nvml_driver: str | None,
) -> Software:
    """Return the installed versions; all None for copied system files."""
    if not files.live:
        return Software()
    build = torch_build()
    return Software(
        python=platform.python_version(),
        torch=package_version("torch"),
        torch_cuda=build.get("cuda"),
        torch_rocm=build.get("hip"),
        deepspeed=package_version("deepspeed"),
        transformers=package_version("transformers"),
        datasets=package_version("datasets"),
        flash_attn=package_version("flash-attn"),
        flash_attn_3=package_version("flash_attn_3"),
        flash_attn_4=package_version("flash-attn-4"),
        numactl=_numactl_version(),
        numactl_works=numactl_trial(*trial_binding(nodes, allowed)),
        mempolicy_works=_mempolicy_works(),
        nvidia_driver=nvml_driver or _nvidia_driver(files),
        amd_driver=files.text("/sys/module/amdgpu/version"),
        cuda_toolkit=_cuda_toolkit(),
        compiler=_compiler(),
        ninja=package_version("ninja") or _first_version("ninja", "--version"),
    )


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution from its metadata; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def trial_binding(nodes: tuple[NumaNode, ...], allowed: tuple[int, ...]) -> tuple[int, str]:
    """Return a node with memory and its allowed CPUs, as arguments for numactl."""
    for node in nodes:
        cpus = set(node.cpus) & set(allowed)
        if cpus and node.memory_total_bytes > 0:
            return node.id, cpu_ranges(cpus)
    return 0, cpu_ranges(allowed)


@functools.cache
def numactl_trial(node: int, cpus: str) -> bool:
    """Return whether ``numactl -m NODE -C CPUS true`` works here; containers may forbid set_mempolicy."""
    return output_of("numactl", "-m", str(node), "-C", cpus, "true") is not None


def torch_build() -> dict[str, str]:
    """Return the versions of ``cuda`` or of ``hip`` (ROCm) from torch's version.py; empty for a CPU build."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return {}
    return dict(_TORCH_BUILD.findall(text))


@functools.cache
def _numactl_version() -> str | None:
    """Return the version of numactl. Releases before 2.0.17 have no --version, so the package manager is tried next."""
    if shutil.which("numactl") is None:
        return None
    asked = (
        ("numactl", "--version"),
        ("dpkg-query", "-W", "-f", "${Version}", "numactl"),
        ("rpm", "-q", "numactl"),
    )
    return next(
        (version for command in asked if (version := _first_version(*command))), "installed"
    )


def _mempolicy_works() -> bool | None:
    """Return whether get_mempolicy(2) succeeds. libc has no wrapper for it; the call number is from asm/unistd_64.h."""
    import ctypes

    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if number is None:
        return None
    return bool(
        ctypes.CDLL(None).syscall(number, None, None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
        == 0
    )


@functools.cache
def _cuda_toolkit() -> str | None:
    """Return the version of nvcc from CUDA_HOME or CUDA_PATH, else from PATH, else from the usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    match = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version") or "")
    return match.group(1) if match else None


def _nvidia_driver(files: SystemFiles) -> str | None:
    match = _VERSION.search(files.text("/proc/driver/nvidia/version") or "")
    return match.group() if match else None


@functools.cache
def _compiler() -> str | None:
    """Return the C++ compiler for CPU Adam, found as torch's extension builder does."""
    name = os.environ.get("CXX") or "c++"
    answer = output_of(name, "--version")
    return answer.splitlines()[0].strip() if answer else None


@functools.cache
def _first_version(*command: str) -> str | None:
    match = _VERSION.search(output_of(*command) or "")
    return match.group() if match else None


def output_of(*command: str) -> str | None:
    """Return the output of a command; None if it is missing, fails or times out."""
    try:
        _LOG.info("calling %s", quoted(*command))
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
