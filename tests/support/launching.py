"""Runs through DeepSpeed's real launcher, without a supervisor: what the trainer does by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from so_tui.launch import command
from so_tui.launch.launch import prepare, write_launch
from so_tui.launch.supervisor.host import init_method, make_rendezvous
from so_tui.launch.supervisor.host_check import lock_folder
from so_tui.machine import inspect_machine
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory, create_run, new_attempt
from so_tui.runs.records import MetricRecord
from so_tui.spec import RunSpec, find_preset, with_values


def tiny(**changes: str) -> RunSpec:
    """The embedded preset with values changed; ``train__steps="5"`` stands for ``train.steps``."""
    values = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(find_preset("tiny").spec, values)


def prepared_run(launch: Launch, folder: Path) -> RunDirectory:
    """Make a run with an attempt that nobody has started."""
    run = create_run(launch.spec, folder)
    write_launch(run, new_attempt(run), launch)
    return run


def start(
    run: RunDirectory, spec: RunSpec, extra: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the next attempt of a run; its output goes to the attempt's log."""
    launch = prepare(spec, inspect_machine())
    attempt = new_attempt(run)
    digest = write_launch(run, attempt, launch)
    here = launch.resolved(
        {
            "{RUN}": str(run.path),
            "{RUN_ID}": "",
            "{LAUNCH}": digest,
            "{ATTEMPT}": str(attempt),
            "{RENDEZVOUS}": init_method(make_rendezvous(lock_folder(), run.path, attempt)),
        }
    )
    env = command.apply(here.environment, os.environ) | dict(extra or {})
    with run.log_path(attempt, "here").open("wb") as log:
        return subprocess.Popen(
            here.argv, env=env, cwd=run.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def train(spec: RunSpec, folder: Path) -> tuple[RunDirectory, int]:
    """A run to its end; the launcher's exit code."""
    run = create_run(spec, folder)
    return run, start(run, spec).wait(timeout=400)


def records(run: RunDirectory) -> list[MetricRecord]:
    files = (path.read_bytes() for path in sorted(run.metrics_dir.glob("*.jsonl")))
    lines = (line for content in files for line in content.splitlines())
    return [msgspec.json.decode(line, type=MetricRecord) for line in lines]


Kind = TypeVar("Kind", bound=MetricRecord)


def of_kind(found: RunDirectory | list[MetricRecord], kind: type[Kind]) -> list[Kind]:
    every = records(found) if isinstance(found, RunDirectory) else found
    return [record for record in every if isinstance(record, kind)]


def log(run: RunDirectory, attempt: int = 1) -> str:
    return run.log_path(attempt, "here").read_text(errors="replace")
