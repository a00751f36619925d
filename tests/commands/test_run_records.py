"""Runs side by side, notes and tags, and metrics for other programs, by commands."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec.json import encode
from msgspec.structs import replace

from so_tui.commands.parser import build_parser
from so_tui.runs import MetricsWriter, RunDirectory, read_spec
from so_tui.runs.export import COLUMNS
from so_tui.runs.listing import LONGEST_NOTE, read_notes
from so_tui.runs.records import EvaluationRecord, ResumedRecord
from so_tui.settings import RunListSettings
from so_tui.spec import find_preset, load_catalog, save_preset
from tests.support.commands import Call
from tests.support.make_run import write_run
from tests.support.records import append_records, step_record
from tests.support.schemas import valid


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SO_TUI_RUNS_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def ended_run(
    runs_dir: Path, name: str, state: Any = "finished", *, steps: int = 0, **others: Any
) -> RunDirectory:
    return write_run(runs_dir, steps=steps, state=state, name=name, **others)


@pytest.fixture
def two(runs_dir: Path) -> tuple[RunDirectory, RunDirectory]:
    return (
        ended_run(runs_dir, "one", steps=30, total=30),
        ended_run(runs_dir, "other", "failed", steps=60, total=60, preset="tiny", gpus=2),
    )


def empty_run(runs_dir: Path, name: str) -> RunDirectory:
    run = ended_run(runs_dir, name)
    for path in run.metrics_dir.iterdir():
        path.unlink()
    return run


@pytest.mark.usefixtures("two")
def test_runs_are_compared_by_what_differs_and_what_came_of_them(call: Call) -> None:
    first, second = valid("compare", call("compare one other one --json").out)["runs"]
    lengths = [run["settings"]["data.sequence_length"] for run in (first, second)]
    assert lengths == ["4096", "256"]
    assert all(first["settings"][key] != second["settings"][key] for key in first["settings"])
    assert min(first["results"]["loss"], first["results"]["tokens_per_s"]) > 0
    text = call("compare one other").out
    for word in ("one", "other", "tokens/s", "data.sequence_length", "finished at step 30"):
        assert word in text, word
    assert call("compare one nothing").code == 2


def test_who_set_a_setting_is_no_difference(call: Call, runs_dir: Path) -> None:
    for name, set_by_a_person in (("chosen", ()), ("set", ("offload.ratio",))):
        run = ended_run(runs_dir, name)
        run.spec_path.write_bytes(encode(replace(read_spec(run), fixed=set_by_a_person)))
    first, second = json.loads(call("compare chosen set --json").out)["runs"]
    assert first["settings"] == second["settings"] == {}


def test_notes_and_tags_are_kept_and_filter(
    two: tuple[RunDirectory, RunDirectory], call: Call
) -> None:
    one, _ = two
    out = call("note one --tag paper --tag v2 --text", "warm-up\x1b[2J too short").out
    assert out == "warm-up\\x1b[2J too short\n#paper #v2\n"
    assert valid("note", call("note one --untag v2 --json").out)["tags"] == ["paper"]
    listed = valid("runs", call("runs --tag paper --json").out)["runs"]
    assert [run["name"] for run in listed] == ["one"]
    for wrong in ("--tag=two words", "--tag=-x\x1b", f"--text={'x' * (LONGEST_NOTE + 1)}"):
        assert call("note one", wrong).code == 2
    assert call("note one --text=").code == 0
    assert read_notes(one).note == ""
    one.notes_path.write_text('{"tags": ["\\u001b[2J", "ok"], "note": "' + "y" * 9000 + '"}')
    assert (read_notes(one).tags, len(read_notes(one).note)) == (("ok",), LONGEST_NOTE)
    one.notes_path.write_bytes(b"\xff")
    assert read_notes(one).tags == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a run to another user")
def test_another_users_run_gets_no_notes(
    two: tuple[RunDirectory, RunDirectory], call: Call
) -> None:
    os.chown(two[0].path, 65534, 65534)
    assert call("note one --tag mine").code == 3
    assert not two[0].notes_path.exists()


@pytest.mark.usefixtures("two")
def test_runs_are_sorted_as_asked_not_as_on_the_screen(call: Call) -> None:
    def names(options: str = "") -> list[str]:
        return [run["name"] for run in json.loads(call(f"runs --json {options}").out)["runs"]]

    for order in get_args(get_type_hints(RunListSettings)["sort"]):
        assert build_parser().parse_args(["runs", "--sort", order]).sort == order
    assert (names(), names("--sort name")) == (["other", "one"], ["one", "other"])
    assert call("settings runs.sort=name").code == 0
    assert names() == ["other", "one"]
    compared = json.loads(call("compare --json", *names("--sort loss")).out)["runs"]
    losses = [run["results"]["loss"] for run in compared]
    assert losses == sorted(losses)
    listed = {run["name"]: run for run in valid("runs", call("runs --json").out)["runs"]}
    assert all(listed[run["name"]]["results"] == run["results"] for run in compared)
    table = call("runs").out
    assert all(f"{loss:.4f}" in table for loss in losses)


def test_every_step_is_in_the_table_once(runs_dir: Path, tmp_path: Path, call: Call) -> None:
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
    assert call("export-metrics resumed --to", target).code == 0
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [(int(row["step"]), int(row["attempt"])) for row in rows] == [
        (step, 1 if step <= 20 else 2) for step in range(1, 41)
    ]
    assert (rows[6]["loss"], rows[7]["loss"]) == ("nan", "8.0")
    for refused in (target, tmp_path / "out.xlsx", tmp_path / "no" / "out.csv"):
        assert call("export-metrics resumed --to", refused).code == 2
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.csv"]


def test_evaluations_are_in_the_row_of_their_step(
    runs_dir: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = empty_run(runs_dir, "evaluated")
    for step in range(5):
        if step:
            append_records(run, step_record(step))
        if step in (0, 2, 4):
            loss = 3.0 - step / 8
            evaluation = EvaluationRecord(attempt=1, time=1.0, step=step, loss=loss, tokens=7)
            append_records(run, evaluation)
    target = tmp_path / "out.parquet"
    assert "5 rows" in call("export-metrics evaluated --to", target).out
    table = parquet.read_table(target)
    assert tuple(table.column_names) == COLUMNS
    assert table["loss"].to_pylist() == [None, 2.0, 2.0, 2.0, 2.0]
    assert table["evaluation_loss"].to_pylist() == [3.0, None, 2.75, None, 2.5]
    assert call("export-metrics evaluated --to", tmp_path / "out.csv").code == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["evaluation_loss"] for row in rows] == ["3.0", "", "2.75", "", "2.5"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = call("export-metrics evaluated --to", tmp_path / "other.parquet")
    assert (code, "pip install pyarrow" in err) == (2, True)


def test_only_ones_own_presets_are_deleted(own_presets: Path, call: Call) -> None:
    """And none that others extend."""
    spec = find_preset("tiny").spec
    save_preset(spec, "mine", base="tiny")
    save_preset(spec, "more", base="mine")
    for name, code in (("tiny", 2), ("mine", 2), ("nothing", 2), ("more", 0), ("mine", 0)):
        assert call("presets delete", name).code == code
    assert call("presets delete").code == 2
    assert "mine" not in load_catalog().presets
    assert list(own_presets.iterdir()) == []


def test_the_log_of_an_earlier_attempt_is_printed(
    two: tuple[RunDirectory, RunDirectory], call: Call
) -> None:
    for attempt in (1, 2):
        two[0].attempt_dir(attempt).mkdir(parents=True, exist_ok=True)
        two[0].log_path(attempt, "host").write_text(f"attempt {attempt}\n")
    for options, code, text in (("", 0, "attempt 2"), ("1", 0, "attempt 1\n"), ("3", 2, "")):
        called = call("logs one", *(["--attempt", options] if options else []))
        assert (called.code, text in called.out) == (code, True)
