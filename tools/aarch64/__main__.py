"""``python -m tools.aarch64``: run the light install on aarch64: a few commands, then the tests
that ``selection.toml`` names.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.aarch64.environment import ENVIRONMENT, ROOT, MissingError, emulated_python

SELECTION = Path(__file__).with_name("selection.toml")
COMMANDS = ("--version", "inspect", "plan qwen3-14b --machine gh200-480")
MARKERS = "not slow and not system and not gpu"


def pytest_arguments(
    selection: dict[str, list[dict[str, list[str]]]], *, emulated: bool
) -> list[str]:
    """Return which tests run: the selected ones, less those that no emulator can pass if
    ``emulated``.
    """
    tests = [test for part in selection["run"] for test in part["tests"]]
    left_out = (
        [test for part in selection["not_emulated"] for test in part["tests"]] if emulated else []
    )
    return [*tests, *(word for test in left_out for word in ("--deselect", test))]


def main() -> int:
    """Run everything. Return the exit code of what failed, 0 if this machine cannot run it at
    all.
    """
    emulated = platform.machine() != "aarch64"
    try:
        python = emulated_python(ENVIRONMENT) if emulated else Path(sys.executable)
    except MissingError as missing:
        print(f"skipped: the light install on aarch64. {missing}", flush=True)
        return 0
    begun = time.monotonic()
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = os.environ | {"PATH": path, "PYTHONSAFEPATH": "1"}
    for command in COMMANDS:
        print(f"$ so-tui {command}", flush=True)
        code = _run([str(python), "-m", "so_tui", *shlex.split(command)], environment)
        if code != 0:
            return code
    selection = tomllib.loads(SELECTION.read_text())
    pytest = [
        str(python),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-m",
        MARKERS,
        "--durations=12",
    ]
    code = _run([*pytest, *pytest_arguments(selection, emulated=emulated)], environment)
    print(
        f"aarch64 ({'emulated' if emulated else 'native'}): {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
