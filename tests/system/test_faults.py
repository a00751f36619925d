"""A short round of the fault campaign, as a user starts it: four faults of different kinds, and
nothing to complain about.

Lost supervisors and clocks that jump have tests of their own (tests/launch). In the system tier: it
starts ranks eight times, and what it checks after each fault has faster tests of its own in the
slow tier.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.faults import campaign
from benchmarks.faults.processes import marked
from tests.support.python_path import checkout_path, printed

KINDS = ("kill-tree-saving", "checkpoint-states-torn", "disk-full-metrics", "two-supervisors")

pytestmark = pytest.mark.system


def test_after_four_faults_everything_holds(tmp_path: Path) -> None:
    out, runs = tmp_path / "faults.jsonl", tmp_path / "runs"
    argv = ["-m", "benchmarks.faults", "--seed", "17", "--jobs", "2", "--out", str(out)]
    argv += ["--folder", str(runs), *(word for kind in KINDS for word in ("--only", kind))]
    printed(*argv, env=os.environ | {"PYTHONPATH": checkout_path()}, timeout_s=550)
    found = {result.kind: (result.problems, result.note) for result in campaign.read(out)}
    assert found == dict.fromkeys(KINDS, ((), ""))
    assert marked(f"{runs}/") == {}
