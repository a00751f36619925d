"""Presets on disk: built-in, user and single files. An invalid file never hides the others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from so_tui.folders import user_folder
from so_tui.spec import (
    InputError,
    RunSpec,
    find_preset,
    load_catalog,
    resolve_source,
    save_preset,
    with_values,
)
from so_tui.spec.presets import as_published
from tests.support.problems import codes, rejected

GOOD = 'extends = "tiny"\n[offload]\nratio = 0.25\n'


@pytest.fixture(autouse=True)
def _own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the user's presets in ``tmp_path``."""
    monkeypatch.setattr("so_tui.spec.presets.user_folder", lambda: tmp_path)


def test_built_in_presets_load_without_problems_tiny_last(tmp_path: Path) -> None:
    catalog = load_catalog()
    assert catalog.problems == ()
    assert list(catalog.presets)[-1] == "tiny"
    for preset in catalog.presets.values():
        assert preset.origin == "built-in"
        assert Path(preset.path).is_file()
        assert with_values(preset.spec, {"data.source": "rows.jsonl"}).data.format == "auto"


def test_a_bad_user_preset_never_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "broken.toml").write_text('name = "broken"\n[model\nid = 1\n')
    (tmp_path / "wrong.toml").write_text('extends = "tiny"\n[offload]\nratoi = 2\n')
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    catalog = load_catalog()
    assert catalog.presets["good"].origin == "user"
    assert catalog.presets["good"].spec.offload.ratio == 0.25
    assert "tiny" in catalog.presets
    problems = {Path(problem.file).name: problem for problem in catalog.problems}
    assert {name: (problem.code, problem.field) for name, problem in problems.items()} == {
        "broken.toml": ("invalid-toml", "preset"),
        "wrong.toml": ("unknown-key", "offload.ratoi"),
        "binary.toml": ("unreadable", "preset"),
    }
    assert "line 2" in problems["broken.toml"].message
    assert "Did you mean `ratio`?" in problems["wrong.toml"].remedy
    with pytest.raises(InputError, match=r"wrong\.toml: offload\.ratoi = 2"):
        find_preset("wrong")


def test_an_unknown_base_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "qwen3-14"\n')
    (problem,) = load_catalog().problems
    assert (problem.field, problem.code) == ("extends", "unknown-preset")
    assert "Did you mean `qwen3-14b`?" in problem.remedy


def test_circular_bases_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b"\n')
    (tmp_path / "b.toml").write_text('extends = "a"\n')
    problems = load_catalog().problems
    assert {(problem.code, problem.field) for problem in problems} == {
        ("circular-extends", "extends")
    }
    assert {"a -> b -> a" in problem.message for problem in problems} == {True, False}


def test_a_file_may_have_the_name_of_the_preset_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text('extends = "tiny"\n[train]\nmicro_batch = 3\n')
    found = find_preset(str(tmp_path / "tiny.toml"))
    assert (found.spec.name, found.spec.train.micro_batch) == ("tiny", 3)
    assert found.spec.model == find_preset("tiny").spec.model


def test_base_may_extend_another(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "qwen3-14b"\n[train]\nsteps = 5\n')
    (tmp_path / "b.toml").write_text('extends = "a"\n[train]\ntokens = 100\n')
    presets = load_catalog().presets
    assert (presets["a"].spec.train.steps, presets["a"].spec.train.epochs) == (5, 0)
    assert (presets["b"].spec.train.steps, presets["b"].spec.train.tokens) == (0, 100)
    assert presets["b"].spec.model.parameters == presets["qwen3-14b"].spec.model.parameters


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text('extends = "phi-4"\n')
    catalog = load_catalog()
    assert catalog.presets["tiny"].origin == "built-in"
    assert [(problem.code, problem.value) for problem in catalog.problems] == [
        ("name-taken", '"tiny"')
    ]


def test_an_unknown_preset_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        find_preset("qwen3-15b")
    (problem,) = caught.value.problems
    assert (problem.code, problem.value) == ("unknown-preset", '"qwen3-15b"')
    assert "Did you mean `qwen3-14b`?" in problem.remedy
    assert "tiny" in problem.remedy


def test_a_path_is_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "trial.toml"
    path.write_text(GOOD)
    preset = find_preset(str(path))
    assert (preset.origin, preset.spec.name, preset.spec.offload.ratio) == ("file", "trial", 0.25)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {"file-not-found"}),
        ("a = \n", {"invalid-toml"}),
        ("x = 1\nx = 2\n", {"invalid-toml"}),
        ("", {"missing", "no-length"}),
    ],
)
def test_malformed_file_is_a_problem(tmp_path: Path, text: str | None, expected: set[str]) -> None:
    path = tmp_path / "trial.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as caught:
        find_preset(str(path))
    assert set(codes(caught)) == expected
    assert {problem.file for problem in caught.value.problems} == {str(path)}


@pytest.mark.parametrize("name", ["rows.jsonl", "some/rows.csv", "/data/Rows.PARQUET"])
def test_a_data_file_in_place_of_a_preset(name: str) -> None:
    with pytest.raises(InputError) as caught:
        find_preset(name)
    (problem,) = caught.value.problems
    assert problem.code == "data-not-preset"
    assert f"--set data.source={name}" in problem.remedy


@pytest.mark.parametrize("before", ["", "./"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "so-tui: read me\n"),
        ("Makefile", "all:\n"),
        ("models", None),
        ("pyproject.toml", "[build-system]\n[project]\n"),
    ],
)
def test_a_file_or_folder_that_is_not_a_preset(
    name: str, text: str | None, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir() if text is None else Path(name).write_text(text)
    with pytest.raises(InputError) as caught:
        find_preset(before + name)
    (problem,) = caught.value.problems
    assert (problem.code, problem.value) == ("not-a-preset", f'"{name}"')
    assert "so-tui presets" in problem.remedy


@pytest.mark.parametrize(
    ("tensors", "code", "tensor"),
    [
        ("", "table-empty-block", ""),
        ('["a", [4, 0], true, "linear"]', "table-invalid-shape", "a"),
        ('["a", [-4], true, "linear"]', "table-invalid-shape", "a"),
        ('["a", [4], true, "linear", "b"]', "table-unknown-tie", "a"),
    ],
)
def test_bad_table_is_a_problem(tmp_path: Path, tensors: str, code: str, tensor: str) -> None:
    (tmp_path / "trial.toml").write_text(f"{GOOD}\n[[model.parameters]]\ntensors = [{tensors}]\n")
    catalog = load_catalog()
    (problem,) = catalog.problems
    assert (problem.code, problem.value.strip('"')) == (code, tensor)
    assert "so_tui_trainer.tools.presets" in problem.remedy
    assert problem.file.endswith("trial.toml")
    assert "tiny" in catalog.presets


def test_saved_presets_come_back_the_same(tmp_path: Path) -> None:
    spec = with_values(
        find_preset("qwen3-14b").spec,
        {"offload.ratio": "0.35", "train.steps": "100", "gpus": "0,1", "model.attention": "sdpa"},
    )
    path = save_preset(spec, "mine", base="qwen3-14b")
    text = path.read_text()
    assert 'extends = "qwen3-14b"' in text
    assert "parameters" not in text
    assert "hidden_size" not in text
    loaded = load_catalog().presets["mine"]
    assert with_values(loaded.spec, {"name": "qwen3-14b", "title": spec.title}) == spec
    assert [child.name for child in tmp_path.iterdir()] == ["mine.toml"]


def test_a_preset_saved_over_itself_keeps_its_base(tmp_path: Path) -> None:
    def saved(spec: RunSpec, base: str, **changes: str) -> RunSpec:
        path = save_preset(with_values(spec, changes), "mine", base=base)
        assert 'extends = "tiny"' in path.read_text()
        return load_catalog().presets["mine"].spec

    mine = saved(find_preset("tiny").spec, "tiny", **{"offload.ratio": "0.5"})
    again = saved(mine, "mine", **{"train.seed": "7"})
    assert (again.offload.ratio, again.train.seed) == (0.5, 7)


def test_a_preset_has_another_label_than_its_base(tmp_path: Path) -> None:
    (tmp_path / "older.toml").write_text(GOOD)
    (tmp_path / "titled.toml").write_text('title = "Mine"\n' + GOOD)
    changed = with_values(find_preset("tiny").spec, {"train.seed": "7"})
    path = save_preset(changed, "saved", base="tiny")
    saved = load_catalog().presets["saved"].spec
    save_preset(saved, "saved", base="saved")
    presets = load_catalog().presets
    labels = [presets[name].spec.label for name in ("older", "titled", "saved", "tiny")]
    assert labels == ["older", "Mine", "saved", "tiny (embedded)"]
    assert "title" not in path.read_text()


def test_a_file_that_could_not_be_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("half [ typed")
    with pytest.raises(InputError, match="is taken by") as caught:
        save_preset(find_preset("tiny").spec, "mine", base="tiny")
    assert codes(caught) == ["name-taken"]
    assert (tmp_path / "mine.toml").read_text() == "half [ typed"


def test_a_preset_is_saved_to_the_file_that_bears_its_name(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text('name = "mine"\n' + GOOD)
    path = save_preset(find_preset("tiny").spec, "mine", base="tiny")
    assert path == tmp_path / "file.toml"
    assert load_catalog().problems == ()


def test_a_preset_without_base_is_complete(tmp_path: Path) -> None:
    spec = find_preset("tiny").spec
    save_preset(spec, "whole", base=None)
    assert "extends" not in (tmp_path / "whole.toml").read_text()
    assert with_values(load_catalog().presets["whole"].spec, {"name": "tiny"}) == spec


@pytest.mark.parametrize(
    ("name", "base", "code"),
    [
        ("Bad Name", "tiny", "invalid-name"),
        ("tiny", "tiny", "builtin-name"),
        ("mine", "tinny", "unknown-preset"),
    ],
)
def test_saving_refuses_bad_names(tmp_path: Path, name: str, base: str, code: str) -> None:
    with rejected(code):
        save_preset(find_preset("tiny").spec, name, base=base)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("so_tui.spec.presets.user_folder", lambda: tmp_path / "file" / "presets")
    with rejected("not-writable"):
        save_preset(find_preset("tiny").spec, "mine", base="tiny")


def test_the_user_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "so-tui" / "presets"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert user_folder() == Path.home() / ".config" / "so-tui" / "presets"


def test_built_in_sources_resolve_to_files() -> None:
    assert Path(resolve_source("builtin:tiny/rows.jsonl")).is_file()
    assert Path(resolve_source("builtin:tiny")).is_dir()
    assert resolve_source("tatsu-lab/alpaca") == "tatsu-lab/alpaca"


@pytest.mark.parametrize(
    "name", ["builtin:tinny", "builtin:../pyproject.toml", "builtin:/etc/passwd"]
)
def test_an_unknown_built_in_source_is_a_problem(name: str) -> None:
    with pytest.raises(InputError, match="builtin:tiny") as caught:
        resolve_source(name)
    assert codes(caught) == ["unknown-builtin"]


def test_a_preset_has_a_variant_as_published() -> None:
    plain, variant = (
        find_preset(name).spec for name in ("gpt-oss-20b", "gpt-oss-20b:as-published")
    )
    offload = variant.offload
    assert (offload.engine, offload.config) == ("deepspeed", "published")
    assert offload.sub_group_size == 800_000_000
    assert (variant.data.sequence_length, variant.train.micro_batch) == (8192, 4)
    assert variant.name == "gpt-oss-20b-as-published"
    assert variant.model.parameters == plain.model.parameters
    with rejected("unknown-preset"):
        find_preset("nothing:as-published")
    with rejected("not-as-published"):
        as_published(msgspec.structs.replace(plain, gpus=3))
    with rejected("published-config"):  # it is one of DeepSpeed's engine
        with_values(find_preset("qwen3-14b").spec, {"offload.config": "published"})


def test_saved_preset_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    for folder in (work, elsewhere):
        folder.mkdir()
    (work / "rows.json").write_text("[]")
    monkeypatch.chdir(work)
    changed = with_values(
        find_preset("tiny").spec, {"data.source": "rows.json", "data.evaluation": "owner/name"}
    )
    save_preset(changed, "mine", base="tiny")
    monkeypatch.chdir(elsewhere)
    data = load_catalog().presets["mine"].spec.data
    assert (data.source, data.evaluation) == (str(work / "rows.json"), "owner/name")
