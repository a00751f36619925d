"""Runs of earlier versions are listed, shown, exported and refused as they were then.

``tests/data/runs`` holds `so-tui run tiny --set train.steps=20` by 0.1.0, and by the last version
before files were sorted anew, without logs, empty files, and states (no checkpoint is complete).
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from so_tui.cli import main
from so_tui.launch.launch import read_launch
from so_tui.machine import load_machine
from so_tui.plan.notes import Reason
from so_tui.runs.directory import RunDirectory

DATA = Path(__file__).parents[1] / "data"
LOSSES = [float(line) for line in (DATA / "losses_tiny.txt").read_text().split()]
VERSIONS = ("0.1.0", "before-house")


@pytest.fixture(params=VERSIONS)
def older(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of an older run that only its user can open, as so-tui makes them."""
    runs = tmp_path / "runs"
    shutil.copytree(DATA / "runs" / request.param, runs)
    for folder, _, files in os.walk(runs):
        Path(folder).chmod(0o700)
        for name in files:
            (Path(folder) / name).chmod(0o600)
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(runs))
    return runs / "tiny"


Output = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("older")
def test_older_run_is_listed_compared_and_watched(capsys: Output) -> None:
    loss = pytest.approx(sum(LOSSES[-5:]) / 5)
    assert main(["runs", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    seen = [run[key] for key in ("name", "state", "step", "total_steps", "attempts")]
    assert seen == ["tiny", "finished", 20, 20, 1]
    assert (run["results"]["mean_steps"], run["results"]["loss"]) == (5, loss)
    assert main(["compare", "tiny", "tiny", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert (run["step"], run["settings"], run["results"]["loss"]) == (20, {}, loss)
    assert run["results"]["host_memory_bytes"] > 2**30 - 2**27
    assert main(["watch", "tiny", "--plain"]) == 0
    lines = capsys.readouterr().out
    for step, at in enumerate(LOSSES, start=1):
        assert f"step {step}/20  loss {at:.4f}" in lines
    assert "finished at step 20, saved step 20" in lines


def test_launch_of_older_run_is_one_struct(older: Path) -> None:
    attempt = older / "attempts" / "001"
    launch = read_launch(RunDirectory(older), 1)
    assert launch.ds_config == json.loads((attempt / "ds_config.json").read_bytes())
    plan = json.loads((attempt / "plan.json").read_bytes())
    assert launch.plan.ratio == plan["ratio"]
    assert [list(rank.cpus) for rank in launch.plan.binding] == [
        rank["cpus"] for rank in plan["binding"]
    ]
    assert launch.machine == load_machine(attempt / "machine.node1.json")


def test_checkpoint_interval_of_an_older_plan_is_read() -> None:
    saved = {"code": "checkpoint-interval", "minutes": 42.3, "pause_s": 3.0, "gpus": 8}
    assert "one in 42 minutes" in msgspec.convert(saved, Reason).message


@pytest.mark.usefixtures("older")
def test_metrics_of_older_run_are_exported(tmp_path: Path) -> None:
    assert main(["export-metrics", "tiny", "--to", str(tmp_path / "steps.csv")]) == 0
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == LOSSES
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    assert {row["attempt"] for row in rows} == {"1"}
    assert sum(int(row["trained_tokens"]) for row in rows) == 14985
    assert float(rows[0]["gradient_norm"]) == pytest.approx(3.9604753)
    assert all(float(row["step_s"]) > 0 for row in rows)


@pytest.mark.usefixtures("older")
def test_older_run_that_finished_is_not_resumed(capsys: Output) -> None:
    assert main(["resume", "tiny"]) == 2
    assert "finished all of its 20 steps" in capsys.readouterr().err


def test_checkpoint_without_states_is_refused(older: Path, tmp_path: Path, capsys: Output) -> None:
    """Its manifest is read: what is missed is the file that it names."""
    assert main(["export", "tiny", "--to", str(tmp_path / "model")]) != 0
    error = capsys.readouterr().err
    assert str(older / "checkpoints/step-000020/optimizer/rank_00000.states") in error
    assert not (tmp_path / "model").exists()
