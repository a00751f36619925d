"""Apply changes that must not go unnoticed, one at a time in a copy of the tree, and say which ones
the tests notice.

    python tests/mutants/run.py [--check] [ID ...] [-- COMMAND ...]

``mutants.toml`` names each change, by its text and not by its file, and the test files that are
expected to fail. ``--check`` only says whether each text occurs once in its folder. Another command
replaces pytest with those files. The exit code is 1 if a change is not noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTEST = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider")
FAST = ("-m", "not slow and not smoke and not system and not gpu")


def site(tree: Path, mutant: dict[str, Any]) -> Path:
    """Return the one file below the mutant's folder that has its text, once. Raises ValueError."""
    counts: dict[Path, int] = {
        path: path.read_text(encoding="utf-8").count(mutant["old"])
        for path in (tree / mutant["folder"]).rglob("*.py")
    }
    if sum(counts.values()) != 1:
        raise ValueError(f"its text occurs {sum(counts.values())} times")
    return max(counts, key=counts.__getitem__)


def noticed(tree: Path, mutant: dict[str, Any], command: list[str]) -> bool:
    """Run the tests with the change. Raises ValueError if they could not be run."""
    path = site(tree, mutant)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf-8")
    paths = os.pathsep.join((str(tree), str(tree / "trainer")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command or [sys.executable, *PYTEST, *FAST, *mutant["tests"]],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    if not command and done.returncode not in {0, 1, 5}:  # 5: all of these tests are slow
        raise ValueError(f"pytest ended with {done.returncode}")
    return done.returncode not in {0, 5}


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, command = arguments[:end], arguments[end + 1 :]
    listed = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
    ids = {one for one in chosen if one != "--check"}
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = ROOT
        if "--check" not in chosen:
            tree = Path(folder) / "tree"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for mutant in listed["mutant"]:
            if ids and mutant["id"] not in ids:
                continue
            try:
                if "--check" in chosen:
                    seen, said = True, site(tree, mutant).relative_to(ROOT).as_posix()
                else:
                    seen = noticed(tree, mutant, command)
                    said = "killed" if seen else "SURVIVED"
            except ValueError as error:
                seen, said = False, f"ERROR: {error}"
            missed += not seen
            print(f"{mutant['id']}: {said}: {mutant['breaks']}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
