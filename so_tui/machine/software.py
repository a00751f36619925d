"""Find the versions of required software without importing it: from package metadata, files and
quick commands.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from so_tui.folders import UNCACHED_COMPILERS, Environment, compiled_folder, host_folder
from so_tui.machine.host import cpu_ranges
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Cpus, Nodes, Software, version_numbers
from so_tui.trust.files import distrust_of_folder
from so_tui.trust.folders import code_folder, exchangeable_in
from so_tui.trust.text import quoted

# Folders from which torch, DeepSpeed, Triton, CUDA and transformers run code that was compiled or
# downloaded before.
#
# Whoever can write there decides what a run executes. Their defaults can be known to everyone
# (``/tmp/torchinductor_USER``), follow the umask, and sites set them to folders of a whole group.


EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_NAMES = {
    EXTENSIONS: "torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "HF_MODULES_CACHE": "huggingface_modules",
}
_WRITTEN_WHILE_TRAINING = frozenset(
    ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR")
)
"""Their programs expect a file system that shows every write at once, which a network's may not
do.
"""


def code_folders(environment: Environment, *, several_hosts: bool = False) -> dict[str, str]:
    """Return the variables to set, so that each of these folders is private to this user.

    A folder that the user chose stays if only this user can open it (mode 0700) and nobody else can
    exchange it: what is inside may have any mode then.

    Args:
        environment: What is set already.
        several_hosts: The processes run on several hosts, each of which gets folders of its own for
            what is compiled while they run.
    """
    shared = exchangeable_in(compiled_folder(environment)) is not None
    found = {}
    for name in _NAMES:
        if not _is_private(environment.get(name, "")):
            local = shared or (several_hosts and name in _WRITTEN_WHILE_TRAINING)
            folder = host_folder() / "compiled" if local else compiled_folder(environment)
            found[name] = str(folder / _last(name))
    return found


def extensions_folder(environment: Environment) -> str:
    """Return the folder in which a process with this environment finds and compiles extensions of
    torch.
    """
    return code_folders(environment).get(EXTENSIONS) or environment[EXTENSIONS]


def make_code_folders(environment: Environment) -> dict[str, str]:
    """Make the folders that an environment names, or check that existing ones are private. Call it
    right before they are used.

    Returns:
        The variables with the folders to use: those of this host where others could exchange the
        ones that are named.

    Raises:
        NotOwnError: Another user has made this user's folder of this host.
        OSError: One cannot be made.
    """
    return {
        name: str(code_folder(Path(folder), _last(name), host_folder()))
        for name in _NAMES
        if (folder := environment.get(name))
    }


def _last(name: str) -> str:
    # torch adds its version only to the name of its own default folder.
    return f"{_NAMES[name]}/{_torch()}" if name == EXTENSIONS else _NAMES[name]


def _is_private(folder: str) -> bool:
    path = Path(folder)
    return (
        path.is_absolute()
        and distrust_of_folder(path) is None
        and not stat.S_IMODE(path.lstat().st_mode) & 0o077
        and exchangeable_in(path) is None
    )


def _torch() -> str:
    """Return a name for what extensions are compiled against. The version tells CUDA's, too
    (``2.13.0+cu130``).
    """
    torch = (package_version("torch") or "none").replace("+", "-")
    return f"py{sys.version_info.major}{sys.version_info.minor}-torch{torch}"


INSTALL_TRAINING = (
    "Install so-tui's wheel with the extra `train`, or run `make install` in its checkout"
)
"""What to do where training packages are missing. Never a name for pip alone: anybody could
register it.
"""
_LOG = logging.getLogger(__name__)
_COMMAND_TIMEOUT_S = 5.0
_TORCH_BUILD = re.compile(r"^(cuda|hip)\b[^=]*=\s*['\"]([^'\"]+)", re.MULTILINE)
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")


def read_software(
    files: SystemFiles,
    nodes: Nodes,
    allowed: Cpus,
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
        numactl_works=_numactl_trial(nodes, allowed),
        mempolicy_works=_mempolicy_works(),
        nvidia_driver=nvml_driver or _version_in(files.text("/proc/driver/nvidia/version")),
        amd_driver=files.text("/sys/module/amdgpu/version") or None,
        cuda_toolkit=_cuda_toolkit(),
        compiler=_compiler(),
        ninja=package_version("ninja") or _version_in(output_of("ninja", "--version")),
    )


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution from its metadata; None if it is not
    installed.
    """
    from importlib import metadata  # it imports the email package, which most commands do without

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numactl_trial(nodes: Nodes, allowed: Cpus) -> bool:
    """Return whether ``numactl -m NODE -C CPUS true`` works here, on a node with memory; containers
    may forbid set_mempolicy.
    """
    trials = (
        (node.id, cpus)
        for node in nodes
        if (cpus := set(node.cpus) & set(allowed)) and node.memory_total_bytes > 0
    )
    node, cpus = next(trials, (0, set(allowed)))
    return output_of("numactl", "-m", str(node), "-C", cpu_ranges(cpus), "true") is not None


def torch_build() -> dict[str, str]:
    """Return the versions of ``cuda`` or of ``hip`` (ROCm) from torch's version.py; empty for a CPU
    build.
    """
    from importlib.util import find_spec

    spec = find_spec("torch")
    try:
        origin = Path(spec.origin or "") if spec else Path()
        return dict(_TORCH_BUILD.findall(origin.with_name("version.py").read_text()))
    except (OSError, ValueError):
        return {}


def _numactl_version() -> str | None:
    """Return the version of numactl. Releases before 2.0.17 have no --version, so the package
    manager is tried next.
    """
    if shutil.which("numactl") is None:
        return None
    asked = (
        ("numactl", "--version"),
        ("dpkg-query", "-W", "-f", "${Version}", "numactl"),
        ("rpm", "-q", "numactl"),
    )
    found = (_version_in(output_of(*command)) for command in asked)
    return next(filter(None, found), "installed")


def _mempolicy_works() -> bool | None:
    """Return whether get_mempolicy(2) succeeds. libc has no wrapper for it; the call number is from
    asm/unistd_64.h.
    """
    import ctypes

    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if number is None:
        return None
    none = ctypes.c_ulong(0)
    return bool(ctypes.CDLL(None).syscall(number, None, None, none, None, none) == 0)


def _cuda_toolkit() -> str | None:
    """Return the version of nvcc from CUDA_HOME or CUDA_PATH, else from PATH, else from the usual
    folder.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    _, _, release = (output_of(nvcc, "--version") or "").partition("release ")
    return _version_in(release)


def _compiler() -> str | None:
    """Return the C++ compiler for CPU Adam, found as torch's extension builder does."""
    answer = output_of(os.environ.get("CXX") or "c++", "--version")
    return answer.splitlines()[0].strip() if answer else None


def _version_in(text: str | None) -> str | None:
    match = _VERSION.search(text or "")
    return match.group() if match else None


@cache
def output_of(*command: str) -> str | None:
    """Return the output of a command; None if it is missing, fails or times out."""
    try:
        _LOG.info("calling %s", quoted(*command))
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **UNCACHED_COMPILERS},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


# Which versions of the training packages were tested, and how far each may go. Both are data:
# ``versions.toml``.


PATH = Path(__file__).with_name("versions.toml")
PACKAGES = ("torch", "deepspeed", "transformers", "datasets")
"""What a set consists of. The lock file of its name has everything else."""


class VersionSet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions that ``make test-system`` tests together."""

    name: str
    """That of its lock file."""
    torch: str
    deepspeed: str
    transformers: str
    datasets: str

    @property
    def versions(self) -> dict[str, str]:
        """The version of each of PACKAGES."""
        return {package: getattr(self, package) for package in PACKAGES}


class Bound(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The oldest and the newest version of a package that so-tui supports."""

    package: str
    oldest: str
    newest: str
    older: str
    """What an older version lacks."""
    limits: str = ""
    """What the older supported versions cannot do."""
    newer: str = ""
    """Why a newer version is refused; empty if it only was not tested."""

    def admits(self, version: str) -> bool:
        """Return whether a version lies within; of the newest, only as many numbers count as the
        bound has.
        """
        found, newest = version_numbers(version), version_numbers(self.newest)
        return version_numbers(self.oldest) <= found and found[: len(newest)] <= newest


class _Later(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of a package after that of the newest set."""

    package: str
    version: str
    tested: str = ""
    """What was tested with it, and everything else as in the newest set; empty if nothing was."""


class _Versions(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``versions.toml``."""

    sets: tuple[VersionSet, ...]
    """The tested sets, the oldest first."""
    later: tuple[_Later, ...]
    """Versions after those of the newest set."""
    bounds: tuple[Bound, ...]
    """Of Python and of each of PACKAGES."""

    def bound_of(self, package: str) -> Bound:
        """Return the bound of Python or of one of PACKAGES."""
        return next(bound for bound in self.bounds if bound.package == package)

    def set_of(self, software: Software) -> VersionSet | None:
        """Return the tested set that is installed; None if it is none. Builds of a version
        (``+cpu``, ``+cu130``) count as that version.
        """
        installed = {name: version_numbers(getattr(software, name)) for name in PACKAGES}
        found = (
            each
            for each in self.sets
            if installed == {name: version_numbers(each.versions[name]) for name in PACKAGES}
        )
        return next(found, None)

    def exceeded_by(self, software: Software) -> tuple[Bound, ...]:
        """Return the bounds that installed packages, and Python, exceed."""
        installed = [(bound, getattr(software, bound.package)) for bound in self.bounds]
        return tuple(bound for bound, version in installed if version and not bound.admits(version))


@cache
def known_versions() -> _Versions:
    """Return which versions were tested, and how far each may go."""
    return msgspec.toml.decode(PATH.read_bytes(), type=_Versions)
