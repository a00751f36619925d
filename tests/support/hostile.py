"""Texts that would control the terminal, wherever another person could put text."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from msgspec.structs import replace

from so_tui.folders import user_folder
from so_tui.machine.types import Machine
from so_tui.runs import RunDirectory
from so_tui.runs.records import EndRecord, PhaseRecord, WarningRecord
from so_tui.spec import find_preset, spec_tree
from so_tui.trust.text import printable
from tests.support.machines import machine_json
from tests.support.make_run import quad_machine, write_run
from tests.support.records import append_records, change_state

HOSTILE = (
    "a\x1b]52;c;cm0gLXJm\x07b\x1b]0;owned\x1b\\c\x1b[2J\x1b[8md\x1bP1$r\x1b\\e\x9b31mf\x9d0;"
    "x\x9cg\x07\x08\rh"
    "\u202ei\u2066j\u200bk\u2028l\ufeff\U000e0041m\tn\nforged "
    "line\x7f[red]o[/][@click=app.quit]p[/]:smile:"
)
"""ESC and C1 sequences, controls, bidirectional and invisible characters, a line, markup."""
SURROGATE = "\udc9b"
"""What Python makes of the byte 9b in a name: written out raw, it is a CSI."""
IN_A_NAME = (HOSTILE + SURROGATE).replace("/", "|")
"""The same as a file's name."""


def unsafe(text: str) -> set[str]:
    """Return what of an output is no printable character, tab or end of a line."""
    return {character for character in set(text) if printable(character) != character}


@dataclass(frozen=True)
class HostileWorld:
    run: RunDirectory
    runs_dir: Path
    machine: Machine
    machine_file: Path


def hostile_world(folder: Path) -> HostileWorld:
    """Write presets, a failed run, a machine file and rows of data, full of such texts."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    row = {
        "messages": [
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE},
        ],
        HOSTILE: HOSTILE,
    }
    rows.write_text("\n".join([json.dumps(row)] * 8) + "\n")
    machine = hostile_machine()
    machine_file = folder / "machine.json"
    machine_file.write_bytes(machine_json(machine))
    presets = user_folder()
    presets.mkdir(parents=True, exist_ok=True)
    tree = spec_tree(find_preset("tiny").spec)
    tree |= {"name": "hostile", "title": HOSTILE, "gpus": 1}
    tree["data"] |= {"source": str(rows), "format": "messages"}
    (presets / "hostile.toml").write_text(tomli_w.dumps(tree))
    broken = tree | {"name": "broken", HOSTILE: HOSTILE, "offload": {"mode": HOSTILE}}
    (presets / IN_A_NAME[:40]).with_suffix(".toml").write_text(tomli_w.dumps(broken))
    run = hostile_run(folder / "runs")
    return HostileWorld(run, run.path.parent, machine, machine_file)


def hostile_machine() -> Machine:
    plain = quad_machine()
    software = ("python", "torch", "deepspeed", "compiler", "numactl")
    gpu = dict.fromkeys(("name", "pci_bus_id", "compute_mode"), HOSTILE)
    return replace(
        plain,
        hostname=HOSTILE,
        cpu_name=HOSTILE,
        architecture=HOSTILE,
        software=replace(plain.software, **dict.fromkeys(software, HOSTILE)),
        gpus=tuple(replace(each, **gpu) for each in plain.gpus),
        mpam=replace(plain.mpam, evidence=HOSTILE),
        notes=(HOSTILE,),
    )


def hostile_run(runs_dir: Path) -> RunDirectory:
    """Write a failed run with hostile records, state and log, in a folder with a hostile name."""
    written = write_run(runs_dir, steps=3, seconds_of_samples=3, state="failed", name="hostile")
    run, now = RunDirectory(written.path.rename(runs_dir / IN_A_NAME)), time.time()
    texts: dict[str, Any] = {"reason": HOSTILE, "suggestion": HOSTILE, "summary": {HOSTILE: 1.0}}
    told = dict.fromkeys(("reason", "suggestion", "detail", "host"), HOSTILE)
    append_records(
        run,
        PhaseRecord(attempt=1, time=now, phase="saving", detail=HOSTILE),
        WarningRecord(attempt=1, time=now, message=HOSTILE, suggestion=HOSTILE),
        EndRecord(attempt=1, time=now, state="failed", step=3, **texts),
    )
    change_state(run, started=now, ended=now, **told)
    for log in run.attempts_dir.glob("*/*.log"):
        log.write_bytes(HOSTILE.encode() + b"\n\x9b31m raw byte\n" + HOSTILE.encode())
    return run
