"""A preset that anybody may have written: it gets one message with a code, in bounded time, and the
others work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from so_tui.spec import InputError, find_preset, load_catalog, with_values
from tests.support.hostile_files import link_device, make_sparse

MINE = 'extends = "tiny"\n'
TABLE = """
extends = "tiny"
[[model.parameters]]
repeat = {repeat}
tensors = [["a.{{i}}", [{size}], true, "linear"], ["b", [2], true, "linear", "a.0"]]
"""

TEXTS: dict[str, tuple[str, str]] = {
    "nested lists": ("gpus = " + "[" * 5000, "too-deep"),
    "nested tables": ("model = " + "{a=" * 5000, "too-deep"),
    "a dotted key": ("model." + ".".join("a" * 20_000) + " = 1", "too-deep"),
    "a dotted key of quoted names": ("model." + ".".join(['"a"'] * 20_000) + " = 1", "too-deep"),
    "lists just deep enough": (f"{MINE}[model.config]\na = {'[' * 40}{']' * 40}", "too-deep"),
    "a decimal integer": ("gpus = " + "9" * 5000, "invalid-toml"),
    "a hexadecimal integer": (f"{MINE}[train]\nsteps = 0x{'f' * 3000}", "invalid-toml"),
    "a date that does not exist": ("gpus = 2026-02-31", "invalid-toml"),
    "a model type that is a list": (f"{MINE}[model.config]\nmodel_type = []\nvocab_size = 7", ""),
    "a huge repeat": (TABLE.format(repeat=200_000_000, size=2), "invalid-content"),
    "a huge tensor": (TABLE.format(repeat=2, size=2**62), "table-too-large"),
    "many keys": ("\n".join(f"a{number}=1" for number in range(100_000)), "not-a-preset"),
    "many unknown keys": (
        MINE + "\n".join(f"tra{number}=1" for number in range(80_000)),
        "unknown-key",
    ),
    "a name of another type": (f"{MINE}name = [1]", "wrong-type"),
    "a name with a newline": (f'{MINE}name = "x\\n"', "invalid-name"),
    "a base of another type": ('extends = {a = ["x"]}', "unknown-preset"),
    "sections that are lists": (f"{MINE}model = []\ntrain = [[]]\ndata = 7", "not-a-section"),
    "10 MB": ("#" * 10_000_000, "too-large"),
    "NUL": ("name = '\0'", "invalid-toml"),
}


@pytest.fixture(autouse=True)
def _own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.spec.presets.user_folder", lambda: tmp_path)


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_text_is_one_message(name: str, tmp_path: Path) -> None:
    text, code = TEXTS[name]
    (tmp_path / "hostile.toml").write_text(text)
    (tmp_path / "good.toml").write_text(MINE)
    begun = time.process_time()
    catalog = load_catalog()
    assert time.process_time() - begun < 2
    assert {"good", "tiny"} <= set(catalog.presets)
    if code:
        assert code in {problem.code for problem in catalog.problems}
        assert len(catalog.problems) <= 100
        assert max(len(str(problem)) for problem in catalog.problems) < 10_000
        with pytest.raises(InputError):
            find_preset(str(tmp_path / "hostile.toml"))


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (os.mkfifo, "not-a-file"),
        (link_device, "not-a-file"),
        (make_sparse, "too-large"),
        (Path.mkdir, "not-a-preset"),
        (lambda path: path.symlink_to(path), "not-a-file"),
    ],
)
def test_only_regular_files_of_bounded_size_are_read(
    make: Callable[[Path], None], code: str, tmp_path: Path
) -> None:
    make(tmp_path / "hostile.toml")
    (tmp_path / "good.toml").write_text(MINE)
    catalog = load_catalog()
    assert [problem.code for problem in catalog.problems] == [code]
    assert "good" in catalog.presets
    with pytest.raises(InputError):
        find_preset(str(tmp_path / "hostile.toml"))


def test_a_long_chain_of_bases_is_refused_and_a_short_one_is_not(tmp_path: Path) -> None:
    for number, base in enumerate(["tiny", *(f"p{number}" for number in range(1199))]):
        (tmp_path / f"p{number}.toml").write_text(f'extends = "{base}"\n')
    catalog = load_catalog()
    assert "p10" in catalog.presets
    assert {problem.code for problem in catalog.problems} == {"circular-extends"}


def test_a_folder_of_presets_that_is_a_file_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "presets").write_text("")
    monkeypatch.setattr("so_tui.spec.presets.user_folder", lambda: tmp_path / "presets")
    assert "tiny" in load_catalog().presets


DEEP = ("[" * 5000, "9" * 5000, "0x" + "f" * 5000, ".".join("a" * 5000), "{a=" * 3000)
KEYS = ("gpus", "train.steps", "offload.ratio", "model.leaf_modules", "data.source", "name")


@pytest.mark.parametrize("value", [*DEEP, "\udcff", "nan"])
@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_value_of_set_is_a_problem_of_its_key(key: str, value: str) -> None:
    found: set[str] = set()
    try:
        with_values(find_preset("tiny").spec, {key: value})
    except InputError as error:
        found = {problem.field for problem in error.problems}
    assert found == {key} or (not found and key in ("data.source", "name"))
