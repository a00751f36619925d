"""What nodes without internet would miss, by the files of the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.launch.checks import checks_elsewhere
from so_tui.launch.slurm import client
from so_tui.launch.slurm.executor import _not_cached
from so_tui.launch.slurm.script import _user_sites, batch_script, load_site
from so_tui.plan.plan import Launch
from so_tui.spec import DataSource, RunSpec
from tests.support.launching import tiny
from tests.support.planning import CATALOG, QUAD
from tests.support.plans import plan_of
from tests.support.problems import rejected

PHI_4 = CATALOG.presets["phi-4"].spec


def missing(spec: RunSpec, home: Path) -> list[tuple[str, str]]:
    return [
        (problem.field, problem.value)
        for problem in _not_cached(spec, {"HF_HOME": str(home)}, "here")
    ]


def snapshot(home: Path, name: str, *files: str, revision: str = "main") -> Path:
    """Make a model as huggingface_hub caches it."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    folder = model / "snapshots" / "0123abcd"
    folder.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / revision).write_text("0123abcd")
    for file in files:
        (folder / file).touch()
    return folder


def test_model_and_data_must_be_there(tmp_path: Path) -> None:
    assert missing(PHI_4, tmp_path) == [
        ("model.id", "microsoft/phi-4"),
        ("data.source", "tatsu-lab/alpaca"),
    ]
    snapshot(tmp_path, PHI_4.model.id, "config.json", "model.safetensors", "tokenizer.json")
    assert missing(PHI_4, tmp_path) == [("data.source", "tatsu-lab/alpaca")]
    (tmp_path / "datasets" / "tatsu-lab___alpaca").mkdir(parents=True)
    assert missing(PHI_4, tmp_path) == []


def test_half_a_download_is_missing_by_the_name_of_a_file(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, PHI_4.model.id, "config.json", "tokenizer.json", "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    (problem, *_) = _not_cached(PHI_4, {"HF_HOME": str(tmp_path)}, "here")
    assert (problem.code, problem.field) == ("not-cached", "model.id")
    assert "b.safetensors" in problem.message
    (folder / "b.safetensors").touch()
    assert missing(PHI_4, tmp_path) == [("data.source", "tatsu-lab/alpaca")]


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"x": 1}}', "[" * 10_000])
def test_a_damaged_index_is_no_more_than_a_missing_file(index: str, tmp_path: Path) -> None:
    folder = snapshot(tmp_path, PHI_4.model.id, "config.json", "tokenizer.json")
    (folder / "model.safetensors.index.json").write_text(index)
    assert ("model.id", PHI_4.model.id) in missing(PHI_4, tmp_path)


def test_another_revision_is_another_model(tmp_path: Path) -> None:
    files = ("config.json", "model.safetensors", "tokenizer.json")
    snapshot(tmp_path, PHI_4.model.id, *files, revision="v2")
    assert ("model.id", PHI_4.model.id) in missing(PHI_4, tmp_path)
    newer = replace(PHI_4, model=replace(PHI_4.model, revision="v2"))
    assert ("model.id", PHI_4.model.id) not in missing(newer, tmp_path)
    pinned = replace(PHI_4, model=replace(PHI_4.model, revision="0123abcd"))
    assert ("model.id", PHI_4.model.id) not in missing(pinned, tmp_path)


def test_what_is_built_in_or_a_folder_needs_no_cache(tmp_path: Path) -> None:
    assert missing(tiny(), tmp_path) == []
    local = replace(PHI_4, model=replace(PHI_4.model, id=str(tmp_path)))
    assert missing(replace(local, data=replace(local.data, source=str(tmp_path))), tmp_path) == []


def test_every_source_of_a_mixture_and_the_held_out_data_count(tmp_path: Path) -> None:
    sources = (DataSource(source="one/a"), DataSource(source="two/b"))
    mixture = replace(tiny(), data=replace(tiny().data, source=sources, evaluation="three/c"))
    assert missing(mixture, tmp_path) == [
        ("data.source", "one/a"),
        ("data.source", "two/b"),
        ("data.evaluation", "three/c"),
    ]


@pytest.mark.parametrize("internet", [True, False])
def test_run_is_submitted_only_if_offline_nodes_have_everything(
    internet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "cluster_name", lambda: "ours")
    _user_sites().mkdir(parents=True)
    lines = (
        f'title = "Ours"\npython = "python3"\ninternet = {str(internet).lower()}\n[environment]\n'
        f'HF_HOME = "{tmp_path}"\n'
    )
    (_user_sites() / "ours.toml").write_text(lines)
    spec = replace(PHI_4, slurm=replace(PHI_4.slurm, partition="gh", site="ours"))
    launch = Launch(
        plan=plan_of(spec), machine=QUAD, ds_config={}, argv=(), environment=(), forced=True
    )
    if internet:
        checks_elsewhere(launch, runs_dir=tmp_path)
    else:
        with rejected("not-cached", "not-cached"):
            checks_elsewhere(launch, runs_dir=tmp_path)
    script = batch_script(plan_of(spec), load_site("ours"), tmp_path / "run", 1)
    assert ("export HF_HUB_OFFLINE=1" in script) == (not internet)
