"""A Machine as a file: what ``inspect --json`` writes and ``--machine FILE`` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from so_tui.machine.types import SCHEMA, Machine
from so_tui.spec.errors import InputError, Problem

_REMEDY = "Write one on the machine in question with `so-tui inspect --json > FILE`."


def machine_json(machine: Machine) -> bytes:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(machine), indent=2) + b"\n"


def load_machine(path: Path | str) -> Machine:
    """Raises InputError when the file is missing, is not JSON, or is not a Machine of this schema."""
    try:
        machine = msgspec.json.decode(Path(path).read_bytes(), type=Machine)
    except OSError as error:
        raise _problem(path, f"cannot be read ({error.strerror or error})") from error
    except msgspec.ValidationError as error:
        raise _problem(path, f"is not a machine file ({error})") from error
    except UnicodeDecodeError as error:
        raise _problem(path, "is not UTF-8 text") from error
    except msgspec.DecodeError as error:
        raise _problem(path, f"is not JSON ({error})") from error
    if machine.schema != SCHEMA:
        raise _problem(path, f"has schema {machine.schema}; this version reads {SCHEMA}")
    if not machine.cpu_nodes:
        raise _problem(path, "has no NUMA node with CPUs")
    return machine


def _problem(path: Path | str, message: str) -> InputError:
    return InputError([Problem(field="--machine", value=str(path), message=message, remedy=_REMEDY)])
