"""Rows that others prepared, or to which they lead, are not trained on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.users import SharedMachine
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow

ROWS = """
import sys
from so_tui.spec import DataSource, DataSpec, InputError
from so_tui_trainer.data.sources import open_sources
try:
    (opened,) = open_sources(DataSpec(source=sys.argv[1]))
    print(*opened.rows["text"])
except InputError as error:
    print(*(f"{problem.code} {problem.message}" for problem in error.problems))
"""
FILL = """
import sys
from pathlib import Path
import datasets
from so_tui_trainer.data import sources
sources.datasets_cache = lambda: Path(datasets.config.HF_DATASETS_CACHE)
(opened,) = sources.open_sources(sources.DataSpec(source=sys.argv[1]))
for path in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow"):
    path.write_bytes(path.read_bytes().replace(b"honest", b"poison"))
"""
PREPARE = """
import sys
from pathlib import Path
from so_tui.spec import InputError
from so_tui_trainer.foreign import own_entry
try:
    print(own_entry(Path(sys.argv[1]), "entry"))
except InputError as error:
    print(*(f"{problem.code} {problem.value}" for problem in error.problems))
"""


def rows(machine: SharedMachine, source: Path, code: str = ROWS, **variables: str) -> str:
    """Return the rows that the owner reads from a source, or the refusal."""
    user = machine.other if code == FILL else machine.owner
    argv = (user.interpreter, "-P", "-c", code, str(source))
    done = user.run(*argv, timeout_s=LIMIT_S, umask=0o022, HF_HUB_OFFLINE="1", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_DATASETS_CACHE"])
def test_rows_that_another_user_prepared_are_not_read(
    machine: SharedMachine, variable: str
) -> None:
    """A site shares the folder of the hub's cache, and the other user was first."""
    shared = machine.scratch / "hf"
    shared.mkdir()
    shared.chmod(0o777)
    source = machine.scratch / "rows.jsonl"
    source.write_text('{"text": "honest"}\n')
    rows(machine, source, FILL, **{variable: str(shared)})
    for path in shared.rglob("*"):
        path.chmod(0o777)
    assert rows(machine, source, **{variable: str(shared)}) == "honest"
    private = machine.owner.home / ".cache" / "so-tui" / "datasets"
    assert list(private.rglob("*.arrow"))
    assert private.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_of_another_user_to_a_private_file_is_refused(machine: SharedMachine) -> None:
    theirs, mine = machine.scratch / "theirs", machine.owner.home / "secret.jsonl"
    theirs.mkdir()
    (theirs / "a.jsonl").write_text('{"text": "honest"}\n')
    mine.write_text('{"text": "secret"}\n')
    machine.owner.give(mine)
    # Rows of their own may lie elsewhere.
    elsewhere = machine.scratch / "elsewhere.jsonl"
    elsewhere.write_text('{"text": "more"}\n')
    (theirs / "b.jsonl").symlink_to(elsewhere)
    machine.other.give(theirs, elsewhere)
    assert sorted(rows(machine, theirs).split()) == ["honest", "more"]
    for link in (theirs / "c.jsonl", theirs / "state.json"):
        link.symlink_to(mine)
        machine.other.give(theirs)
        assert rows(machine, theirs).startswith(f"data-link-leads-out {link} is another user's")
        link.unlink()
    # A folder of links that leads there, and a circle.
    (theirs / "circle").symlink_to(theirs)
    (theirs / "folder").symlink_to(machine.scratch / "further")
    (machine.scratch / "further").mkdir()
    (machine.scratch / "further" / "d.jsonl").symlink_to(mine)
    machine.other.give(theirs, machine.scratch / "further")
    assert rows(machine, theirs).startswith("data-link-leads-out")

    (machine.owner.home / "own").mkdir()
    (machine.owner.home / "own" / "d.jsonl").symlink_to(theirs / "a.jsonl")
    machine.owner.give(machine.owner.home / "own")
    assert rows(machine, machine.owner.home / "own") == "honest"


@pytest.mark.parametrize("planted", ["cache", "entry"])
def test_a_cache_that_another_user_made_is_not_used(machine: SharedMachine, planted: str) -> None:
    cache = machine.scratch / "cache"
    cache.mkdir()
    (cache / "entry").mkdir()
    machine.other.give(cache)
    cache.chmod(0o775)
    if planted == "entry":
        os.chown(cache, machine.owner.uid, machine.other.uid)
    named = cache / "entry" if planted == "entry" else cache
    assert rows(machine, cache, PREPARE) == f"cache-unwritable {named}"
    (cache / "entry").rmdir()
    os.chown(cache, machine.owner.uid, machine.other.uid)
    assert rows(machine, cache, PREPARE) == str(cache / "entry")
    assert cache.stat().st_mode & 0o777 == 0o700
