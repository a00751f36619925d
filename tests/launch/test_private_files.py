"""What a run writes through the real supervisor: no secret of the environment, and nothing that others can open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from so_tui.runs.records import FINAL_STATES
from tests.support.fake_runs import Runs, wait_for

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


@pytest.fixture
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_open_umask")
def test_a_run_records_no_secret_and_is_closed_to_others(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRAINER", "steps=3")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = runs.start()
    wait_for(run, lambda state: state.state in FINAL_STATES)
    found = [run.path, *run.path.rglob("*")]
    assert run.command_path(1) in found
    assert [path for path in found if path.is_file() and b"canary" in path.read_bytes()] == []
    assert open_to_others(found) == []


def open_to_others(found: list[Path]) -> list[tuple[str, str]]:
    return [(str(path), oct(path.stat().st_mode)) for path in found if path.stat().st_mode & 0o077]
