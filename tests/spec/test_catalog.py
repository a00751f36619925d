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
from so_tui.spec.run_spec import MACHINE_DECIDES
from tests.support.problems import codes, refusal, rejected

GOOD = 'extends = "tiny"\n[offload]\nratio = 0.25\n'
TINY = find_preset("tiny").spec


@pytest.fixture(autouse=True)
def _own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.spec.presets.user_folder", lambda: tmp_path)


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)


def test_built_in_presets_load_without_problems_tiny_last() -> None:
    catalog = load_catalog()
    assert catalog.problems == ()
    assert list(catalog.presets)[-1] == "tiny"
    for preset in catalog.presets.values():
        assert preset.origin == "built-in"
        assert Path(preset.path).is_file()
        assert with_values(preset.spec, {"data.source": "rows.jsonl"}).data.format == "auto"


def test_a_bad_user_preset_never_stops_the_others(tmp_path: Path) -> None:
    write(tmp_path, good=GOOD, broken='name = "broken"\n[model\nid = 1\n')
    write(tmp_path, wrong='extends = "tiny"\n[offload]\nratoi = 2\n')
    write(tmp_path, based='extends = "qwen3-14"\n', tiny='extends = "phi-4"\n')
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    catalog = load_catalog()
    good = catalog.presets["good"]
    assert (good.origin, good.spec.offload.ratio) == ("user", 0.25)
    assert catalog.presets["tiny"].origin == "built-in"
    problems = {Path(problem.file).stem: problem for problem in catalog.problems}
    assert {name: (problem.code, problem.field) for name, problem in problems.items()} == {
        "broken": ("invalid-toml", "preset"),
        "wrong": ("unknown-key", "offload.ratoi"),
        "based": ("unknown-preset", "extends"),
        "tiny": ("name-taken", "name"),
        "binary": ("unreadable", "preset"),
    }
    assert "line 2" in problems["broken"].message
    assert "Did you mean `ratio`?" in problems["wrong"].remedy
    assert "Did you mean `qwen3-14b`?" in problems["based"].remedy
    with pytest.raises(InputError, match=r"wrong\.toml: offload\.ratoi = 2"):
        find_preset("wrong")


def test_a_name_that_is_only_begun_is_completed() -> None:
    """Even where another one is more like it."""
    with pytest.raises(InputError, match="Did you mean `qwen3-4b-random`"):
        find_preset("qwen3-4b")
    with pytest.raises(InputError, match="Did you mean `qwen3-14b`"):
        find_preset("qwen3-14")
    with pytest.raises(InputError, match=r"Did you mean `llama-3\.1-8b` or `llama-3\.3-70b`\?"):
        find_preset("llama")


def test_circular_bases_are_a_problem(tmp_path: Path) -> None:
    write(tmp_path, a='extends = "b"\n', b='extends = "a"\n')
    problems = load_catalog().problems
    assert {problem.code for problem in problems} == {"circular-extends"}
    assert {problem.field for problem in problems} == {"extends"}
    assert any("a -> b -> a" in problem.message for problem in problems)


def test_a_file_may_have_the_name_of_the_preset_that_it_extends(tmp_path: Path) -> None:
    write(tmp_path, tiny='extends = "tiny"\n[train]\nmicro_batch = 3\n')
    found = find_preset(str(tmp_path / "tiny.toml"))
    assert (found.origin, found.spec.name, found.spec.train.micro_batch) == ("file", "tiny", 3)
    assert found.spec.model == TINY.model


def test_base_may_extend_another(tmp_path: Path) -> None:
    write(tmp_path, a='extends = "qwen3-14b"\n[train]\nsteps = 5\n')
    write(tmp_path, b='extends = "a"\n[train]\ntokens = 100\n')
    presets = load_catalog().presets
    a, b = presets["a"].spec, presets["b"].spec
    assert (a.train.steps, a.train.epochs) == (5, 0)
    assert (b.train.steps, b.train.tokens) == (0, 100)
    assert b.model.parameters == presets["qwen3-14b"].spec.model.parameters


def test_an_empty_or_absent_file_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "trial.toml"
    with rejected("file-not-found"):
        find_preset(str(path))
    path.write_text("")
    with pytest.raises(InputError) as caught:
        find_preset(str(path))
    assert set(codes(caught)) == {"missing", "no-length"}
    assert {problem.file for problem in caught.value.problems} == {str(path)}


def test_a_data_file_in_place_of_a_preset() -> None:
    problem = refusal(lambda: find_preset("/data/Rows.PARQUET"))
    assert problem.code == "data-not-preset"
    assert "--set data.source=/data/Rows.PARQUET" in problem.remedy


@pytest.mark.parametrize(("name", "text"), [("Makefile", "all:\n"), ("./models", None)])
def test_a_file_or_folder_that_is_not_a_preset(
    name: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir() if text is None else Path(name).write_text(text)
    problem = refusal(lambda: find_preset(name))
    assert (problem.code, problem.value) == ("not-a-preset", f'"{Path(name)}"')
    assert "so-tui presets" in problem.remedy


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ("", "invalid-content"),
        ('["a", [4, 0], true, "linear"]', "invalid-content"),
        ('["a", [-4], true, "linear"]', "invalid-content"),
        ('["a", [4], true, "linear", "b"]', "table-unknown-tie"),
    ],
)
def test_bad_table_is_a_problem(tmp_path: Path, tensors: str, code: str) -> None:
    write(tmp_path, trial=f"{GOOD}\n[[model.parameters]]\ntensors = [{tensors}]\n")
    (problem,) = load_catalog().problems
    assert (problem.code, problem.field) == (code, "model.parameters")
    assert "so_tui_trainer.tools.presets" in problem.remedy
    assert problem.file.endswith("trial.toml")


def test_saved_presets_come_back_the_same(tmp_path: Path) -> None:
    values = {"offload.ratio": "0.35", "train.steps": "100", "gpus": "0,1"}
    spec = with_values(find_preset("qwen3-14b").spec, values | {"model.attention": "sdpa"})
    text = save_preset(spec, "mine", base="qwen3-14b").read_text()
    assert 'extends = "qwen3-14b"' in text
    assert not any(word in text for word in ("parameters", "hidden_size", "title"))
    loaded = load_catalog().presets["mine"].spec
    assert with_values(loaded, {"name": "qwen3-14b", "title": spec.title}) == spec
    assert [child.name for child in tmp_path.iterdir()] == ["mine.toml"]
    save_preset(TINY, "whole", base=None)
    assert "extends" not in (tmp_path / "whole.toml").read_text()
    whole = load_catalog().presets["whole"].spec
    assert with_values(whole, {"name": "tiny", "gpus": "2"}) == with_values(TINY, {"gpus": "2"})
    assert whole.fixed == ()


def test_keys_of_own_presets_are_fixed_and_those_built_in_are_not(tmp_path: Path) -> None:
    write(
        tmp_path,
        low='extends = "tiny"\n[offload]\nratio = 0.9\n[train]\nseed = 7\n',
        mine='extends = "low"\ngpus = 2\n[checkpoint]\nkeep = 2\n',
        open='extends = "mine"\ngpus = "auto"\n[offload]\nratio = "auto"\n',
    )
    presets = load_catalog().presets
    assert all(not preset.spec.fixed for preset in presets.values() if preset.origin == "built-in")
    assert presets["low"].spec.fixed == ("offload.ratio",)
    assert presets["mine"].spec.fixed == ("gpus", "offload.ratio", "checkpoint.keep")
    assert presets["open"].spec.fixed == ("checkpoint.keep",)
    assert find_preset(str(tmp_path / "open.toml")).spec == presets["open"].spec
    assert find_preset("tiny:as-published").spec.fixed == MACHINE_DECIDES


def test_a_saved_preset_keeps_what_is_fixed_and_what_is_not() -> None:
    fixed = with_values(TINY, {"offload.ratio": "0.9", "gpus": "2"})
    save_preset(fixed, "mine", base="tiny")
    assert load_catalog().presets["mine"].spec.fixed == ("gpus", "offload.ratio")
    mine = with_values(load_catalog().presets["mine"].spec, {"gpus": "auto"})
    for name, base in (("more", "mine"), ("whole", None)):
        save_preset(mine, name, base=base)
        assert load_catalog().presets[name].spec.fixed == ("offload.ratio",)


def test_a_preset_saved_over_itself_keeps_its_base() -> None:
    def saved(spec: RunSpec, base: str, **changes: str) -> RunSpec:
        path = save_preset(with_values(spec, changes), "mine", base=base)
        assert 'extends = "tiny"' in path.read_text()
        return load_catalog().presets["mine"].spec

    mine = saved(TINY, "tiny", **{"offload.ratio": "0.5"})
    again = saved(mine, "mine", **{"train.seed": "7"})
    assert (again.offload.ratio, again.train.seed) == (0.5, 7)


def test_a_file_that_could_not_be_read_is_not_overwritten(tmp_path: Path) -> None:
    """And a preset is saved to the file that bears its name."""
    write(tmp_path, mine="half [ typed", file='name = "other"\n' + GOOD)
    with rejected("name-taken"):
        save_preset(TINY, "mine", base="tiny")
    assert (tmp_path / "mine.toml").read_text() == "half [ typed"
    assert save_preset(TINY, "other", base="tiny") == tmp_path / "file.toml"
    assert "other" in load_catalog().presets


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
        save_preset(TINY, name, base=base)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("so_tui.spec.presets.user_folder", lambda: tmp_path / "file" / "presets")
    with rejected("not-writable"):
        save_preset(TINY, "mine", base="tiny")


def test_the_user_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "so-tui" / "presets"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert user_folder() == Path.home() / ".config" / "so-tui" / "presets"


@pytest.mark.parametrize("name", ["builtin:../pyproject.toml", "builtin:/etc/passwd"])
def test_an_unknown_built_in_source_is_a_problem(name: str) -> None:
    problem = refusal(lambda: resolve_source(name))
    assert problem.code == "unknown-builtin"
    assert "builtin:tiny" in problem.remedy


def test_a_preset_has_a_variant_as_published() -> None:
    plain, variant = (find_preset(f"gpt-oss-20b{suffix}").spec for suffix in ("", ":as-published"))
    offload = variant.offload
    assert (offload.engine, offload.config) == ("deepspeed", "published")
    assert offload.sub_group_size == 800_000_000
    assert (variant.data.sequence_length, variant.train.micro_batch) == (8192, 4)
    assert (variant.data.loss, variant.data.packing) == ("padded", False)
    assert (variant.train.learning_rate, variant.train.schedule) == (1e-3, "constant")
    assert (variant.train.weight_decay, variant.train.seed) == (0.0, 42)
    assert (variant.model.attention, variant.data.source) == ("eager", plain.data.source)
    assert variant.name == "gpt-oss-20b-as-published"
    assert variant.model.parameters == plain.model.parameters
    with rejected("unknown-preset"):
        find_preset("nothing:as-published")
    with rejected("not-as-published"):
        as_published(msgspec.structs.replace(plain, gpus=3))
    with rejected("published-config"):  # it is one of DeepSpeed's engine
        with_values(find_preset("qwen3-14b").spec, {"offload.config": "published"})
    elsewhere = with_values(variant, {"data.source": "towns.json"}).data
    assert (elsewhere.format, elsewhere.split) == ("alpaca-deepspeed", "train")
    ours = with_values(
        variant,
        {
            "offload.config": "so-tui",
            "offload.engine": "so-tui",
            "data.loss": "assistant",
            "data.format": "auto",
            "data.packing": "true",
            "model.attention": "auto",
        },
    )
    assert ours.offload.own_engine
    assert ours.data.packing
    for mode in ("gpu", "auto"):  # the examples have none for these
        with rejected("published-config"):
            with_values(variant, {"offload.mode": mode})


def test_saved_preset_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("work", "elsewhere"):
        (tmp_path / folder).mkdir()
    rows = tmp_path / "work" / "rows.json"
    rows.write_text("[]")
    monkeypatch.chdir(rows.parent)
    values = {"data.source": "rows.json", "data.evaluation": "owner/name"}
    save_preset(with_values(TINY, values), "mine", base="tiny")
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = load_catalog().presets["mine"].spec.data
    assert (data.source, data.evaluation) == (str(rows), "owner/name")
