"""Links of others in a hub cache that a group shares do not decide where downloads go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub, loopback_hub
from tests.support.users import SharedMachine

pytestmark = pytest.mark.slow
FETCH = """
import sys
from so_tui.spec import DataSpec, InputError, ModelSpec
from so_tui_trainer.data.sources import open_sources
from so_tui_trainer.hub import download
from so_tui_trainer.remote_code import load_arguments
model = ModelSpec(id="an/author", weights="pretrained")
for read in (
    lambda: list(download(model, "config.json")),
    lambda: load_arguments(model),
    lambda: load_arguments(ModelSpec(id="an/author", trust_remote_code=True)),
    lambda: open_sources(DataSpec(source="an/author")),
):
    try:
        read()
        print("read")
    except InputError as error:
        print(error.problems[0].code)
"""
KINDS = ("models", "datasets")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with loopback_hub(tmp_path) as hub:
        hub.add("models", "an/author", {"config.json": b"{}"})
        hub.add("datasets", "an/author", {"train.jsonl": b'{"text": "honest"}\n'})
        yield hub


def fetched(machine: SharedMachine) -> list[str]:
    """Return what becomes of four downloads of the owner."""
    owner, cache = machine.owner, machine.scratch / "hf"
    names = (name for name in os.environ if name.startswith("HF_"))
    variables: dict[str, Any] = {name: os.environ[name] for name in names}
    variables |= {"HF_HOME": str(cache), "timeout_s": 120}
    done = owner.run(owner.interpreter, "-P", "-c", FETCH, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def share(machine: SharedMachine) -> None:
    """Let the other user own the cache, and everybody write in it."""
    cache = machine.scratch / "hf"
    machine.other.give(cache)
    for path in (cache, *cache.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777)


@pytest.mark.parametrize(
    "name",
    ["hub", "hub/.locks", "hub/.locks/{}", "hub/{}", *(
        f"hub/{{}}/{part}" for part in ("blobs", "refs", "snapshots", "snapshots/COMMIT")
    )],
)  # fmt: skip
def test_a_download_is_not_led_elsewhere(machine: SharedMachine, hub: Hub, name: str) -> None:
    precious = machine.owner.home / "precious"
    precious.mkdir()
    (precious / "main").write_text("precious")
    machine.owner.give(precious)
    for kind in KINDS:
        (commit,) = hub.repositories[kind, "an/author"].commits
        part = name.format(f"{kind}--an--author").replace("COMMIT", commit)
        link = machine.scratch / "hf" / part
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(precious)
    share(machine)
    assert set(fetched(machine)) == {"data-link-leads-out"}
    assert [path.name for path in precious.iterdir()] == ["main"]
    assert (precious / "main").read_text() == "precious"


def test_a_cache_of_several_users_is_used(machine: SharedMachine, hub: Hub) -> None:
    """Links of one user name files that another has stored, below a link of the site."""
    cache = machine.scratch / "hf"
    cache.mkdir()
    share(machine)
    assert fetched(machine) == ["read"] * 4
    for kind in KINDS:
        repository = cache / "hub" / f"{kind}--an--author"
        machine.other.give(repository)
        for blob in (repository / "blobs").iterdir():
            os.chown(blob, 0, 0)
    moved = machine.scratch / "elsewhere"
    shutil.move(cache, moved)
    cache.symlink_to(moved)
    assert fetched(machine) == ["read"] * 4
