"""Exports do not follow other users' links to private files, and are private themselves."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from so_tui.folders import builtin_folder
from so_tui.runs.export import export_rows
from so_tui.spec import ModelSpec
from so_tui_trainer.export import ExportMarker, replacing
from so_tui_trainer.model.config import load_config
from tests.support.launching import tiny
from tests.support.model_checkpoints import checkpoint_of
from tests.support.models import causal_model
from tests.support.problems import rejected
from tests.support.users import SharedMachine
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow

SECRET = "a private key"
LOAD = """
import sys
import msgspec
from so_tui.spec import InputError, ModelSpec
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.export import _without_links
try:
    model = _without_links(msgspec.json.decode(sys.argv[1], type=ModelSpec))
    print(load_tokenizer(model).chat_template)
except InputError as error:
    print(*(f"{problem.code} {problem.value}" for problem in error.problems))
"""
EXPORT = """
import sys
from pathlib import Path
import msgspec
from so_tui.spec import InputError, RunSpec
from so_tui_trainer.export import export
checkpoint, to, spec = map(Path, sys.argv[1:])
try:
    export(checkpoint, to, "r", msgspec.json.decode(spec.read_bytes(), type=RunSpec))
except InputError as error:
    print(*(f"{problem.code} {problem.value}" for problem in error.problems))
"""
TEMPLATE = "{{ 'a template' }}"


@pytest.fixture
def tokenizer(machine: SharedMachine) -> Path:
    """The other user's folder with a tokenizer."""
    folder = machine.scratch / "theirs"
    shutil.copytree(builtin_folder() / "tiny", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    machine.other.give(folder)
    return folder


def private_file(machine: SharedMachine) -> Path:
    path = machine.owner.home / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    machine.owner.give(path)
    return path


def loaded(machine: SharedMachine, model: ModelSpec, **variables: str) -> str:
    """Return the chat template of a tokenizer that the owner loads, or the code of the refusal."""
    user = machine.owner
    argv = (user.interpreter, "-P", "-c", LOAD, msgspec.json.encode(model).decode())
    done = user.run(*argv, timeout_s=LIMIT_S, umask=0o022, HF_HUB_OFFLINE="1", **variables)
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout
    return done.stdout.strip()


def test_an_export_has_no_private_file_to_which_another_user_links(
    machine: SharedMachine, tokenizer: Path
) -> None:
    """The run names the other user's folder as its tokenizer."""
    spec = tiny(model__tokenizer=str(tokenizer))
    checkpoint = machine.scratch / "checkpoint"
    checkpoint_of(causal_model(load_config(spec.model)), spec, checkpoint)
    (machine.scratch / "spec.json").write_bytes(msgspec.json.encode(spec))
    machine.other.give(checkpoint, machine.scratch / "spec.json")
    to, user = machine.owner.home / "model", machine.owner
    places = (checkpoint, to, machine.scratch / "spec.json")
    argv = (user.interpreter, "-P", "-c", EXPORT, *map(str, places))
    template = tokenizer / "chat_template.jinja"
    template.unlink()
    template.symlink_to(private_file(machine))

    def export(umask: int = 0o022, **variables: str) -> tuple[int, str]:
        variables |= {"DS_ACCELERATOR": "cpu"}
        done = user.run(*argv, timeout_s=2 * LIMIT_S, umask=umask, **variables)
        return done.returncode, done.stdout

    def modes() -> tuple[int, set[int]]:
        files = {stat.S_IMODE(path.stat().st_mode) for path in to.iterdir()}
        return stat.S_IMODE(to.stat().st_mode), files

    assert export() == (0, f"file-not-of-folder {template}\n")
    assert not to.exists()
    template.unlink()
    template.write_text(TEMPLATE)
    assert export(umask=0o002) == (0, "")
    assert (to / "chat_template.jinja").read_text() == TEMPLATE
    assert modes() == (0o700, {0o600})
    assert export(SO_TUI_SHARE="group") == (0, "")
    assert modes() == (0o750, {0o640})


def test_links_within_a_folder_and_files_of_others_in_it_are_read(
    machine: SharedMachine, tokenizer: Path
) -> None:
    model = ModelSpec(id=str(tokenizer), weights="pretrained")
    template = tokenizer / "chat_template.jinja"
    template.rename(tokenizer / "template")
    template.symlink_to("template")
    machine.owner.give(tokenizer / "template")
    assert loaded(machine, model) == TEMPLATE
    os.link(tokenizer / "template", machine.owner.home / "another-name")
    assert loaded(machine, model) == f"file-not-of-folder {template}"


def test_a_shared_hub_cache_is_used_but_not_its_links_elsewhere(
    machine: SharedMachine, tokenizer: Path
) -> None:
    cache = machine.scratch / "hf"
    repository = cache / "hub" / "models--an--author"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("0" * 40)
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for path in tokenizer.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    config = tiny().model.config
    (snapshot / "config.json").write_text(json.dumps(config))
    machine.other.give(cache)
    model = ModelSpec(id="an/author", weights="pretrained")
    assert loaded(machine, model, HF_HOME=str(cache)) == TEMPLATE
    template = snapshot / "chat_template.jinja"
    template.unlink()
    template.symlink_to(private_file(machine))
    assert loaded(machine, model, HF_HOME=str(cache)) == f"file-not-of-folder {template}"


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_metrics_are_private_and_follow_no_planted_link(tmp_path: Path, ending: str) -> None:
    """In a project's folder others can make what is to be the file while it is written."""
    precious, table = tmp_path / "precious", tmp_path / f"table{ending}"
    precious.write_text("precious")
    planted = tmp_path / f".{table.name}.{os.getpid()}.tmp"
    planted.symlink_to(precious)
    with rejected("file-exists"):
        export_rows(table, ("step",), [(1,)])
    assert precious.read_text() == "precious"
    planted.unlink(missing_ok=True)
    umask = os.umask(0)
    try:
        assert export_rows(table, ("step",), [(1,)]) == 1
    finally:
        os.umask(umask)
    assert table.stat().st_mode & 0o777 == 0o600


TARGET = """
import sys
from so_tui.spec import InputError
from so_tui_trainer.export import target_of
try:
    print(target_of(sys.argv[1]))
except InputError as error:
    print(error.problems[0].code)
"""


def test_a_link_of_another_user_is_not_written_through(machine: SharedMachine) -> None:
    empty, link = machine.owner.home / "empty", machine.scratch / "model"
    empty.mkdir()
    machine.owner.give(empty)
    link.symlink_to(empty)
    for user, said in ((machine.other, "not-your-folder"), (machine.owner, str(empty))):
        user.give(link)
        assert machine.owner.python(TARGET, str(link)).stdout.strip() == said


def test_an_export_is_not_written_into_a_folder_put_in_its_place(tmp_path: Path) -> None:
    """In a project's folder others can rename the folder that is being written."""
    target, precious = tmp_path / "model", tmp_path / "precious"
    precious.mkdir()
    mark = ExportMarker(run="run", step=1, version="1")

    def write() -> None:
        with replacing(target, mark) as folder:
            target.with_name("model.partial").rename(tmp_path / "taken")
            target.with_name("model.partial").symlink_to(precious)
            (folder / "config.json").write_text("{}")

    with pytest.raises(OSError, match="exchanged"):
        write()
    assert not target.exists()
    assert list(precious.iterdir()) == []
