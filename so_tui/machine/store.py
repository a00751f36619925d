"""Read and write machine files: ``inspect --json`` writes them and ``--machine FILE`` reads them.

Problem codes:
    unreadable: The file is missing or cannot be read.
    not-text, not-json: The file is not UTF-8 text, or not JSON.
    not-a-machine: The JSON does not describe a machine.
    unsupported-schema: The file was written by an incompatible version.
    no-cpu-node: The machine has no NUMA node with CPUs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from so_tui.machine.types import SCHEMA, Machine
from so_tui.spec.errors import InputError, Problem

_REMEDY = "Write one on that machine with `so-tui inspect --json > FILE`."


def machine_json(machine: Machine) -> bytes:
    """Return a machine as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(machine), indent=2) + b"\n"


def load_machine(path: Path | str) -> Machine:
    """Read a machine file. Raises InputError if it cannot be read or does not contain a Machine of this schema."""
    try:
        machine = msgspec.json.decode(Path(path).read_bytes(), type=Machine)
    except OSError as error:
        raise _problem("unreadable", path, f"cannot be read ({error.strerror or error})") from error
    except msgspec.ValidationError as error:
        raise _problem("not-a-machine", path, f"is not a machine file ({error})") from error
    except UnicodeDecodeError as error:
        raise _problem("not-text", path, "is not UTF-8 text") from error
    except msgspec.DecodeError as error:
        raise _problem("not-json", path, f"is not JSON ({error})") from error
    if machine.schema != SCHEMA:
        raise _problem("unsupported-schema", path, f"has schema {machine.schema}; this version reads {SCHEMA}")
    if not machine.cpu_nodes:
        raise _problem("no-cpu-node", path, "has no NUMA node with CPUs")
    return machine


def _problem(code: str, path: Path | str, message: str) -> InputError:
    return InputError([Problem(code=code, field="--machine", value=str(path), message=message, remedy=_REMEDY)])
