"""The real packages of trackers: W&B logs a run offline, and TensorBoard reads our event files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.python_path import PIP, printed, python_path

pytestmark = pytest.mark.system

TRACK = """
import sys
from pathlib import Path
from so_tui.runs import create_run
from so_tui.runs.records import EvaluationRecord
from so_tui_trainer.recorder import _log_to_tensorboard, _log_to_wandb
from tests.support.launching import tiny
from tests.support.records import step_record

folder = Path(sys.argv[1])
spec = tiny(tracking__wandb="true", tracking__project="so-tui-tests")
run = create_run(spec, folder)
records = [step_record(step, loss=4.0 - step) for step in (1, 2, 3)]
records.append(EvaluationRecord(attempt=1, time=0.0, step=3, loss=1.5, tokens=9))
_log_to_wandb(run, spec, iter(records))
_log_to_tensorboard(folder / "tensorboard", iter(records))
print(run.path)
"""
READ = """
import json, struct, sys
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

BLOCK, FULL, LAST = 32768, 1, 4


def logged(data):
    # LevelDB's log format after 7 bytes: each chunk has a checksum (4 bytes), its length (2), its type (1), and fits into a block.
    at, parts = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


run, folder = map(Path, sys.argv[1:])
(file,) = run.glob("wandb/offline-run-*/run-*.wandb")
rows, config, ended = [], {}, None
for data in logged(file.read_bytes()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "history":
        rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    elif kind == "run":
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        name = record.run.run_id, record.run.display_name, record.run.project
    elif kind == "exit":
        ended = record.exit.exit_code
events = EventAccumulator(str(folder / "tensorboard"))
events.Reload()
scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
print(json.dumps({"rows": rows, "config": config, "name": name, "ended": ended, "scalars": scalars}))
"""  # noqa: E501


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real wandb and tensorboard, from a package index."""
    folder = tmp_path_factory.mktemp("packages")
    install = [sys.executable, *PIP, "--target", str(folder), "wandb>=0.22", "tensorboard"]
    subprocess.run(install, check=True)
    return folder


def run(script: str, packages: Path, *arguments: Path) -> str:
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": python_path(packages)}
    out = printed("-c", script, *map(str, arguments), env=os.environ | offline)
    return out.strip().rpartition("\n")[2]


def test_wandb_and_tensorboard_read_metrics(packages: Path, tmp_path: Path) -> None:
    made = Path(run(TRACK, packages, tmp_path))
    found = json.loads(run(READ, packages, made, tmp_path))
    identity = (made / "wandb.id").read_text().strip()
    assert (found["name"], found["ended"]) == ([identity, made.name, "so-tui-tests"], 0)
    assert found["config"]["tracking"]["project"] == "so-tui-tests"
    losses = {"train/loss": [[1, 3.0], [2, 2.0], [3, 1.0]], "evaluation/loss": [[3, 1.5]]}
    for name, expected in losses.items():
        rows = [[row["step"], row[name]] for row in found["rows"] if name in row]
        assert rows == found["scalars"][name] == expected
