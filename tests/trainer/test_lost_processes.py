"""Who dies first in a real run, and that the others follow: launcher, ranks, Adam workers."""

import re
import time
from pathlib import Path

import psutil
import pytest

from so_tui.runs import RunDirectory, create_run
from so_tui.runs.records import EndRecord, StepRecord
from so_tui.spec import RunSpec
from tests.support.launching import log, records, start, tiny
from tests.support.waiting import running, wait_until

pytestmark = pytest.mark.slow

LAUNCHER = re.compile(r"launcher\.launch|launcher/launch\.py$")


def started(
    run: RunDirectory, spec: RunSpec, attempt: int
) -> tuple[psutil.Process, list[psutil.Process], list[psutil.Process]]:
    """Start the next attempt, and return DeepSpeed's runner, all its descendants, and the Adam
    workers among them.
    """
    runner = start(run, spec)
    while not any(
        isinstance(record, StepRecord) and record.attempt == attempt for record in records(run)
    ):
        assert runner.poll() is None, log(run, attempt)
        time.sleep(0.05)
    family = psutil.Process(runner.pid).children(recursive=True)
    workers = [
        process
        for process in family
        if any(part.endswith("offload/worker.py") for part in process.cmdline())
    ]
    assert len(workers) == spec.gpus
    return psutil.Process(runner.pid), family, workers


def wait_for_end_of(processes: list[psutil.Process]) -> None:
    """Zombies hold no resources and count as ended."""
    wait_until(lambda: not any(running(each.pid) and each.is_running() for each in processes))


def test_whoever_dies_first_the_others_follow(tmp_path: Path) -> None:
    spec = tiny(offload__mode="superoffload", train__steps="10000")
    run = create_run(spec, tmp_path)
    runner, family, workers = started(run, spec, 1)
    workers[-1].kill()
    assert runner.wait(timeout=120) == 1, log(run)
    end = records(run)[-1]
    assert isinstance(end, EndRecord)
    assert (end.state, end.code) == ("failed", "adam-worker-lost")
    wait_for_end_of(family)

    runner, family, _ = started(run, spec, 2)
    launchers = [
        process for process in family if any(LAUNCHER.search(part) for part in process.cmdline())
    ]
    assert launchers
    for process in (runner, *launchers):
        process.kill()
    wait_for_end_of(family)
