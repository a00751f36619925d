"""The tests that are selected for aarch64 exist: a name that matches nothing would end that run, or
leave out nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.aarch64.__main__ import SELECTION
from tests.support.python_path import ROOT


def test_every_selected_test_exists() -> None:
    parts = [part for kind in tomllib.loads(SELECTION.read_text()).values() for part in kind]
    single = {test for part in parts for test in part["tests"] if "::" in test}
    assert not [
        path
        for part in parts
        for test in part["tests"]
        if not (ROOT / (path := test.partition("::")[0])).exists()
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *sorted(single),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert single <= set(done.stdout.splitlines())
