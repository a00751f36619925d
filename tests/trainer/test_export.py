"""What an export may replace, and what it leaves behind; real checkpoints are exported in ``test_runs.py``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from so_tui.spec import InputError
from so_tui_trainer.export import Mark, export, refuse_foreign, replacing

MARK = Mark(run="r", step=5, version="1")


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(folder: Path, text: str) -> None:
    with replacing(folder, MARK) as partial:
        (partial / "weights").write_text(text)


def base_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("a base model")


@pytest.mark.parametrize("make", [base_model, lambda path: path.write_text("a file")])
def test_what_is_no_export_is_refused_before_anything_is_read_or_written(make: Callable[[Path], None], tmp_path: Path) -> None:
    there = tmp_path / "base"
    make(there)
    link = tmp_path / "link"
    link.symlink_to(there)
    before = contents(tmp_path)
    for target in (there, link):
        with pytest.raises(InputError) as caught:
            export(tmp_path / "no checkpoint", target, "r")
        assert (caught.value.problems[0].field, caught.value.problems[0].value) == ("--to", str(there))
        assert "empty folder" in caught.value.problems[0].remedy
    assert contents(tmp_path) == before


def test_an_empty_folder_and_an_export_are_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    refuse_foreign(folder)
    write(folder, "first")
    assert json.loads((folder / "so_tui_export.json").read_text()) == {"run": "r", "step": 5, "version": "1"}
    (folder / "gone").touch()
    write(folder, "second")
    assert (folder / "weights").read_text() == "second"
    assert not (folder / "gone").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "first")
    before = contents(tmp_path)
    with pytest.raises(OSError, match="full"), replacing(folder, MARK):
        raise OSError("the disk is full")
    assert contents(tmp_path) == before


def test_what_was_put_there_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(InputError), replacing(tmp_path / "model", MARK):
        base_model(tmp_path / "model")
    assert contents(tmp_path) == {"model/config.json": "{}", "model/model.safetensors": "a base model"}


@pytest.mark.parametrize("suffix", [".partial", ".old"])
def test_folders_of_others_beside_it_are_not_taken_for_leftovers(suffix: str, tmp_path: Path) -> None:
    base_model(tmp_path / f"model{suffix}")
    before = contents(tmp_path)
    with pytest.raises(InputError), replacing(tmp_path / "model", MARK):
        pytest.fail("began to write")
    assert contents(tmp_path) == before
