"""Rows that others prepared, or to which they lead, are not trained on."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from so_tui.spec import ModelSpec
from so_tui_trainer.export import of_folder
from so_tui_trainer.model.stored import shards
from tests.support.problems import rejected
from tests.support.users import SharedMachine
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow

ROWS = """
import sys
from so_tui.spec import DataSource, DataSpec, InputError
from so_tui_trainer.data.sources import open_sources
try:
    (opened,) = open_sources(DataSpec(source=sys.argv[1]))
    print(*(said.content for (said,) in opened.conversations(0, len(opened.rows))))
except InputError as error:
    print(*(f"{problem.code} {problem.message}" for problem in error.problems))
"""
CONVERSATIONS = ROWS.replace(
    "*(said.content for (said,) in opened.conversations(0, len(opened.rows)))",
    "*opened.conversations(0, 1)",
)
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
EXCHANGE = (
    """
import os, sys
from pathlib import Path
import datasets
given = datasets.DatasetBuilder.download_and_prepare
shared, private = Path(os.environ["SHARED"]), Path(os.environ["PRIVATE"])
def exchanged(*what, **options):
    kept = shared.rename(shared.with_suffix(".kept"))
    shared.symlink_to(private)
    try:
        given(*what, **options)
    finally:
        shared.unlink()
        kept.rename(shared)
datasets.DatasetBuilder.download_and_prepare = exchanged
"""
    + ROWS
)
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


@pytest.mark.parametrize("named", ["path", "relative", "archive"])
def test_a_readme_that_names_a_private_file_is_refused(machine: SharedMachine, named: str) -> None:
    theirs, mine = machine.scratch / "theirs", machine.owner.home / "secret.jsonl"
    theirs.mkdir()
    mine.write_text('{"text": "secret"}\n')
    machine.owner.give(mine)
    names = {
        "path": str(mine),
        "relative": os.path.relpath(mine, theirs),
        "archive": f"zip://secret.jsonl::{mine.with_suffix('.zip')}",
    }
    with zipfile.ZipFile(mine.with_suffix(".zip"), "w") as archive:
        archive.write(mine, "secret.jsonl")
    (theirs / "a.jsonl").write_text('{"text": "honest"}\n')
    (theirs / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: {names[named]}\n---\n"
    )
    machine.other.give(theirs)
    assert rows(machine, theirs).startswith("data-file-elsewhere names the file")


SAVE = """
import sys
import datasets
datasets.Dataset.from_dict({"text": ["secret"]}).save_to_disk(sys.argv[1])
"""


def test_saved_rows_that_name_a_private_file_are_refused(machine: SharedMachine) -> None:
    theirs, mine = machine.scratch / "theirs", machine.owner.home / "saved"
    user = machine.owner
    user.run(user.interpreter, "-P", "-c", SAVE, str(mine), timeout_s=LIMIT_S)
    shutil.copytree(mine, theirs)
    machine.other.give(theirs)
    assert rows(machine, theirs) == "secret"
    state = theirs / "state.json"
    name = json.loads(state.read_text())["_data_files"][0]["filename"]
    for there in (mine / name, os.path.relpath(mine / name, theirs)):
        state.write_text(state.read_text().replace(name, str(there)))
        assert rows(machine, theirs).startswith("data-file-elsewhere")
        state.write_text(state.read_text().replace(str(there), name))


def test_a_source_that_is_a_link_to_a_private_file_is_refused(machine: SharedMachine) -> None:
    mine, link = machine.owner.home / "secret" / "a.jsonl", machine.scratch / "rows.jsonl"
    mine.parent.mkdir()
    mine.write_text('{"text": "secret"}\n')
    machine.owner.give(mine.parent)
    for source, target in ((link, mine), (machine.scratch / "rows", mine.parent)):
        source.symlink_to(target)
        machine.other.give(source)
        assert rows(machine, source).startswith(f"data-link-leads-out {source} is another user's")
    named = machine.scratch / "rows" / "a.jsonl"
    assert rows(machine, named).startswith("data-link-leads-out")


@pytest.mark.parametrize("place", ["file", "part", "folder"])
def test_a_link_of_ones_own_to_a_link_of_others_is_judged_at_each(
    machine: SharedMachine, place: str
) -> None:
    """The owner keeps a link to shared data, which its author turns to a private file."""
    own, theirs = machine.owner.home / "private", machine.scratch / "data"
    own.mkdir()
    (own / "rows.jsonl").write_text('{"text": "secret"}\n')
    named = machine.owner.home / "named"
    if place == "file":
        theirs.symlink_to(own / "rows.jsonl")
        named = named.with_suffix(".jsonl")
        named.symlink_to(theirs)
    elif place == "part":
        theirs.symlink_to(own / "rows.jsonl")
        named.mkdir()
        (named / "part.jsonl").symlink_to(theirs)
    else:
        theirs.symlink_to(own)
        named.symlink_to(theirs / "rows.jsonl")
        named = named.rename(named.with_suffix(".jsonl"))
    machine.owner.give(own, named)
    os.lchown(theirs, machine.other.uid, machine.other.uid)
    assert rows(machine, named).startswith("data-link-leads-out")


@pytest.mark.parametrize("named", ["file", "folder", "link", "part"])
def test_rows_that_are_exchanged_while_they_are_read_are_refused(
    machine: SharedMachine, named: str
) -> None:
    """All is as before when the reading ends. The owner's process does what others could."""
    private, folder = machine.owner.home / "private.jsonl", machine.scratch / "data"
    private.write_text('{"text": "secret"}\n')
    folder.mkdir()
    shared = folder / "rows.jsonl"
    shared.write_text('{"text": "honest"}\n')
    machine.other.give(folder)
    folder.chmod(0o777)
    source = shared if named == "file" else folder
    if named == "link":
        source = machine.owner.home / "named.jsonl"
        source.symlink_to(shared)
    elif named == "part":
        source = machine.owner.home / "named"
        source.mkdir()
        (source / "part.jsonl").symlink_to(shared)
    machine.owner.give(private)
    if source != folder and source != shared:
        machine.owner.give(source)
    places = {"SHARED": str(shared), "PRIVATE": str(private)}
    assert rows(machine, source, EXCHANGE, **places).startswith("data-source-changed")
    assert rows(machine, source, ROWS) == "honest"


def test_paths_of_pictures_in_rows_are_not_opened(machine: SharedMachine) -> None:
    """They may be pipes, or files that only the owner can read."""
    theirs = machine.scratch / "theirs"
    theirs.mkdir()
    os.mkfifo(theirs.with_name("pipe"), 0o666)
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    value = {"bytes": None, "path": str(theirs.with_name("pipe"))}
    table = pa.table(
        {
            "text": ["honest"],
            "one": pa.array([value], picture),
            "many": pa.array([[value]], pa.list_(picture)),
        }
    )
    kinds: dict[str, Any] = {
        "text": {"dtype": "string", "_type": "Value"},
        "one": {"_type": "Image"},
    }
    kinds["many"] = {"feature": {"_type": "Audio"}, "_type": "List"}
    features = json.dumps({"info": {"features": kinds}})
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": features}), theirs / "a.parquet"
    )
    machine.other.give(theirs)
    assert "content='honest'" in rows(machine, theirs, CONVERSATIONS)


SOURCE = """
import sys
from so_tui.spec import InputError, resolve_source
try:
    print(resolve_source(sys.argv[1]))
except InputError as error:
    print(error.problems[0].code)
"""


@pytest.mark.parametrize("name", ["people/model", "model"])
def test_a_folder_of_others_is_not_taken_for_a_name_of_the_hub(
    machine: SharedMachine, name: str
) -> None:
    """They may plant it where this user works, such as in a project's folder."""
    folder = machine.scratch / name
    folder.mkdir(parents=True)
    code = f"import os; os.chdir({str(machine.scratch)!r})\n{SOURCE}"
    expected = {name: name, f"./{name}": f"./{name}", str(folder): str(folder)}
    for user, refused in ((machine.owner, False), (machine.other, True)):
        user.give(machine.scratch / name.partition("/")[0])
        for source, same in expected.items():
            said = machine.owner.python(code, source).stdout.strip()
            assert said == ("name-of-a-folder" if refused and source == name else same)
    machine.other.give(machine.scratch)
    assert machine.owner.python(code, "").stdout.strip() == ""


@pytest.mark.parametrize("named", ["/home/ann/private.safetensors", "../private.safetensors"])
def test_an_index_that_names_weights_elsewhere_is_refused(tmp_path: Path, named: str) -> None:
    index = json.dumps({"weight_map": {"a": named}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    for read in (shards, lambda folder: of_folder(folder, ModelSpec(id=str(folder)))):
        with rejected("weights-elsewhere"):
            read(tmp_path)


SHARDS = """
import sys
from pathlib import Path
from so_tui.spec import InputError
from so_tui_trainer.model.stored import shards
try:
    print(*shards(Path(sys.argv[1])))
except InputError as error:
    print(error.problems[0].code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model", "hub/models--people--own/snapshots/abc"])
def test_a_link_of_others_to_private_weights_is_refused(machine: SharedMachine, place: str) -> None:
    folder = machine.scratch / place
    folder.mkdir(parents=True)
    private, theirs = machine.owner.home / "a", machine.other.home / "a"
    machine.other.home.chmod(0o755)
    blob = folder.parent / "blob" if place == "model" else folder.parents[1] / "blobs" / "a"
    blob.parent.mkdir(exist_ok=True)
    for user, target, refused in (
        (machine.owner, private, True),
        (machine.other, theirs, False),
        (machine.other, blob, False),
    ):
        target.write_text("")
        machine.other.give(machine.scratch)
        user.give(target)
        link = folder / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        machine.other.give(link)
        said = machine.owner.python(SHARDS, str(folder)).stdout.strip()
        assert said == ("weights-elsewhere" if refused else link.name)
