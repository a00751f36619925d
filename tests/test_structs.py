"""Several threads may decode structs for the first time at the same time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from so_tui.machine import inspect_machine
from so_tui.plan.planner import make_plan
from so_tui.runs.records import RunState
from so_tui.spec import find_preset
from tests.support.python_path import printed

CODE = """
import sys, threading
from pathlib import Path
sys.setswitchinterval(1e-6)
import msgspec
from so_tui.machine.types import Machine
from so_tui.plan.plan import Plan
from so_tui.runs.records import RunState
from so_tui.spec.run_spec import RunSpec

kinds = 2 * [(kind, Path(sys.argv[1], kind.__name__).read_bytes()) for kind in (RunSpec, Plan, Machine, RunState)]
gate, decoded = threading.Barrier(len(kinds)), []

def decode(kind, content):
    gate.wait()
    decoded.append(msgspec.json.decode(content, type=kind))

threads = [threading.Thread(target=decode, args=kind) for kind in kinds]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(decoded))
"""  # noqa: E501


def test_threads_may_decode_the_same_struct_at_the_same_time(tmp_path: Path) -> None:
    """The dashboard and the list of runs do so when the screen opens, which once crashed the
    process.
    """
    spec, machine = find_preset("tiny").spec, inspect_machine()
    for value in (spec, machine, make_plan(spec, machine), RunState(name="run", state="created")):
        (tmp_path / type(value).__name__).write_bytes(msgspec.json.encode(value))
    assert printed("-c", CODE, str(tmp_path)) == "8\n"
