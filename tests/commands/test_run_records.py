"""Runs side by side, notes and tags, and metrics for other programs, by commands."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from so_tui.cli import main
from so_tui.commands.parser import build_parser
from so_tui.folders import user_folder
from so_tui.runs import MetricsWriter, RunDirectory, read_spec, read_state
from so_tui.runs.export import COLUMNS
from so_tui.runs.listing import LONGEST_NOTE, read_notes
from so_tui.runs.records import EvaluationRecord, ResumedRecord
from so_tui.runs.results import recent_results, result_of_order, result_text
from so_tui.settings import RunListSettings
from so_tui.spec import find_preset, load_catalog, save_preset
from tests.support.make_run import write_run
from tests.support.records import step_record
from tests.support.schemas import valid


@pytest.fixture
def two(runs_dir: Path) -> tuple[RunDirectory, RunDirectory]:
    return (
        ended_run(runs_dir, "one", steps=30, total=30),
        ended_run(runs_dir, "other", "failed", steps=60, total=60, preset="tiny", gpus=2),
    )


def ended_run(
    runs_dir: Path, name: str, state: Any = "finished", *, steps: int = 0, **others: Any
) -> RunDirectory:
    return write_run(runs_dir, steps=steps, seconds_of_samples=1, state=state, name=name, **others)


def empty_run(runs_dir: Path, name: str) -> RunDirectory:
    run = ended_run(runs_dir, name)
    for path in run.metrics_dir.iterdir():
        path.unlink()
    return run


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_runs_are_compared_by_what_differs_and_what_came_of_them(
    two: tuple[RunDirectory, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "one", "other", "one", "--json"]) == 0
    first, second = valid("compare", capsys.readouterr().out)["runs"]
    assert (
        first["settings"]["data.sequence_length"],
        second["settings"]["data.sequence_length"],
    ) == ("4096", "256")
    assert all(first["settings"][key] != second["settings"][key] for key in first["settings"])
    assert first["results"]["loss"] > 0
    assert first["results"]["tokens_per_s"] > 0
    assert main(["compare", "one", "other"]) == 0
    text = capsys.readouterr().out
    for word in ("one", "other", "tokens/s", "data.sequence_length", "finished at step 30"):
        assert word in text, word
    assert main(["compare", "one", "nothing"]) == 2


def test_notes_and_tags_are_kept_and_filter(
    two: tuple[RunDirectory, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = two
    assert (
        main(["note", "one", "--text", "warm-up\x1b[2J too short", "--tag", "paper", "--tag", "v2"])
        == 0
    )
    assert capsys.readouterr().out == "warm-up\\x1b[2J too short\n#paper #v2\n"
    assert main(["note", "one", "--untag", "v2", "--json"]) == 0
    assert valid("note", capsys.readouterr().out)["tags"] == ["paper"]
    assert main(["runs", "--tag", "paper", "--json"]) == 0
    assert [run["name"] for run in valid("runs", capsys.readouterr().out)["runs"]] == ["one"]
    for wrong in (
        ["--tag", "two words"],
        ["--tag", "-x\x1b"],
        ["--text", "x" * (LONGEST_NOTE + 1)],
    ):
        assert main(["note", "one", f"{wrong[0]}={wrong[1]}"]) == 2
    assert main(["note", "one", "--text="]) == 0
    assert read_notes(one).note == ""
    one.notes_path.write_text('{"tags": ["\\u001b[2J", "ok"], "note": "' + "y" * 9000 + '"}')
    assert read_notes(one).tags == ("ok",)
    assert len(read_notes(one).note) == LONGEST_NOTE
    one.notes_path.write_bytes(b"\xff")
    assert read_notes(one).tags == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a run to another user")
def test_another_users_run_gets_no_notes(two: tuple[RunDirectory, RunDirectory]) -> None:
    os.chown(two[0].path, 65534, 65534)
    assert main(["note", "one", "--tag", "mine"]) == 3
    assert not two[0].notes_path.exists()


def test_runs_are_sorted_as_asked_or_as_set(
    two: tuple[RunDirectory, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    def names(*options: str) -> list[str]:
        main(["runs", "--json", *options])
        return [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]]

    assert names() == ["other", "one"]
    assert names("--sort", "name") == ["one", "other"]
    assert names("--sort", "state") == ["other", "one"]
    assert names("--sort", "step") == ["other", "one"]
    assert main(["settings", "runs.sort=name"]) == 0
    capsys.readouterr()
    assert names() == ["one", "other"]
    by_loss = names("--sort", "loss")
    main(["compare", *by_loss, "--json"])
    compared = [run["results"] for run in json.loads(capsys.readouterr().out)["runs"]]
    assert [run["loss"] for run in compared] == sorted(run["loss"] for run in compared)
    main(["runs", "--json"])
    listed = valid("runs", capsys.readouterr().out)["runs"]
    assert (
        sorted((run["results"] for run in listed), key=lambda results: results["loss"]) == compared
    ), "the same figures everywhere"
    main(["runs"])
    table = capsys.readouterr().out
    assert all(f"{results['loss']:.4f}" in table for results in compared)


def test_the_list_takes_the_orders_of_the_settings() -> None:
    for order in get_args(get_type_hints(RunListSettings)["sort"]):
        assert build_parser().parse_args(["runs", "--sort", order]).sort == order


@pytest.mark.parametrize(
    ("sort", "heading"), [("tokens/s", "tokens/s"), ("mfu", "MFU"), ("memory", "GPU memory")]
)
def test_the_list_shows_what_it_is_sorted_by(
    two: tuple[RunDirectory, RunDirectory],
    capsys: pytest.CaptureFixture[str],
    sort: str,
    heading: str,
) -> None:
    key = result_of_order(sort)
    assert key is not None
    main(["runs", "--sort", sort])
    table = capsys.readouterr().out
    assert heading in table.splitlines()[0]
    for run in two:
        assert (
            result_text(recent_results(run, read_spec(run), read_state(run).total_steps), key)
            in table
        )
    main(["runs"])
    assert heading not in capsys.readouterr().out.splitlines()[0]


def test_every_step_is_in_the_table_once(runs_dir: Path, tmp_path: Path) -> None:
    """And superseded ones are not."""
    run = empty_run(runs_dir, "resumed")
    for attempt, steps in ((1, range(1, 31)), (2, range(21, 41))):
        writer = MetricsWriter(run, attempt, segment_bytes=5_000)
        if attempt == 2:
            writer.append(ResumedRecord(attempt=2, time=1.0, step=20))
        for step in steps:
            loss = float("nan") if step == 7 else float(step)
            writer.append(step_record(step, attempt=attempt, loss=loss))
        writer.close()
    target = tmp_path / "out.csv"
    assert main(["export-metrics", "resumed", "--to", str(target)]) == 0
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(int(row["step"]), int(row["attempt"])) for row in rows] == [
        (step, 1 if step <= 20 else 2) for step in range(1, 41)
    ]
    assert (rows[6]["loss"], rows[7]["loss"]) == ("nan", "8.0")
    for refused in (target, tmp_path / "out.xlsx", tmp_path / "no" / "out.csv"):
        assert main(["export-metrics", "resumed", "--to", str(refused)]) == 2
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.csv"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_evaluations_are_in_the_row_of_their_step(
    runs_dir: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = MetricsWriter(empty_run(runs_dir, "evaluated"), 1)
    for step in range(5):
        if step:
            writer.append(step_record(step))
        if step in (0, 2, 4):
            loss = 3.0 - step / 8
            writer.append(EvaluationRecord(attempt=1, time=1.0, step=step, loss=loss, tokens=7))
    writer.close()
    target = tmp_path / f"out{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet")
    assert main(["export-metrics", "evaluated", "--to", str(target)]) == 0
    assert "5 rows" in capsys.readouterr().out
    losses, evaluations = [None, 2.0, 2.0, 2.0, 2.0], [3.0, None, 2.75, None, 2.5]
    if suffix == ".csv":
        with target.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["loss"] for row in rows] == ["" if x is None else str(x) for x in losses]
        assert [row["evaluation_loss"] for row in rows] == [
            "" if x is None else str(x) for x in evaluations
        ]
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(target)
        assert table["evaluation_loss"].to_pylist() == evaluations
        assert table["loss"].to_pylist() == losses


def test_parquet_has_the_same_values_or_says_what_is_missing(
    two: tuple[RunDirectory, RunDirectory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main(["export-metrics", "other", "--to", str(tmp_path / "a.parquet")]) == 0
    table = parquet.read_table(tmp_path / "a.parquet")
    assert tuple(table.column_names) == COLUMNS
    assert table["step"].to_pylist() == list(range(1, 61))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export-metrics", "other", "--to", str(tmp_path / "b.parquet")]) == 2
    assert "pip install pyarrow" in capsys.readouterr().err


def test_only_ones_own_presets_are_deleted() -> None:
    """And none that others extend."""
    spec = find_preset("tiny").spec
    save_preset(spec, "mine", base="tiny")
    save_preset(spec, "more", base="mine")
    for name, code in (("tiny", 2), ("mine", 2), ("nothing", 2), ("more", 0), ("mine", 0)):
        assert main(["presets", "delete", name]) == code
    assert main(["presets", "delete"]) == 2
    assert "mine" not in load_catalog().presets
    assert list(user_folder().iterdir()) == []


def test_the_log_of_an_earlier_attempt_is_printed(
    two: tuple[RunDirectory, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    for attempt in (1, 2):
        two[0].attempt_dir(attempt).mkdir(parents=True, exist_ok=True)
        two[0].log_path(attempt, "host").write_text(f"attempt {attempt}\n")
    assert main(["logs", "one"]) == 0
    assert "attempt 2" in capsys.readouterr().out
    assert main(["logs", "one", "--attempt", "1"]) == 0
    assert "attempt 1\n" in capsys.readouterr().out
    assert main(["logs", "one", "--attempt", "3"]) == 2
