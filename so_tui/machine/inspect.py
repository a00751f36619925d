"""Inspect a machine: assemble what the other modules read."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from so_tui.machine.gpus import read_gpus
from so_tui.machine.host import read_host
from so_tui.machine.software import read_software
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Machine
from so_tui.spec.errors import InputError, reject
from so_tui.trust.decoding import read_json
from so_tui.trust.files import UnfitFileError


def inspect_machine(sysroot: Path | None = None, *, hostname: str | None = None) -> Machine:
    """Return this machine, or the one whose /sys and /proc were copied below ``sysroot``.

    Args:
        sysroot: Folder with the copies; this machine if absent.
        hostname: Name of the copied machine, if the copy has none or another.

    Raises:
        InputError: With code ``no-cpus`` if ``sysroot`` contains neither NUMA nodes nor CPUs.
    """
    files = SystemFiles(sysroot)
    found, driver = read_gpus(files, read_host(files, hostname))
    return replace(
        found, software=read_software(files, found.numa_nodes, found.allowed_cpus, driver)
    )


# Read machine files, which ``inspect --json`` writes and ``--machine FILE`` names.
#
# Problem codes: unreadable: The file is missing or cannot be read. not-a-file, too-large: It is a
# pipe or a device, or larger than 16 MiB. not-a-machine: It is not JSON of a machine of this schema
# and within its bounds. no-cpu-node: The machine has no NUMA node with CPUs.


_REMEDY = "Write one on that machine with `so-tui inspect --json > FILE`."


def load_machine(path: Path | str) -> Machine:
    """Read a machine file. Raises InputError if it cannot be read or does not contain a Machine of
    this schema.
    """
    try:
        machine = read_json(Path(path), Machine)
    except UnfitFileError as error:
        raise _rejected(error.code, path, str(error).removeprefix(f"{path} ")) from error
    except OSError as error:
        raise _rejected(
            "unreadable", path, f"cannot be read ({error.strerror or error})"
        ) from error
    except msgspec.DecodeError as error:
        raise _rejected("not-a-machine", path, f"is not a machine file ({error})") from error
    return checked_machine(machine, path)


def checked_machine(machine: Machine, path: Path | str) -> Machine:
    """Return a machine that a file describes, unless no machine can be so. Raises InputError, which
    names the file.
    """
    nodes = {node.id for node in machine.numa_nodes}
    for gpu in machine.gpus:
        if gpu.memory_node is not None and gpu.memory_node not in nodes:
            raise _rejected(
                "not-a-machine",
                path,
                f"is not a machine file (GPU {gpu.index} has its memory on node "
                f"{gpu.memory_node}, which is not listed)",
            )
    if not machine.cpu_nodes:
        raise _rejected("no-cpu-node", path, "has no NUMA node with CPUs")
    return machine


def _rejected(code: str, path: Path | str, message: str) -> InputError:
    return reject(code, "--machine", str(path), message, _REMEDY)
