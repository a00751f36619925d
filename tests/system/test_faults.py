"""A short round of the fault campaign, as a user starts it: four faults of different kinds, and
nothing to complain about.

Lost supervisors and clocks that jump have tests of their own (tests/launch). In the system tier: it
starts ranks eight times, and what it checks after each fault has faster tests of its own in the
slow tier.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import campaign
from benchmarks.faults.processes import marked
from tests.support.python_path import ROOT, checkout_path

KINDS = ("kill-tree-saving", "checkpoint-states-torn", "disk-full-metrics", "two-supervisors")

pytestmark = pytest.mark.system


def test_after_four_faults_everything_holds(tmp_path: Path) -> None:
    out, runs = tmp_path / "faults.jsonl", tmp_path / "runs"
    argv = [sys.executable, "-m", "benchmarks.faults", "--seed", "17", "--jobs", "2"]
    argv += ["--out", str(out), "--folder", str(runs)]
    argv += [word for kind in KINDS for word in ("--only", kind)]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": checkout_path()},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    found = {result.kind: (result.problems, result.note) for result in campaign.read(out)}
    assert found == dict.fromkeys(KINDS, ((), "")), done.stderr
    assert done.returncode == 0, done.stderr
    assert marked(f"{runs}/") == {}
