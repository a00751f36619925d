"""What nodes without internet would miss, by the files of the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from so_tui.launch.checks import checks_elsewhere
from so_tui.launch.slurm import client
from so_tui.launch.slurm.executor import _not_cached
from so_tui.launch.slurm.script import _user_sites, batch_script, load_site
from so_tui.plan.plan import Launch
from so_tui.spec import DataSource, RunSpec, with_values
from tests.support.launching import tiny
from tests.support.planning import CATALOG, QUAD
from tests.support.plans import plan_of
from tests.support.problems import rejected

PHI_4 = CATALOG.presets["phi-4"].spec
MODEL, DATA = ("model.id", "microsoft/phi-4"), ("data.source", "tatsu-lab/alpaca")


def missing(spec: RunSpec, home: Path) -> list[tuple[str, str]]:
    found = _not_cached(spec, {"HF_HOME": str(home)}, "here")
    return [(problem.field, problem.value) for problem in found]


def snapshot(home: Path, *files: str, revision: str = "main") -> Path:
    """Make a model as huggingface_hub caches it."""
    model = home / "hub" / f"models--{PHI_4.model.id.replace('/', '--')}"
    folder = model / "snapshots" / "0123abcd"
    folder.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / revision).write_text("0123abcd")
    for file in files:
        (folder / file).touch()
    return folder


def test_half_a_download_is_missing_by_the_name_of_a_file(tmp_path: Path) -> None:
    assert missing(PHI_4, tmp_path) == [MODEL, DATA]
    folder = snapshot(tmp_path, "config.json", "tokenizer.json", "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    (problem, *_) = _not_cached(PHI_4, {"HF_HOME": str(tmp_path)}, "here")
    assert (problem.code, problem.field) == ("not-cached", "model.id")
    assert "b.safetensors" in problem.message
    (folder / "b.safetensors").touch()
    assert missing(PHI_4, tmp_path) == [DATA]
    for damaged in ("{", "[]", '{"weight_map": {"x": 1}}', "[" * 10_000):
        index.write_text(damaged)
        assert missing(PHI_4, tmp_path) == [MODEL, DATA]


def test_another_revision_is_another_model(tmp_path: Path) -> None:
    snapshot(tmp_path, "config.json", "model.safetensors", "tokenizer.json", revision="v2")
    (tmp_path / "datasets" / "tatsu-lab___alpaca").mkdir(parents=True)
    assert missing(PHI_4, tmp_path) == [MODEL]
    for revision in ("v2", "0123abcd"):
        assert missing(with_values(PHI_4, {"model.revision": revision}), tmp_path) == []


def test_every_source_counts_that_is_not_built_in_or_a_folder(tmp_path: Path) -> None:
    def with_data(spec: RunSpec, **data: Any) -> RunSpec:
        return replace(spec, data=replace(spec.data, **data))

    assert missing(tiny(), tmp_path) == []
    local = replace(PHI_4, model=replace(PHI_4.model, id=str(tmp_path)))
    assert missing(with_data(local, source=str(tmp_path)), tmp_path) == []
    sources = (DataSource(source="one/a"), DataSource(source="two/b"))
    assert missing(with_data(tiny(), source=sources, evaluation="three/c"), tmp_path) == [
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
    (_user_sites() / "ours.toml").write_text(
        f'title = "Ours"\npython = "python3"\ninternet = {str(internet).lower()}\n[environment]\n'
        f'HF_HOME = "{tmp_path}"\n'
    )
    plan = plan_of(replace(PHI_4, slurm=replace(PHI_4.slurm, partition="gh", site="ours")))
    launch = Launch(plan=plan, machine=QUAD, ds_config={}, argv=(), environment=(), forced=True)
    if internet:
        checks_elsewhere(launch, runs_dir=tmp_path)
    else:
        with rejected("not-cached", "not-cached"):
            checks_elsewhere(launch, runs_dir=tmp_path)
    script = batch_script(plan, load_site("ours"), tmp_path / "run", 1)
    assert ("export HF_HUB_OFFLINE=1" in script) == (not internet)
