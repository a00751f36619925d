"""Folders from which torch, DeepSpeed, Triton, CUDA and transformers run code that was compiled or downloaded before.

Whoever can write there decides what a run executes. Their defaults can be known to everyone (``/tmp/torchinductor_USER``), follow the
umask, and sites set them to folders of a whole group.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from so_tui.folders import compiled_folder, host_folder
from so_tui.trust.ownership import distrust_of_folder, private_folder

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
"""Their programs expect a file system that shows every write at once, which a network's may not do."""


def code_folders(environment: Mapping[str, str], *, several_hosts: bool = False) -> dict[str, str]:
    """Return the variables to set, so that each of these folders is private to this user.

    A folder that the user chose stays if only this user can open it (mode 0700): what is inside may have any mode then.

    Args:
        environment: What is set already.
        several_hosts: The processes run on several hosts, each of which gets folders of its own for what is compiled while they run.
    """
    chosen = (name for name in _NAMES if not _is_private(environment.get(name, "")))
    return {
        name: str(
            _default(name, environment, local=several_hosts and name in _WRITTEN_WHILE_TRAINING)
        )
        for name in chosen
    }


def extensions_folder(environment: Mapping[str, str]) -> str:
    """Return the folder in which a process with this environment finds and compiles extensions of torch."""
    return code_folders(environment).get(EXTENSIONS) or environment[EXTENSIONS]


def make_code_folders(environment: Mapping[str, str]) -> None:
    """Make the folders that an environment names, or check that existing ones are private. Call it right before they are used.

    Raises:
        NotOwnError: Something else has the name of one: a link, another user's folder, or one that others can write.
        OSError: One cannot be made.
    """
    for folder in (Path(environment[name]) for name in _NAMES if environment.get(name)):
        if folder.is_relative_to(host_folder()):
            private_folder(
                host_folder()
            )  # whoever made it first, in /tmp, could exchange what is in it
        private_folder(folder)


def _is_private(folder: str) -> bool:
    path = Path(folder)
    return (
        path.is_absolute()
        and distrust_of_folder(path) is None
        and not stat.S_IMODE(path.lstat().st_mode) & 0o077
    )


def _default(name: str, environment: Mapping[str, str], *, local: bool = False) -> Path:
    folder = (host_folder() / "compiled" if local else compiled_folder(environment)) / _NAMES[name]
    # torch adds its version only to the name of its own default folder.
    return folder / _torch() if name == EXTENSIONS else folder


def _torch() -> str:
    """Return a name for what extensions are compiled against. The version tells CUDA's, too (``2.13.0+cu130``)."""
    from importlib import (
        metadata,
    )  # imports the email package, which who looks at a run does not need

    try:
        torch = metadata.version("torch").replace("+", "-")
    except metadata.PackageNotFoundError:
        torch = "none"
    return f"py{sys.version_info.major}{sys.version_info.minor}-torch{torch}"
