"""Whether an interpreter can train on a node: the architecture that it is built for, and the
packages that it has.

``python -m so_tui.machine.interpreter GPUS`` is the first thing that a job executes with the
interpreter it was given.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from io import FileIO
from pathlib import Path

from so_tui.machine.software import known_versions, package_version, torch_build
from so_tui.trust.files import open_descriptor

_MAGIC, _LITTLE_ENDIAN = b"\x7fELF", 1
_ARCHITECTURES = {0x3E: "x86_64", 0xB7: "aarch64"}
"""By ``e_machine`` in an ELF header."""


def architecture_of(interpreter: str) -> str:
    """Return the architecture that an interpreter is built for, as ``uname -m`` names it.

    Empty where that cannot be seen: it is no path, no file on this host, a script, or for another
    architecture than those known here.
    """
    path = Path(interpreter)
    if not path.is_absolute():
        return ""
    try:
        with FileIO(open_descriptor(path), "rb") as file:
            header = file.read(20)
    except OSError:
        return ""
    if len(header) < 20 or header[:4] != _MAGIC or header[5] != _LITTLE_ENDIAN:
        return ""
    return _ARCHITECTURES.get(int.from_bytes(header[18:20], "little"), "")


def _faults(gpus: int) -> Iterator[str]:
    """Yield what this interpreter lacks to train on that many GPUs of this host, without importing
    torch, which takes seconds.
    """
    torch, deepspeed = package_version("torch"), package_version("deepspeed")
    found = {"so_tui_trainer": find_spec("so_tui_trainer"), "torch": torch, "deepspeed": deepspeed}
    if missing := [name for name, version in found.items() if version is None]:
        yield f"{', '.join(missing)} not installed"
    if gpus and torch is not None and not torch_build():
        yield (
            f"torch {torch} is a build for the CPU only, and the run uses {gpus} GPUs of each node"
        )
    bound = known_versions().bound_of("deepspeed")
    if deepspeed is not None and not bound.admits(deepspeed):
        yield f"DeepSpeed {deepspeed} is not supported; {bound.oldest} to {bound.newest} are"


if __name__ == "__main__":
    if problems := tuple(_faults(int(sys.argv[1]))):
        sys.exit(
            f"so-tui: {sys.executable} on {platform.node()} ({platform.machine()}): "
            f"{'; '.join(problems)}"
        )
