"""Looking at runs ends soon and without a traceback, whatever is in their folders."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from so_tui.cli import main
from so_tui.commands import runs as runs_command
from so_tui.runs import RunDirectory, results
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.segments import MOST_SEGMENTS
from so_tui.ui import run_rows
from so_tui.ui.run_rows import RunLister
from tests.support.make_run import write_run
from tests.support.waiting import LIMIT_S

MADE_LATER = (
    *("notes.json", "answers.json", "checkpoints", "control/stop"),
    *("samples.other/raw-000001.jsonl", "metrics/000002.jsonl", "attempts/001/output.other.log"),
)


@pytest.fixture
def ended(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "runs", steps=60, state="finished", name="ended")


def test_links_to_themselves_give_no_traceback(ended: RunDirectory, tmp_path: Path) -> None:
    there = [str(path.relative_to(ended.path)) for path in sorted(ended.path.rglob("*"))]
    for number, name in enumerate((".", *there, *MADE_LATER)):
        folder = tmp_path / str(number)
        run, other = folder / "run", folder / "other"
        for copy in (run, other):
            shutil.copytree(ended.path, copy)
        link = run / name
        shutil.rmtree(link, ignore_errors=True)
        link.unlink(missing_ok=True)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(link.name)
        for command in (
            ("logs", str(run)),
            ("watch", "--plain", str(run)),
            ("compare", str(run), str(other)),
            ("export-metrics", str(run), "--to", str(folder / "out.csv")),
            ("note", str(run)),
            ("stop", str(run)),
        ):
            assert main(command) in (0, 2, 3), (name, command)
        assert main(("runs", "--runs-dir", str(folder))) == 0, name


def test_runs_marks_a_run_that_takes_too_long(
    ended: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (ended.metrics_dir / "000002.jsonl").open("wb") as file:
        file.truncate(100 << 20)
    (ended.metrics_dir / "000003.jsonl").write_bytes(b"\n" * (8 << 20))
    monkeypatch.setattr(runs_command, "_RUN_S", 0.05)
    assert main(("runs", "--json", "--runs-dir", str(ended.path.parent))) == 0
    shown = capsys.readouterr()
    assert not json.loads(shown.out)["runs"][0]["results"]["whole"]
    assert "1 run marked *" in shown.err


def test_runs_counts_what_it_does_not_reach(
    ended: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ended.path, ended.path.with_name("older"))
    monkeypatch.setattr(results, "MOST_S", 0.0)
    assert main(("runs", "--json", "--runs-dir", str(ended.path.parent))) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"runs": [], "unread": 2}
    assert "2 older runs" in shown.err


def test_only_the_newest_of_too_many_segments_are_read(ended: RunDirectory) -> None:
    for number in range(2, MOST_SEGMENTS + 10):
        (ended.metrics_dir / f"{number:06d}.jsonl").touch()
    begun = time.monotonic()
    reader = MetricsReader(ended)
    while reader.poll(limit_records=1000, limit_s=0.1).more:
        assert time.monotonic() - begun < LIMIT_S
    assert not reader.whole
    assert reader.latest is None


def test_a_look_at_runs_goes_on_where_the_last_ended(
    ended: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"ended", *(f"copy-{number}" for number in range(20))}
    for name in names - {"ended"}:
        shutil.copytree(ended.path, ended.path.with_name(name))
    monkeypatch.setattr(run_rows, "LOOK_S", 0.003)
    lister, looks = RunLister(ended.path.parent), 0
    while not (rows := lister.rows()) or lister.unread:
        assert len(rows) + lister.unread == len(names)
        looks += 1
        assert looks < 1000
    assert {row.run.name for row in rows} == names
    assert len({id(row.spec.model) for row in rows if row.spec}) == 1, "equal parts are kept once"
