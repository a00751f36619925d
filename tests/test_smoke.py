"""One real run of the tiny preset, as a user would have it: the only test of `make test` that
launches ranks.

Command line, supervisor, DeepSpeed's launcher, two ranks with their Adam workers, a checkpoint, a
rank that is killed, a resume, an export; and nothing that the run wrote holds a secret of the
environment or can be opened by others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.runs import RunDirectory, alive
from so_tui.runs.records import CheckpointRecord, ResumedRecord, StepRecord
from tests.support.fake_runs import clean_up, ended, kill, process_of, wait_for
from tests.support.launching import of_kind, records
from tests.support.python_path import checkout_path
from tests.support.schemas import valid

SETTINGS = {
    "train.steps": "1000",  # it goes on until it is killed, however late that is
    "train.schedule": "constant",
    "train.warmup_ratio": "0",  # so that a step is the same in a shorter run
    "checkpoint.every_steps": "2",
    "checkpoint.background": "false",  # a checkpoint is complete when the next step begins
}

SECRETS = {
    "SLURM_JWT": "canary-jwt",
    "HF_PAT": "canary-pat",
    "HF_CREDS": "canary-creds",
    "HF_HUB_PWD": "canary-pwd",
    "WANDB_API_KEY": "canary-key",
    "TORCH_HUB_TOKEN": "canary-token",
    "HTTPS_PROXY": "https://user:canary-proxy@proxy.invalid:8080",
    "HF_ENDPOINT": "https://user:canary@end/point@mirror.invalid/hf?canary-query",
}

pytestmark = pytest.mark.smoke


def so_tui(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    environment = {**os.environ, **SECRETS, "PYTHONPATH": checkout_path()}
    return subprocess.run(
        [sys.executable, "-m", "so_tui", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        umask=0,  # what is closed to others is closed by so-tui
    )


@pytest.fixture
def runs_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder for the run; its processes are killed at the end, whatever happened."""
    folder = tmp_path / "runs"
    yield folder
    for state_file in folder.glob("*/state.json"):
        clean_up(RunDirectory(state_file.parent))


def test_tiny_trains_resumes_and_is_exported(runs_dir: Path, tmp_path: Path) -> None:
    changes = [
        argument for key, value in SETTINGS.items() for argument in ("--set", f"{key}={value}")
    ]
    started = so_tui(
        "run", "tiny", "--gpus", "2", "--detach", "--json", "--runs-dir", str(runs_dir), *changes
    )
    assert started.returncode == 0, started.stderr
    run = RunDirectory(Path(valid("run-detach", started.stdout)["path"]))

    state = wait_for(run, lambda state: state.step >= 3, timeout_s=240)
    kill(process_of(state, "rank", 1))
    failed = wait_for(run, ended, timeout_s=240, of_attempt=2)
    assert failed.state == "failed", failed
    assert not [process for process in failed.processes if alive(process)]
    assert so_tui("watch", str(run.path), "--plain").returncode == 1

    saved = {record.step for record in of_kind(run, CheckpointRecord)}
    steps = max(saved) + 3  # the kill may come between a checkpoint and its record
    resumed = so_tui("resume", str(run.path), "--detach", "--set", f"train.steps={steps}")
    assert resumed.returncode == 0, resumed.stderr
    finished = wait_for(
        run, lambda state: state.attempt == 2 and ended(state), timeout_s=240, of_attempt=3
    )
    assert (finished.state, finished.step) == ("finished", steps), finished

    found = records(run)
    resumed_at = of_kind(found, ResumedRecord)[0].step
    assert resumed_at >= max(saved)
    steps_of = of_kind(found, StepRecord)
    first, second = (
        {record.step: record.loss for record in steps_of if record.attempt == attempt}
        for attempt in (1, 2)
    )
    assert sorted(second) == list(range(resumed_at + 1, steps + 1))
    repeated = set(first) & set(second)
    assert {step: first[step] for step in repeated} == {step: second[step] for step in repeated}
    assert second[steps] < first[1]
    assert all(step.adam_bytes_per_s and step.d2h_bytes_per_s for step in steps_of)

    written = [run.path, *run.path.rglob("*")]
    files = [path for path in written if path.is_file()]
    assert [path for path in files if b"canary" in path.read_bytes()] == []
    # The whole run is closed to others than its owner.
    assert [path for path in written if path.stat().st_mode & 0o077] == []

    exported = so_tui("export", str(run.path), "--to", str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 1_000_000
