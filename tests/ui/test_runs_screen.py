"""The list of runs: preview, order, comparison, notes, deletion, and what is exported from it."""

from __future__ import annotations

import csv
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import msgspec
import pytest
from rich.text import Text
from textual.widgets import DataTable

from so_tui.runs import MetricsWriter, RunDirectory, read_spec, read_state
from so_tui.runs.listing import RunNotes, read_notes, write_notes
from so_tui.runs.liveness import OLD_S, STALE_S
from so_tui.runs.records import RunState
from so_tui.runs.results import RunResults
from so_tui.settings_file import load_settings
from so_tui.spec import with_values
from so_tui.ui.charts.chart import Chart, look_of
from so_tui.ui.charts.series import write_picture
from so_tui.ui.form import values_of
from so_tui.ui.run_actions import _note_text, _parsed_note
from so_tui.ui.run_rows import RunRow
from so_tui.ui.runs.comparison import comparison
from so_tui.ui.runs.search import search
from so_tui.ui.runs.table import RunTable
from so_tui.ui.text import Content
from tests.support.launching import tiny
from tests.support.make_run import write_run
from tests.support.records import append_records, change_state, step_record
from tests.support.screen import SIZES, Driver, opened

pytestmark = pytest.mark.usefixtures("_short_form")


@asynccontextmanager
async def listed(runs_dir: Path, offers: str = "") -> AsyncIterator[Driver]:
    async with opened(runs_dir) as ui:
        await ui.press("4")
        await ui.until(lambda: offers in ui.key_line)
        yield ui


def names(ui: Driver) -> list[str]:
    table: DataTable[Text] = ui.find("#table", DataTable)
    keys = [str(key.value) for key in table.rows]
    return [Path(key).name for key in keys if not key.startswith("group ")]


def drawn_to(ui: Driver, step: int) -> bool:
    lines = ui.find("#overlay", Chart).lines
    steps = lines[0].steps if lines else None
    return steps is not None and lines[0].length > 0 and steps[lines[0].length - 1] == step


@pytest.mark.parametrize("size", SIZES)
async def test_runs_are_compared_deleted_and_opened(runs_dir: Path, size: tuple[int, int]) -> None:
    live = write_run(runs_dir, steps=40, name="live")
    old = write_run(runs_dir, steps=60, state="finished", preset="tiny", name="old")
    async with opened(runs_dir, size) as ui:
        await ui.press("4")
        table: DataTable[Text] = ui.screen.query_one("#table", DataTable)
        await ui.until(lambda: table.row_count == 2)
        await ui.until(lambda: ui.find("#overlay", Chart).lines)
        await ui.press("space", "equals_sign")
        await ui.until(lambda: "that are not the default" in ui.text())
        await ui.press("escape", "down", "space")
        assert len(ui.find("#overlay", Chart).lines) == 2
        await ui.press("equals_sign")
        await ui.until(lambda: re.search(r"data\.sequence_length( +256| +4096){2}", ui.text()))
        frame, body, buttons = (
            ui.screen.query_one(f".dialog{part}").content_region
            for part in ("", "-body", "-buttons")
        )
        assert body.bottom <= buttons.y
        assert buttons.bottom == frame.bottom, "the buttons stand on the last row"
        await ui.press("escape", "D")
        assert ui.screen is table.screen
        assert live.path.exists(), "the cursor is on the live run, which is never deleted"
        await ui.press("up", "D")
        await ui.until(lambda: "Delete old?" in ui.text())
        await ui.press("enter")
        assert old.path.exists(), "no is the default"
        await ui.press("D", "y")
        await ui.until(lambda: not old.path.exists() and table.row_count == 1)
        await ui.press("enter")
        await ui.until(lambda: ui.app.current_mode == "dashboard")
        await ui.state_shown("live")


async def test_a_run_whose_folder_is_gone_is_reported_as_gone(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The list does not notice in the middle of this.
    monkeypatch.setattr("so_tui.ui.app.RUNS_POLL_S", 1e6)
    run = write_run(runs_dir, steps=10, state="failed")
    async with opened(runs_dir, open_run=run, shows="failed") as ui:
        await ui.press("4")
        await ui.until(lambda: "r Resume" in ui.key_line)
        shutil.rmtree(run.path)
        for screen, key in (("4", "r"), ("3", "equals_sign")):
            await ui.press(screen, key)
            await ui.until(
                lambda: "was deleted or moved" in " ".join(ui.text().replace("▌", "").split())
            )
            await ui.press("escape")


async def test_a_resume_without_checkpoints_asks_first(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=10, state="failed", preset="tiny", name="moved")
    change_state(run, saved_step=9)
    async with listed(runs_dir, "r Resume") as ui:
        await ui.press("r")
        await ui.until(lambda: "Resume moved?" in ui.text())
        await ui.press("y")
        await ui.until(lambda: "from step 0" in ui.dialog_title)
        assert "no checkpoint is there" in " ".join(ui.text().replace("│", "").split())
        await ui.press("n")
        await ui.until(lambda: not ui.dialog_title)
        assert ui.app.starting == ""
    assert read_state(run).attempt == 1
    assert len(list(run.attempts_dir.iterdir())) == 1


async def test_a_seemingly_lost_run_is_deleted_by_the_users_word(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list counted it as lost; its heartbeat has moved since."""
    monkeypatch.setattr("so_tui.ui.app.RUNS_POLL_S", 1e6)
    run = write_run(runs_dir, steps=10, name="far", state="lost")
    async with listed(runs_dir, "D Delete") as ui:
        change_state(run, state="training", host="elsewhere", boot_id="another")
        await ui.press("D", "y")
        await ui.until(lambda: "Has far ended?" in ui.text())
        assert run.path.exists()
        await ui.press("y")
        await ui.until(lambda: not run.path.exists())


async def test_a_long_curve_is_read_on_while_nothing_else_happens(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("so_tui.ui.app.RUNS_POLL_S", 1e6)
    run = write_run(runs_dir, steps=0, state="finished", name="long")
    shutil.rmtree(run.metrics_dir)
    writer = MetricsWriter(run, 1, segment_bytes=50_000)
    for step in range(1, 1001):
        writer.append(step_record(step, loss=float(step)))
    writer.close()
    looks = count()
    slow = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 0.6 * next(looks))
    for module in ("so_tui.runs.metrics", "so_tui.ui.run_rows"):  # little is read at a look
        monkeypatch.setattr(f"{module}.time", slow)
    async with listed(runs_dir) as ui:
        await ui.until(lambda: drawn_to(ui, 1000))


async def test_a_run_resumed_elsewhere_has_its_whole_curve(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("so_tui.ui.app.RUNS_POLL_S", 0.1)
    run = write_run(runs_dir, steps=10, total=30, state="stopped")
    async with listed(runs_dir) as ui:
        await ui.until(lambda: drawn_to(ui, 10))
        await ui.press("3")
        append_records(run, *(step_record(step, attempt=2) for step in range(11, 31)), attempt=2)
        change_state(run, state="finished", attempt=2, step=30)
        await ui.until(lambda: ui.app.runs and ui.app.runs[0].state.step == 30)
        await ui.press("4")
        await ui.until(lambda: drawn_to(ui, 30))


async def test_runs_are_sorted_grouped_and_annotated(runs_dir: Path) -> None:
    runs = [
        write_run(runs_dir, steps=20 * n, total=99, state="failed", name=name)
        for n, name in enumerate("cab", 1)
    ]
    write_notes(runs[0], RunNotes(tags=("paper",)))
    async with listed(runs_dir) as ui:
        await ui.until(lambda: names(ui) == ["b", "a", "c"])
        await ui.press("S")
        await ui.until(lambda: names(ui) == ["a", "b", "c"])
        await ui.press("V", "V", "V")
        await ui.until(lambda: load_settings().settings.runs.group == "tag")
        assert load_settings().settings.runs.sort == "name"
        await ui.press("up", "T")
        await ui.answer("too short #paper")
        await ui.until(lambda: names(ui) == ["a", "c", "b"])
        assert read_notes(runs[1]) == RunNotes(note="too short", tags=("paper",))
        lines = [" ".join(line.replace("│", "").split()) for line in ui.lines()]
        heading = lines.index("paper 2 runs")
        assert "failed a " in lines[heading + 1]
        assert lines[heading + 3] == "no tag 1 run"
        # The cursor passes over headings.
        assert ui.screen.chosen_run == runs[1]  # type: ignore[attr-defined]
        await ui.press("down", "down")
        assert ui.screen.chosen_run == runs[2]  # type: ignore[attr-defined]
        await ui.press("up", "up", "up", "up")
        assert ui.screen.chosen_run == runs[1]  # type: ignore[attr-defined]
        await ui.until(lambda: "too short" in ui.shown("#facts"))


@pytest.mark.parametrize(("width", "says"), [(80, False), (120, True), (160, False), (220, True)])
async def test_the_list_says_why_runs_ended_where_it_has_room(
    runs_dir: Path, width: int, says: bool
) -> None:
    write_run(runs_dir, steps=20, state="failed", name="a")
    write_run(runs_dir, steps=20, state="finished", name="b")
    async with opened(runs_dir, (width, 40)) as ui:
        await ui.press("4")
        table = ui.find("#table", RunTable)
        await ui.until(lambda: table.row_count == 2 and "▁" in ui.text(), 8)
        assert ("reason" in table.columns_shown) == says
        if says:
            assert "rank 2 ran out" in next(line for line in ui.lines() if "✗ failed" in line)
        assert table.virtual_size.width <= table.scrollable_content_region.width


def compared(
    made: Sequence[tuple[str, RunResults, dict[str, str]]], sort: str = "started", width: int = 120
) -> Content:
    """Return the comparison of runs by name, with results and settings."""
    spec = tiny()
    rows, results = [], {}
    for name, found, values in made:
        run = RunDirectory(Path("/runs") / name)
        state = RunState(name=name, state="finished")
        rows.append(RunRow(run, with_values(spec, values), state))
        results[run] = found
    looks = {row.run: look_of(at, coloured=True) for at, row in enumerate(rows)}
    return comparison(rows, results, looks, sort)[1](width)


def test_every_setting_can_be_searched_for() -> None:
    spec = tiny()
    row = RunRow(RunDirectory(Path("/runs/a")), spec, RunState(name="a", state="finished"))
    unreadable = RunRow(RunDirectory(Path("/runs/b")), None, row.state)
    for path, text in values_of(spec).items():
        wanted = text.lower().split()
        if wanted:
            assert search([row, unreadable], f"{path}={wanted[0]}".lower()) == [row], path


def styles_of(content: Content, text: str) -> list[str]:
    """Return the styles of the spans that are exactly a text."""
    plain = content.plain
    return [
        str(span.style) for span in content.spans if plain[span.start : span.end].strip() == text
    ]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_compared_runs_are_ranked_and_the_best_marked(width: int) -> None:
    slow = RunResults(loss=1.25, tokens_per_s=900.0, step_s=2.0)
    fast = RunResults(loss=1.5, tokens_per_s=1400.0, step_s=1.0)
    runs: list[tuple[str, RunResults, dict[str, str]]] = [
        ("fast", fast, {}),
        ("none", RunResults(), {}),
        ("slow", slow, {}),
    ]
    shown = compared(runs, width=width)
    first, second, third = shown.plain.splitlines()[1:4]
    assert [line.split()[2] for line in (first, second)] == ["slow", "fast"]
    assert third.split()[1:] == ["none", "no", "step"]
    assert first.rstrip().endswith(("1.2500", "900", "2.00 s"))
    ends = {line.index(loss) + len(loss) for line, loss in ((first, "1.2500"), (second, "1.5000"))}
    assert ends == {shown.plain.index("mean loss") + len("mean loss")}
    assert styles_of(shown, "1.2500") == ["bold $success"]
    assert styles_of(shown, "1.5000") in ([], [""])
    assert all(len(line) <= width for line in shown.plain.splitlines())
    by_speed = compared(runs, sort="tokens/s").plain.splitlines()[1:4]
    assert [line.split()[at] for line, at in zip(by_speed, (2, 2, 1), strict=True)] == [
        *("fast", "slow", "none")
    ]
    assert f"${look_of(0, coloured=True).role}" in [str(span.style) for span in shown.spans]


def test_a_run_without_steps_has_no_rank_and_makes_no_other_the_best() -> None:
    only = RunResults(mean_steps=50, loss=1.25, tokens_per_s=900.0)
    shown = compared([("loading", RunResults(), {}), ("only", only, {})])
    first, second = shown.plain.splitlines()[1:3]
    assert (first.split()[0], first.split()[2]) == ("1", "only")
    assert second.split()[0] != "2"
    assert second.rstrip().endswith("no step")
    assert "bold $success" not in [str(span.style) for span in shown.spans]


def test_a_comparison_says_what_differs() -> None:
    one, two = RunResults(loss=1.0), RunResults(loss=2.0)
    shown = compared([("a", one, {"train.steps": "7"}), ("b", two, {"train.steps": "9"})])
    assert re.search(r"^train\.steps +7 +9$", shown.plain, re.MULTILINE)
    assert styles_of(shown, "9") == ["bold $warning"]
    assert "do not compare" not in shown.plain
    other = compared([("a", one, {}), ("b", two, {"data.source": "/data/x.json"})])
    assert "data.source differs: losses on different data do not compare" in other.plain


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("paper", "a"),
        ("#pap", "a"),
        ("tag:paper", "a"),
        ("#good", "b"),
        ("#aper", ""),
        ("too short", "a"),
        ("alpaca.json", "b"),
        ("quad-gh200", "a b"),
        ("train.learning_rate=1e-5", "a"),
        ("learning_rate=0.00001", "a"),
        ("ratio=0.15", "a b"),
        ("io=0.15", ""),
        ("nothing=1", ""),
        ("#paper ratio=0.9", ""),
        ("MODE=Super", "a b"),
    ],
)
async def test_the_filter_finds(runs_dir: Path, typed: str, found: str) -> None:
    a = write_run(runs_dir, steps=10, state="failed", name="a")
    b = write_run(runs_dir, steps=10, state="failed", name="b")
    for run, values in (
        (a, {"train.learning_rate": "1e-5"}),
        (b, {"train.learning_rate": "2e-5", "data.source": "/data/alpaca.json"}),
    ):
        run.spec_path.write_bytes(msgspec.json.encode(with_values(read_spec(run), values)))
    write_notes(a, RunNotes(note="too short", tags=("paper",)))
    write_notes(b, RunNotes(tags=("good",)))
    async with listed(runs_dir) as ui:
        await ui.until(lambda: len(names(ui)) == 2)
        await ui.press("slash")
        await ui.type_text(typed)
        await ui.until(lambda: sorted(names(ui)) == found.split())
        if not found:
            assert f"no match for {typed}" in ui.text()
            assert "esc clears" in ui.shown("#facts")


async def test_a_second_click_on_a_heading_reverses(runs_dir: Path) -> None:
    for n, name in enumerate("cab", 1):
        write_run(runs_dir, steps=20 * n, total=99, state="failed", name=name)
    write_run(runs_dir, steps=0, state="failed", name="none")
    async with listed(runs_dir) as ui:
        table = ui.find("#table", RunTable)
        await ui.until(lambda: table.row_count == 4)
        await ui.until(lambda: ui.text().count("▁") >= 3)

        async def click(name: str, expected: list[str]) -> None:
            at = table.render_line(0).text.index(name) + table.gutter.left
            await ui.pilot.click(table, offset=(at, table.gutter.top))
            await ui.until(lambda: names(ui) == expected)

        await click("step", ["b", "a", "c", "none"])
        await click("step", ["none", "c", "a", "b"])
        known = ui.screen._curves  # type: ignore[attr-defined]
        losses = {run.name: curve.results.loss for run, curve in known.items()}
        lowest_first = sorted("abc", key=lambda name: losses[name])
        await click("mean loss", [*lowest_first, "none"])
        await click("mean loss", [*reversed(lowest_first), "none"])
        assert ui.notes() == []
        assert "sorted by loss" in ui.text()


async def test_the_question_before_deletion_says_what_it_frees(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=10, state="failed", name="big")
    (run.path / "weights").write_bytes(b"x" * 3_000_000)
    async with listed(runs_dir, "D Delete") as ui:
        await ui.press("D")
        await ui.until(lambda: re.search(r"3\.\d+ MB will be freed", ui.text()))


async def test_details_name_the_data_and_results(runs_dir: Path) -> None:
    write_run(runs_dir, steps=30, state="finished", name="one", preset="tiny")
    async with listed(runs_dir) as ui:
        await ui.until(lambda: "tokens/s" in ui.shown("#facts"))
        assert "on builtin:" in ui.shown("#facts")


async def test_metrics_export_overwrites_nothing(runs_dir: Path, tmp_path: Path) -> None:
    write_run(runs_dir, steps=30, state="finished", name="one")
    async with listed(runs_dir) as ui:

        async def export(file: str) -> None:
            await ui.press("E")
            await ui.answer(str(tmp_path / file))

        await ui.until(lambda: names(ui) == ["one"] and ui.screen._curves)  # type: ignore[attr-defined]
        for file in ("steps.csv", "loss.svg"):
            await export(file)
            await ui.until(lambda: re.search(f"exported .*{file}", ui.shown("#facts")))  # noqa: B023 - called at once
            assert any(f"Wrote {tmp_path / file}" in note for note in ui.notes())
        await export("loss.svg")
        await ui.until(lambda: "exists already" in ui.shown("#said"))
    with (tmp_path / "steps.csv").open(newline="") as rows:
        assert len(list(csv.DictReader(rows))) == 30
    picture = ElementTree.parse(tmp_path / "loss.svg")
    assert picture.findall(".//{http://www.w3.org/2000/svg}polyline")


def test_a_picture_holds_no_markup_of_a_name(tmp_path: Path) -> None:
    write_picture(tmp_path / "chart.svg", "<script>\x1b&", [])
    text = (tmp_path / "chart.svg").read_text()
    assert ElementTree.fromstring(text).findall(".//{http://www.w3.org/2000/svg}script") == []
    assert "\x1b" not in text


def test_what_is_typed_as_a_note_is_what_is_shown_again() -> None:
    notes = RunNotes(note="two words", tags=("a", "b.c"))
    assert _parsed_note(_note_text(notes)) == notes
    assert _parsed_note("x #a y #a") == RunNotes(note="x y", tags=("a",))
    assert _parsed_note("") == RunNotes()


async def test_the_user_may_declare_a_run_ended(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=10, name="far")
    change_state(run, host="elsewhere", boot_id="another")
    before = time.time() - (STALE_S + OLD_S) / 2
    os.utime(run.state_path, (before, before))
    async with listed(runs_dir, "s Stop") as ui:
        for answer, state in (("n", "training"), ("y", "lost")):
            await ui.press("s")
            await ui.until(lambda: "Has far ended?" in ui.text())
            await ui.press(answer)
            await ui.until(lambda: read_state(run).state == state)  # noqa: B023 - called at once
