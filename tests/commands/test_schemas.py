"""Files generated from the commands are current: the schemas of ``--json``, which real output
follows, and the manual page, in which groff finds no fault.

The commands that train, measure or ask a helper process are checked where they run anyway
(``tests.support.schemas``).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from docs.make_man import PAGE, page
from docs.make_schemas import FOLDER, schema_text, schemas
from so_tui.launch.slurm.script import Site, _builtin_sites
from tests.support.commands import Call
from tests.support.make_run import write_run
from tests.support.schemas import valid


@pytest.mark.repository
def test_the_schemas_are_current() -> None:
    published = {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
    assert published == {name: schema_text(schema) for name, schema in schemas().items()}, (
        "run: python docs/make_schemas.py"
    )
    for schema in schemas().values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("inspect", "inspect"),
        ("inspect", "machines gh200-quad-120"),
        ("machines", "machines"),
        ("doctor", "doctor"),
        ("doctor", "doctor qwen3-14b --machine gh200-480"),
        ("presets", "presets"),
        ("preset", "presets qwen3-30b-a3b"),
        ("run-dry-run", "run tiny --dry-run"),
        ("run-dry-run", "run qwen3-14b --dry-run --machine gh200-480"),
        ("plan", "plan --machine gh200-quad-120"),
        ("plan", "plan tiny"),
        ("plan", "plan llama-3.3-70b --machine gh200-120 --set offload.ratio=0.5"),
        ("runs", "runs --runs-dir ."),
    ],
)
def test_real_output_agrees(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    if name == "runs":
        write_run(tmp_path, steps=3)
        monkeypatch.chdir(tmp_path)
    found = valid(name, call(f"{line} --json").out)
    assert name != "runs" or found["runs"]


def test_site_profiles_agree_and_the_documented_one_has_every_key() -> None:
    text = (FOLDER.parent / "cluster.md").read_text()
    (example,) = re.findall(r"```toml\n(title = \"Our cluster\".*?)```", text, re.DOTALL)
    keys = valid("site-profile", json.dumps(tomllib.loads(example))).keys()
    assert {*Site.__struct_fields__} - keys == {"source"}
    for profile in _builtin_sites().glob("*.toml"):
        valid("site-profile", json.dumps(tomllib.loads(profile.read_text())))


@pytest.mark.repository
def test_the_manual_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python docs/make_man.py"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_formatter_finds_no_fault_in_the_manual_page() -> None:
    argv = ["groff", *["-man", "-ww", "-Tascii", "-P-cbou"], str(PAGE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "so-tui run [options] PRESET|FILE" in done.stdout
    assert (done.stderr, "--dry-run" in done.stdout) == ("", True)
