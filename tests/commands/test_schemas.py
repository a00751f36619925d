"""The published schemas of ``--json`` are current, and real output agrees with them.

The commands that train, measure or ask a helper process are checked where they run anyway
(``tests.support.schemas``).
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError

from docs.make_schemas import FOLDER, schema_text, schemas
from so_tui.cli import main
from so_tui.launch.slurm.script import Site, _builtin_sites
from tests.support.make_run import write_run
from tests.support.schemas import valid

PRINTED = [
    ("inspect", ["inspect"]),
    ("inspect", ["machines", "gh200-quad-120"]),
    ("machines", ["machines"]),
    ("doctor", ["doctor"]),
    ("doctor", ["doctor", "qwen3-14b", "--machine", "gh200-480"]),
    ("presets", ["presets"]),
    ("preset", ["presets", "qwen3-30b-a3b"]),
    ("run-dry-run", ["run", "tiny", "--dry-run"]),
    ("run-dry-run", ["run", "qwen3-14b", "--dry-run", "--machine", "gh200-480"]),
    ("plan", ["plan", "--machine", "gh200-quad-120"]),
    ("plan", ["plan", "tiny"]),
    ("plan", ["plan", "llama-3.3-70b", "--machine", "gh200-120"]),
    ("plan", ["plan", "llama-3.3-70b", "--machine", "gh200-120", "--as-given"]),
]


@pytest.mark.repository
def test_the_schemas_are_current() -> None:
    published = {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
    assert published == {name: schema_text(schema) for name, schema in schemas().items()}, (
        "run: python docs/make_schemas.py"
    )


@pytest.mark.parametrize("name", schemas())
def test_each_is_a_schema(name: str) -> None:
    Draft202012Validator.check_schema(schemas()[name])


@pytest.mark.parametrize(("name", "argv"), PRINTED, ids=[" ".join(argv) for _, argv in PRINTED])
def test_real_output_agrees(name: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*argv, "--json"])
    valid(name, capsys.readouterr().out)


def test_runs_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, steps=3)
    main(["runs", "--json", "--runs-dir", str(tmp_path)])
    (listed,) = valid("runs", capsys.readouterr().out)["runs"]
    assert listed["name"] == run.name


def test_other_output_does_not_agree() -> None:
    run = {"name": "a", "path": "/a", "state": "lost", "step": 0, "total_steps": 1}
    run |= {"started": 1, "attempts": 1, "reason": ""}
    valid("runs", json.dumps({"runs": [run]}))
    for wrong in (
        {**run, "state": "gone"},
        {**run, "steps": 1},
        {**run, "results": {"loss": "none"}},
        {"name": "a"},
    ):
        with pytest.raises(ValidationError):
            valid("runs", json.dumps({"runs": [wrong]}))


@pytest.mark.parametrize(
    "profile", sorted(_builtin_sites().glob("*.toml")), ids=lambda path: path.stem
)
def test_site_profiles_agree(profile: Path) -> None:
    valid("site-profile", json.dumps(tomllib.loads(profile.read_text())))


def test_the_documented_site_profile_has_every_key() -> None:
    page = (FOLDER.parent / "cluster.md").read_text()
    (example,) = re.findall(r"```toml\n(title = \"Our cluster\".*?)```", page, re.DOTALL)
    keys = valid("site-profile", json.dumps(tomllib.loads(example))).keys()
    assert {*Site.__struct_fields__} - keys == {"source"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"heading": "x"},
        {"poll_s": 0},
        {"options": ["--x y\nz"]},
        {"partitions": {"gh": {"time_limit": "soon"}}},
    ],
)
def test_a_wrong_site_profile_does_not_agree(wrong: dict[str, object]) -> None:
    valid("site-profile", json.dumps({"title": "x"}))
    with pytest.raises(ValidationError):
        valid("site-profile", json.dumps({"title": "x", **wrong}))
