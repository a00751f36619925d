"""What a rank that fails leaves behind, and that a rank which is told to end does end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from so_tui.runs import create_run
from so_tui_trainer import failures
from so_tui_trainer.data import sources
from so_tui_trainer.failures import Failure
from tests.support.launching import tiny
from tests.support.waiting import LIMIT_S

STUBBORN = """
import signal
import time
from so_tui_trainer.session import _install_handlers

def fail():
    raise OSError("no space left on the device")

_install_handlers(fail, fail)
signal.raise_signal(signal.SIGUSR1)
print("ready", flush=True)
time.sleep(1000)
"""


def failure(rank: int) -> Failure:
    return Failure(rank=rank, code="disk-full", reason="full", suggestion="", step=rank)


def test_a_report_that_is_not_whole_does_not_hide_another_ranks() -> None:
    """The disk was full, or the rank was killed while it wrote."""
    run = create_run(tiny())
    run.attempt_dir(1).mkdir()
    (run.attempt_dir(1) / "failure.rank1.json").touch()
    assert failures.reported(run, 1, 4) is None
    failures.report(failure(2), run, 1)
    assert failures.reported(run, 1, 4) == failure(2)


def test_a_rank_that_cannot_write_why_it_failed_ends_all_the_same() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            rank.terminate()
            assert rank.wait(LIMIT_S) == 143
            assert rank.stderr is not None
            assert b"no space left" in rank.stderr.read()
        finally:
            rank.kill()


@pytest.mark.parametrize("part", [b'\\"', b"\\\\"])
def test_a_row_that_was_cut_off_in_a_string_is_checked_at_once(part: bytes) -> None:
    row = b"[" * (sources.MOST_NESTED + 1) + b"]" * (sources.MOST_NESTED + 1)
    began = time.process_time()
    assert not sources._is_deep(b'{"text": "' + row + part * 20_000)
    assert time.process_time() - began < 4
