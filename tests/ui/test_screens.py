"""The newcomer's path through each screen, by keyboard, in a small and a middling terminal."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Button, DataTable, Input, Static

from so_tui.launch import Launch
from so_tui.machine import Machine, inspect_machine, machine_json
from so_tui.runs import MetricsWriter, RunDirectory, create_run, read_state, write_state
from so_tui.runs.control import pending, request
from so_tui.runs.records import EvaluationRecord, State
from so_tui.spec import RunSpec, load_catalog
from so_tui.ui import messages
from so_tui.ui.app import SoTuiApp
from so_tui.ui.screens.configure import ConfigureScreen
from so_tui.ui.screens.help import key_groups
from so_tui.ui.widgets.chart import Chart
from so_tui.ui.widgets.field import FieldRow
from so_tui.ui.widgets.log import LogView
from so_tui.ui.widgets.nodes import NumaNodes
from so_tui.ui.widgets.words import Words
from tests.support.make_run import quad_machine, write_run

SIZES = [(80, 24), (120, 36)]


@asynccontextmanager
async def opened(runs_dir: Path, size: tuple[int, int] = (120, 36), **options: Any) -> AsyncIterator[Pilot[None]]:
    options.setdefault("machine", quad_machine())
    app = SoTuiApp(runs_dir=runs_dir, **options)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.machine is not None and app.catalog is not None)
        yield pilot


async def until(pilot: Pilot[None], happened: Callable[[], object], limit_s: float = 15) -> None:
    """Wait for what a worker brings; nothing in these tests waits for a fixed time."""
    async with asyncio.timeout(limit_s):
        while not happened():
            await pilot.pause(0.02)
    await pilot.pause()


def shown(pilot: Pilot[None], selector: str) -> str:
    widget = pilot.app.screen.query_one(selector)
    assert isinstance(widget, Static | Words)
    return str(widget.content)


def screen_text(pilot: Pilot[None]) -> str:
    """Everything on the screen, as a reader sees it."""
    width, height = pilot.app.size
    lines = pilot.app.screen._compositor.render_strips(pilot.app.size)
    assert len(lines) == height
    assert all(strip.cell_length <= width for strip in lines)
    return "\n".join(strip.text for strip in lines)


async def presets_ready(pilot: Pilot[None]) -> DataTable[Any]:
    table = pilot.app.screen.query_one("#table", DataTable)
    await until(pilot, lambda: table.row_count > 0)
    return table


@pytest.mark.parametrize("size", SIZES)
async def test_presets_say_what_fits_and_what_to_do_first(runs_dir: Path, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as pilot:
        table = await presets_ready(pilot)
        assert table.row_count == len(load_catalog().presets)
        text = screen_text(pilot)
        for word in ("quad-gh200", "1 Presets", "4 GPUs", "tiny (embedded)", "✓", "✗ too big", "First time here?", "^p", "no run live"):
            assert word in text, word
        await until(pilot, lambda: re.search(r" on \d GPU", shown(pilot, "#detail-title")))
        assert "each GPU" in shown(pilot, "#detail")
        await pilot.press("slash", *"phi", "enter")
        assert table.row_count == 1
        await pilot.press("escape")
        assert table.row_count > 1


@pytest.mark.parametrize("size", SIZES)
async def test_from_preset_to_configure_to_launch(runs_dir: Path, size: tuple[int, int]) -> None:
    asked: list[RunSpec] = []

    def start(launch: Launch, **options: object) -> RunDirectory:
        asked.append(launch.spec)
        return write_run(runs_dir, steps=3, seconds_of_samples=2)

    async with opened(runs_dir, size, start=start) as pilot:
        await presets_ready(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow))
        await until(pilot, lambda: "fits" in shown(pilot, "#verdict"))
        assert "Llama 3.1 8B" in shown(pilot, "#form-title")
        await pilot.press("f5")
        assert "Launch" in screen_text(pilot)
        await pilot.press("n")
        assert not asked
        await pilot.press("l", "y")
        await until(pilot, lambda: asked)
        assert asked[0].name == "llama-3.1-8b"
        await until(pilot, lambda: pilot.app.current_mode == "dashboard")
        await until(pilot, lambda: pilot.app.screen.query_one("#loss", Chart).lines)


@pytest.mark.parametrize("typing", [False, True])
async def test_a_start_that_takes_long_is_told_is_the_only_one_and_takes_nobody_out_of_a_field(runs_dir: Path, typing: bool) -> None:
    asked: list[RunSpec] = []
    ready = threading.Event()

    def start(launch: Launch, **_: object) -> RunDirectory:
        asked.append(launch.spec)
        ready.wait(15)
        return write_run(runs_dir, steps=3, seconds_of_samples=2)

    async with opened(runs_dir, start=start) as pilot:
        await presets_ready(pilot)
        await pilot.press("l", "y")
        await until(pilot, lambda: "starting Llama 3.1 8B …" in screen_text(pilot).split("\n")[0])
        await pilot.press("4", "1", "l")
        await until(pilot, lambda: any("still being started" in note.message for note in pilot.app._notifications))
        assert "Launch Llama" not in screen_text(pilot)
        if typing:
            await pilot.press("slash", "q")
        ready.set()
        await until(pilot, lambda: not pilot.app.starting)  # type: ignore[attr-defined]
        await until(pilot, lambda: typing or pilot.app.current_mode == "dashboard")
        assert any("4 lists it" in note.message for note in pilot.app._notifications) == typing
        assert pilot.app.current_mode == ("presets" if typing else "dashboard")
    assert len(asked) == 1


@pytest.mark.parametrize("size", SIZES)
async def test_a_wrong_field_is_marked_with_its_message_and_nothing_can_be_launched(runs_dir: Path, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as pilot:
        await presets_ready(pilot)
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "fits" in shown(pilot, "#verdict"))
        row = pilot.app.screen.query_one("#field-offload-ratio", FieldRow)
        button = pilot.app.screen.query_one("#launch", Button)
        assert not button.disabled
        row.focus_control()
        await pilot.press("ctrl+u", *"1.5")
        await until(pilot, lambda: row.has_class("-wrong"))
        note = str(row.query_one(".field-note", Static).content)
        assert "from 0 to 1" in note
        assert "✗" in str(row.query_one(".field-name", Static).content)
        assert button.disabled
        await pilot.press("f5")
        assert pilot.app.screen.focused is row.query_one(Input)
        await pilot.press("ctrl+u", *"0.5")
        await until(pilot, lambda: not row.has_class("-wrong") and not button.disabled)
        assert row.has_class("-changed")
        assert "was 0.9" in str(row.query_one(".field-note", Static).content)


async def test_more_gpus_than_there_are_mark_the_field(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "fits" in shown(pilot, "#verdict"))
        row = pilot.app.screen.query_one("#field-gpus", FieldRow)
        row.focus_control()
        await pilot.press("ctrl+u", *"9")
        await until(pilot, lambda: pilot.app.screen.query_one("#launch", Button).disabled)
        assert row.has_class("-wrong")


async def test_edits_survive_other_screens_and_other_presets_and_are_saved_as_a_preset(runs_dir: Path, tmp_path: Path) -> None:
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "fits" in shown(pilot, "#verdict"))
        screen = pilot.app.screen
        screen.query_one("#field-train-learning_rate", FieldRow).focus_control()
        await pilot.press("ctrl+u", *"2e-4", "escape")
        await until(pilot, lambda: "1 change" in shown(pilot, "#form-title"))
        await pilot.press("5", "2")
        assert "1 change" in shown(pilot, "#form-title")
        await pilot.press("equals_sign")
        assert "train.learning_rate" in screen_text(pilot)
        await pilot.press("escape", "ctrl+s")
        await until(pilot, lambda: pilot.app.screen.query(Input))
        await pilot.press("ctrl+u", *"my-tiny", "enter")
        saved = tmp_path / "config" / "so-tui" / "presets" / "my-tiny.toml"
        await until(pilot, saved.exists)
        assert "learning_rate = 0.0002" in saved.read_text()
        assert 'extends = "tiny"' in saved.read_text()
        await until(pilot, lambda: "my-tiny" in shown(pilot, "#form-title"))
        assert "no changes" in shown(pilot, "#form-title")


@pytest.mark.parametrize("key", ["q", "ctrl+q"])
async def test_what_was_typed_is_not_lost_by_quitting_unasked(runs_dir: Path, key: str) -> None:
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        await pilot.press("enter")  # takes a recommendation over
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "change" in shown(pilot, "#form-title"))
        assert "no changes" not in shown(pilot, "#form-title")
        screen = pilot.app.screen
        pilot.app.screen.query_one("#field-train-learning_rate", FieldRow).focus_control()
        await pilot.press("ctrl+u", *"2e-4", "escape", "1", key, "ctrl+q")
        assert "1 change to preset llama-3.1-8b" in screen_text(pilot)
        await pilot.press("enter")
        assert isinstance(pilot.app.screen.query_one("#table"), DataTable), "no is the default, and the question came once"
        await pilot.press("2", "u", "y")
        await until(pilot, lambda: "no changes" in shown(pilot, "#form-title"))
        await pilot.press("1", "enter")
        await until(pilot, lambda: pilot.app.screen is screen and "no changes" not in shown(pilot, "#form-title"))
        await pilot.press(key)
        await until(pilot, lambda: not pilot.app.is_running)


async def test_a_run_started_from_a_field_is_shown(runs_dir: Path) -> None:
    async with opened(runs_dir, start=lambda *_, **__: write_run(runs_dir, steps=3, seconds_of_samples=2)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and not pilot.app.screen.query_one("#launch", Button).disabled)
        await pilot.press("tab", "f5")
        await until(pilot, lambda: "Launch tiny" in screen_text(pilot))
        await pilot.press("y")
        await until(pilot, lambda: pilot.app.current_mode == "dashboard")


async def test_a_dialog_is_not_covered_by_the_run_that_was_started(runs_dir: Path) -> None:
    ready = threading.Event()

    def start(*_: object, **__: object) -> RunDirectory:
        ready.wait(15)
        return write_run(runs_dir, steps=3, seconds_of_samples=2)

    async with opened(runs_dir, start=start) as pilot:
        await presets_ready(pilot)
        await pilot.press("l", "y", "question_mark")
        ready.set()
        await until(pilot, lambda: any("was started" in note.message for note in pilot.app._notifications))
        assert pilot.app.current_mode == "presets"


async def test_quitting_says_that_a_start_goes_on(runs_dir: Path) -> None:
    ready = threading.Event()
    async with opened(runs_dir, start=lambda *_, **__: ready.wait(15)) as pilot:
        await presets_ready(pilot)
        await pilot.press("l", "y", "q")
        await until(pilot, lambda: not pilot.app.is_running)
        ready.set()
        assert "Llama 3.1 8B is being started all the same" in str(pilot.app._exit_renderables)


async def test_what_was_saved_is_not_asked_for_when_quitting(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "fits" in shown(pilot, "#verdict"))
        await pilot.press("tab", "ctrl+u", "1", "escape")
        await until(pilot, lambda: "1 change" in shown(pilot, "#form-title"))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: pilot.app.screen.query("#said"))
        await pilot.press("enter")
        await until(pilot, lambda: "tiny-mine" in shown(pilot, "#form-title"))
        await pilot.press("q")
        await until(pilot, lambda: not pilot.app.is_running)


async def test_a_preset_is_not_saved_over_another_and_nothing_typed_is_lost(runs_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "so-tui" / "presets"
    folder.mkdir(parents=True)
    (folder / "taken.toml").write_text('name = "taken"\nextends = "tiny"\n')
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "fits" in shown(pilot, "#verdict"))
        form = pilot.app.screen
        assert isinstance(form, ConfigureScreen)
        for preset, rate in (("taken", "9e-4"), ("tiny", "2e-4")):
            form.edit(preset)
            await until(pilot, lambda preset=preset: f"preset {preset}, no changes" in shown(pilot, "#form-title"))  # type: ignore[misc]
            form.query_one("#field-train-learning_rate", FieldRow).focus_control()
            await pilot.press("end", "ctrl+u", *rate, "escape")
            await until(pilot, lambda: "1 change" in shown(pilot, "#form-title"))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: pilot.app.screen.query(Input))
        for name, said in (("tiny", "is a built-in preset"), ("my x", "is not a valid name"), ("taken", "Replace your preset taken?")):
            await pilot.press("ctrl+u", *name.replace(" ", "_ "), "enter")
            if said.startswith("is "):
                await until(pilot, lambda said=said: said in shown(pilot, "#said"))  # type: ignore[misc]
                assert pilot.app.screen.query_one(Input).value, "what was typed stays"
        await until(pilot, lambda: "Replace your preset taken?" in screen_text(pilot))
        await pilot.press("enter")  # keeps what is there
        await until(pilot, lambda: "1 change" in screen_text(pilot))
        assert (folder / "taken.toml").read_text() == 'name = "taken"\nextends = "tiny"\n'
        assert not (folder / "tiny.toml").exists()
        await pilot.press("ctrl+s")
        await until(pilot, lambda: pilot.app.screen.query(Input))
        await pilot.press("ctrl+u", *"taken", "enter", "y")
        await until(pilot, lambda: "learning_rate = 0.0002" in (folder / "taken.toml").read_text())
        await until(pilot, lambda: "preset taken, no changes" in shown(pilot, "#form-title"))  # nor what was typed over it before


@pytest.mark.parametrize("size", SIZES)
async def test_another_machine_is_planned_for_but_nothing_is_started_there(runs_dir: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    file = tmp_path / "quad.json"
    file.write_bytes(machine_json(quad_machine()))
    asked: list[RunSpec] = []
    async with opened(runs_dir, size, machine=None, start=lambda launch, **_: asked.append(launch.spec)) as pilot:
        table = await presets_ready(pilot)
        here = len(table.columns)
        await pilot.press("o")
        await until(pilot, lambda: pilot.app.screen.query("#said"))
        await pilot.press(*"/nothing/there", "enter")
        await until(pilot, lambda: "cannot be read" in shown(pilot, "#said"))
        pilot.app.screen.query_one(Input).value = str(file)  # pasted: a hundred keys take half a minute
        await pilot.press("enter")
        await until(pilot, lambda: "quad-gh200  planned for, not this machine" in screen_text(pilot))
        await until(pilot, lambda: "4 GPUs" in screen_text(pilot))
        for keys in (["1"], ["2"]):
            await pilot.press(*keys)
            await until(pilot, lambda: "planned for, not this machine" in screen_text(pilot))
            await pilot.press("f5")
            await until(pilot, lambda: "was not started" in screen_text(pilot))
            await pilot.press("escape")
        await pilot.press("5", "g")
        await until(pilot, lambda: "not this machine" not in screen_text(pilot))
        await pilot.press("1")
        await until(pilot, lambda: len(pilot.app.screen.query_one("#table", DataTable).columns) == here)
    assert not asked


async def test_a_look_at_this_machine_that_comes_late_does_not_replace_another(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, answers = threading.Event(), list[Any]()
    make = messages.Loaded.__init__

    def inspected() -> Machine:
        late.wait(15)
        return inspect_machine()

    def noted(self: messages.Loaded, *what: Any) -> None:
        make(self, *what)
        answers.append(what)

    async with opened(runs_dir) as pilot:
        monkeypatch.setattr("so_tui.machine.inspect_machine", inspected)
        monkeypatch.setattr(messages.Loaded, "__init__", noted)
        await pilot.press("5", "g")
        pilot.app.plan_for(quad_machine(), "quad.json")  # type: ignore[attr-defined]
        await until(pilot, lambda: "quad-gh200  planned for, not this machine" in screen_text(pilot))
        late.set()
        await until(pilot, lambda: len(answers) == 2)
        assert "quad-gh200  planned for, not this machine" in screen_text(pilot)


async def test_the_exact_command_is_shown_and_copied(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    async with opened(runs_dir, (200, 50)) as pilot:
        monkeypatch.setattr(pilot.app, "copy_to_clipboard", copied.append)
        await presets_ready(pilot)
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow) and "fits" in shown(pilot, "#verdict"))
        await pilot.press("y")
        assert "--include localhost:0,1" in copied[0]
        assert copied[0] in shown(pilot, "#plan-text")


async def test_the_plan_follows_the_width_of_the_terminal(runs_dir: Path) -> None:
    def bars() -> list[str]:
        return [line for line in shown(pilot, "#plan-text").splitlines() if "━" in line or "─" in line]

    async with opened(runs_dir, (200, 50)) as pilot:
        await presets_ready(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "fits" in shown(pilot, "#verdict"))
        wide = bars()
        await pilot.resize_terminal(110, 50)
        await until(pilot, lambda: bars() != wide)
        assert max(map(len, bars())) <= pilot.app.screen.query_one("#plan-pane").content_size.width
        await pilot.resize_terminal(200, 50)
        await until(pilot, lambda: bars() == wide)


async def test_a_preset_that_does_not_fit_tells_why_and_starts_nothing(runs_dir: Path) -> None:
    async with opened(runs_dir, start=lambda *_, **__: pytest.fail("started")) as pilot:
        table = await presets_ready(pilot)
        await pilot.press("slash", *"70b", "enter")
        table.move_cursor(row=0, column=table.cursor_column)
        await pilot.press("l")
        await until(pilot, lambda: "does not fit here" in screen_text(pilot))
        assert "needs" in screen_text(pilot)
        await pilot.press("escape")


async def test_a_bad_preset_of_the_user_is_told_and_stops_nothing(runs_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "so-tui" / "presets"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text('extends = "tiny"\n[offload]\nratoi = 0.5\n')
    async with opened(runs_dir) as pilot:
        table = await presets_ready(pilot)
        assert table.row_count == len(load_catalog().presets)
        told = shown(pilot, "#problems")
        assert "ratoi" in told
        assert "broken.toml" in told


@pytest.mark.parametrize("size", SIZES)
async def test_dashboard_of_a_live_run(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=60)
    async with opened(runs_dir, size, open_run=run) as pilot:
        screen = pilot.app.screen
        await until(pilot, lambda: "training" in shown(pilot, "#title"))
        text = screen_text(pilot)
        for word in (
            "step 120 / 5 000",
            "loss",
            "throughput" if size[0] > 100 else "speed",
            "TFLOPS",
            "node 0",
            "Adam",
            "main",
            "GPU 0",
            "log",
            "exposed",
        ):
            assert word in text, word
        assert len(screen.query_one(NumaNodes).pictures) == 4
        loss = screen.query_one("#loss", Chart)
        assert loss.axis is not None
        assert loss.axis.unit == "step"
        await pilot.press("x")
        assert loss.axis.unit == "time"
        await pilot.press("x", "z")
        assert loss.axis.high - loss.axis.low < 70
        await pilot.press("0", "i")
        assert loss.cursor == 120
        await pilot.press("left", "left")
        assert loss.cursor is not None
        assert loss.cursor < 120
        assert "at step" in screen_text(pilot)
        await pilot.press("escape")
        assert loss.cursor is None
        await pilot.press("L")
        assert loss.log_scale
        await pilot.press("m")
        assert screen.maximized is loss
        await pilot.press("m")
        assert screen.maximized is None


@pytest.mark.parametrize("size", SIZES)
async def test_every_value_of_the_loss_is_read_whole(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    writer = MetricsWriter(run, 1)
    for step, loss in ((60, 2.5), (110, 2.25)):
        writer.append(EvaluationRecord(attempt=1, time=time.time(), step=step, loss=loss, tokens=100))
    writer.close()

    def heading() -> str:
        return pilot.app.screen.query_one("#loss", Chart).render_line(0).text

    async with opened(runs_dir, size, open_run=run) as pilot:
        await until(pilot, lambda: re.search(r"now \d\.\d\d  mean \d\.\d\d  eval(uation)? 2\.25", heading()))
        await pilot.press("i", *["left"] * 8)
        await until(pilot, lambda: re.search(r"loss  \d\.\d\d  mean \d\.\d\d  eval(uation)? 2\.50(  at step \d+)? *$", heading()))


@pytest.mark.parametrize("size", SIZES)
async def test_a_maximised_panel_keeps_the_run_and_the_keys_in_sight(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)
    async with opened(runs_dir, size, open_run=run) as pilot:
        await until(pilot, lambda: "training" in shown(pilot, "#title"))
        for number, panel in enumerate((Chart, Chart, NumaNodes, LogView)):
            await pilot.press(*["tab"] * min(number, 1), "m")
            await until(pilot, lambda: "m Back" in screen_text(pilot).splitlines()[-1])
            assert isinstance(pilot.app.screen.maximized, panel)
            text = screen_text(pilot)
            for word in ("so-tui", "● 1 run live", "● training", "^p"):
                assert word in text, word
            assert "╱" not in text, "the panel has the whole width"
            assert pilot.app.screen.maximized.region.bottom == size[1] - 1
            assert ("m", "All panels again") in [(key, more) for _, keys in key_groups(pilot.app.screen) for key, _, more in keys]
            await pilot.press("escape" if number % 2 else "m")
            await until(pilot, lambda: "m Maximise" in screen_text(pilot))
        await pilot.press("m", "slash", *"step 42/")
        await until(pilot, lambda: "step 42/" in screen_text(pilot).splitlines()[-2])
        await pilot.press("enter")
        state = msgspec.structs.replace(read_state(run), state="failed", reason="rank 2 was lost", suggestion="so-tui resume it")
        write_state(run, state)
        await until(pilot, lambda: "✗ failed" in shown(pilot, "#title"))
        assert "rank 2 was lost" in screen_text(pilot).splitlines()[2]


async def test_what_is_left_and_now_is_said_only_while_it_trains(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=120, seconds_of_samples=5)

    def headings() -> str:
        return "\n".join(pilot.app.screen.query_one(chart, Chart).render_line(0).text for chart in ("#loss", "#throughput"))

    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "left " in shown(pilot, "#title") and "now " in headings() and "last " not in headings())
        request(run, "stop")
        await until(pilot, lambda: "asked to stop" in shown(pilot, "#title"))
        assert "left " not in shown(pilot, "#title")
        for state in ("saving", "loading", "finished"):
            write_state(run, msgspec.structs.replace(read_state(run), state=state))
            await until(pilot, lambda state=state: state in shown(pilot, "#title"))  # type: ignore[misc]
            assert "left " not in shown(pilot, "#title")
            assert re.search(r"loss +last \d", headings())
            assert re.search(r"throughput +last \d", headings())


async def test_log_follows_is_searched_and_lets_go(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=150, seconds_of_samples=5)
    async with opened(runs_dir, open_run=run) as pilot:
        log = pilot.app.screen.query_one(LogView)
        await until(pilot, lambda: log.lines and log.scroll_y == log.max_scroll_y)
        assert log.following
        await pilot.press("slash", *"step 42/", "enter")
        assert log.matches == 1
        assert not log.following
        found = next(index for index, line in enumerate(log.lines) if "step 42/" in line)
        assert log.scroll_y <= found < log.scroll_y + log.size.height
        await pilot.press("f")
        assert log.following
        run.log_path(1, "quad-gh200").open("a").write("Traceback: the newest line\n")
        await until(pilot, lambda: "the newest line" in log.lines[-1])
        assert log.scroll_y == log.max_scroll_y


async def test_the_speed_of_ranks_without_gpus_is_not_told_by_gpu(runs_dir: Path) -> None:
    machine = msgspec.structs.replace(quad_machine(), gpus=())
    run = write_run(runs_dir, steps=20, seconds_of_samples=5, machine=machine, preset="tiny", gpus=2)
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "TFLOPS/rank" in screen_text(pilot))
        assert "TFLOPS/GPU" not in screen_text(pilot)


async def test_long_lines_of_the_log_are_cut_and_whole_where_it_is_maximised(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=5)
    with run.log_path(1, "quad-gh200").open("a") as file:
        file.write(f"{'long ' * 40}end\n")
    async with opened(runs_dir, (80, 24), open_run=run) as pilot:
        log = pilot.app.screen.query_one(LogView)
        await until(pilot, lambda: re.search("long long .*…", screen_text(pilot).splitlines()[-2]))
        assert not log.show_horizontal_scrollbar
        log.focus()
        await pilot.press("m")
        await until(pilot, lambda: log.show_horizontal_scrollbar)
        log.scroll_to(x=log.max_scroll_x, animate=False)
        await until(pilot, lambda: screen_text(pilot).splitlines()[-3].rstrip().endswith("long end"))
        await pilot.press("m")
        await until(pilot, lambda: not log.show_horizontal_scrollbar)
        await until(pilot, lambda: re.match(" long long .*…", screen_text(pilot).splitlines()[-2]))
        assert log.following


async def test_stop_asks_and_no_is_the_default(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=10, seconds_of_samples=2)
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "training" in shown(pilot, "#title"))
        await pilot.press("s", "enter")
        await pilot.pause()
        assert not pending(run)
        await pilot.press("s", "y")
        await until(pilot, lambda: "stop" in pending(run))


@pytest.mark.parametrize("size", SIZES)
async def test_before_the_first_step_the_phase_is_told(runs_dir: Path, size: tuple[int, int]) -> None:
    run = write_run(runs_dir, steps=0, seconds_of_samples=5, state="loading")
    async with opened(runs_dir, size, open_run=run) as pilot:
        await until(pilot, lambda: "loading" in shown(pilot, "#title"))
        assert "reading the weights" in screen_text(pilot)


async def test_an_ended_run_says_why_and_what_next(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=30, seconds_of_samples=2, state="failed")
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "failed" in shown(pilot, "#title"))
        text = screen_text(pilot)
        assert "out of GPU memory" in text
        assert "micro-batch 4 -> 2" in text
        assert "r Resume" in text
        assert "s Stop" not in text


@pytest.mark.parametrize("state", ["training", "failed"])
async def test_a_run_whose_folder_is_deleted_offers_nothing(runs_dir: Path, state: State) -> None:
    run = write_run(runs_dir, steps=30, seconds_of_samples=2, state=state)
    async with opened(runs_dir, (80, 24), open_run=run) as pilot:
        await until(pilot, lambda: state in shown(pilot, "#title"))
        shutil.rmtree(run.path)
        await until(pilot, lambda: "✗ deleted" in shown(pilot, "#title"))
        await until(pilot, lambda: not {"r Resume", "s Stop", "c Save now"} & set(screen_text(pilot).splitlines()[-1].split("  ")))
        text = screen_text(pilot)
        assert "its folder has been deleted" in text
        assert state not in text.split("its folder")[0]
        assert "so-tui resume" not in text


@pytest.mark.parametrize("size", SIZES)
async def test_runs_are_listed_previewed_compared_opened_and_deleted(runs_dir: Path, size: tuple[int, int]) -> None:
    live = write_run(runs_dir, steps=40, seconds_of_samples=2, name="live")
    old = write_run(runs_dir, steps=60, total=60, seconds_of_samples=2, state="finished", preset="tiny", gpus=2, name="old")
    async with opened(runs_dir, size) as pilot:
        await pilot.press("4")
        table = pilot.app.screen.query_one("#table", DataTable)
        await until(pilot, lambda: table.row_count == 2)
        await until(pilot, lambda: pilot.app.screen.query_one("#overlay", Chart).lines)
        text = screen_text(pilot)
        for word in ("✓ finished", "● training", "live", "old", "60 / 60", "D Delete"):
            assert word in text, word
        assert table.cursor_row == 0
        await pilot.press("space", "down", "space")
        assert len(pilot.app.screen.query_one("#overlay", Chart).lines) == 2
        await pilot.press("equals_sign")
        await until(pilot, lambda: re.search(r"data\.sequence_length +256 +4096 +\n", screen_text(pilot)))
        await pilot.press("escape", "D")
        assert pilot.app.screen is not table.screen or live.path.exists()
        assert live.path.exists(), "the cursor is on the live run, which is never deleted"
        await pilot.press("up", "D")
        await pilot.pause()
        assert "Delete old?" in screen_text(pilot)
        await pilot.press("enter")
        assert old.path.exists(), "no is the default"
        await pilot.press("D", "y")
        await until(pilot, lambda: not old.path.exists())
        await until(pilot, lambda: table.row_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: pilot.app.current_mode == "dashboard")
        await until(pilot, lambda: "live" in shown(pilot, "#title"))


async def test_a_run_whose_folder_is_gone_is_said_to_be_gone(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui.ui.app.RUNS_POLL_S", 1e6)  # the list does not notice in the middle of this
    run = write_run(runs_dir, steps=10, seconds_of_samples=2, state="failed")
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "failed" in shown(pilot, "#title"))
        await pilot.press("4")
        await until(pilot, lambda: "r Resume" in screen_text(pilot).splitlines()[-1])
        shutil.rmtree(run.path)
        for screen, key in (("4", "r"), ("3", "equals_sign")):
            await pilot.press(screen, key)
            await until(pilot, lambda: "folder of the run was deleted" in " ".join(screen_text(pilot).replace("▌", "").split()))
            await pilot.press("escape")


async def test_empty_dashboard_and_runs_say_what_brings_them_to_life(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await pilot.press("3")
        await pilot.pause()
        assert "Press 1 and then l" in screen_text(pilot)
        await pilot.press("4")
        await pilot.pause()
        assert "No runs yet" in screen_text(pilot)


@pytest.mark.parametrize("size", SIZES)
async def test_machine_hangs_together_and_doctor_speaks(runs_dir: Path, size: tuple[int, int]) -> None:
    async with opened(runs_dir, size) as pilot:
        await pilot.press("5")
        await until(pilot, lambda: "node 0" in shown(pilot, "#tree"))
        tree = shown(pilot, "#tree")
        for word in ("72 cores 216-287", "GPU 3", "node 28", "its own memory", "NVLink-C2C"):
            assert word in tree, word
        await until(pilot, lambda: pilot.app.findings is not None)  # type: ignore[attr-defined]
        assert "deepspeed 0.19.8" in shown(pilot, "#software")


async def test_every_command_is_in_the_palette_and_the_help(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=5, seconds_of_samples=2)
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "training" in shown(pilot, "#title"))
        names = {command.title for command in pilot.app.get_system_commands(pilot.app.screen)}
        assert {"Stop", "Save now", "Axis", "Zoom", "Inspect", "Maximise", "Search", "Quit", "Go to Presets", "Help", "Theme"} <= names
        await pilot.press("ctrl+p")
        await until(pilot, lambda: "Save now" in screen_text(pilot))
        await pilot.press("escape", "question_mark")
        text = screen_text(pilot)
        for word in ("what it is for", "Stop", "Everywhere"):
            assert word in text, word
        await pilot.press("escape", "1")
        await pilot.pause()
        assert {"Launch", "Filter"} <= {command.title for command in pilot.app.get_system_commands(pilot.app.screen)}


async def test_keys_that_multiplexers_take_are_left_to_them(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        for number in "12345":
            await pilot.press(number)
            await pilot.pause()
            assert not {"ctrl+b", "ctrl+a", "ctrl+enter"} & set(pilot.app._bindings.key_to_bindings)
            assert not {"ctrl+b", "ctrl+a", "ctrl+enter"} & set(pilot.app.screen._bindings.key_to_bindings)


@pytest.mark.parametrize("width", [40, 60, 80])
async def test_every_screen_and_the_help_are_told_however_narrow(runs_dir: Path, width: int) -> None:
    async with opened(runs_dir, (width, 20)) as pilot:
        await pilot.press("5")
        await until(pilot, lambda: re.search("1.* 2.* 3.* 4.* 5 Mach.* [?] help", screen_text(pilot).splitlines()[1]))


async def test_the_line_of_keys_uses_its_room_and_tells_the_way_out(runs_dir: Path) -> None:
    async with opened(runs_dir, (80, 24)) as pilot:
        for number in "12345":
            await pilot.press(number)
            await pilot.pause()
            keys = screen_text(pilot).split("\n")[-1]
            assert "q Quit" in keys
            assert "^p commands" in keys
        await pilot.press("1")
        await presets_ready(pilot)
        assert "/ Filter" in screen_text(pilot).split("\n")[-1]


async def test_a_text_field_is_told_no_keys_that_it_would_take_for_itself(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        await pilot.press("slash")
        assert screen_text(pilot).split("\n")[-1].split() == ["esc", "Leave", "the", "field", "F5", "Launch", "^p", "commands"]
        await pilot.press("escape", "2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow))
        await pilot.press("tab")
        keys = screen_text(pilot).split("\n")[-1].split()
        assert keys == ["esc", "Leave", "the", "field", "F5", "Launch", "^s", "Save", "^p", "commands"]


async def test_one_key_means_one_thing(runs_dir: Path) -> None:
    """A key may be absent from a screen, but never does something else there."""
    meaning: dict[str, set[str]] = {}
    async with opened(runs_dir) as pilot:
        for number in "12345":
            await pilot.press(number)
            await pilot.pause()
            for key, bindings in pilot.app.screen._bindings.key_to_bindings.items():
                meaning.setdefault(key, set()).update(binding.action.partition("(")[0] for binding in bindings if binding.id)
    assert {key: actions for key, actions in meaning.items() if len(actions) > 1} == {}


async def test_the_mouse_reaches_screens_and_keys(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        text = screen_text(pilot).split("\n")
        await pilot.click(offset=(text[1].index("4 Runs") + 2, 1))
        await until(pilot, lambda: pilot.app.current_mode == "runs")
        await pilot.click(offset=(text[1].index("Presets") + 2, 1))
        await until(pilot, lambda: pilot.app.current_mode == "presets")
        keys = screen_text(pilot).split("\n")[-1]
        await pilot.click(offset=(keys.index("Filter") + 1, 35))
        await until(pilot, lambda: pilot.app.screen.query_one("#filter").display)


async def test_without_colour_everything_is_still_told_apart(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = write_run(runs_dir, steps=20, seconds_of_samples=3)
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "training" in shown(pilot, "#title"))
        for strip in pilot.app.screen._compositor.render_strips(pilot.app.size):
            for segment in strip.apply_filter(pilot.app._filters[-1], pilot.app.screen.background_colors[1]):
                colour = segment.style.color if segment.style else None
                if colour is not None and colour.triplet is not None:
                    assert len(set(colour.triplet)) == 1, "only shades of grey"
        assert "● training" in screen_text(pilot)


async def test_what_is_off_looks_off_without_colour(runs_dir: Path) -> None:
    async with opened(runs_dir, (120, 60)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "fits" in shown(pilot, "#verdict"))
        packing = pilot.app.screen.query_one("#field-data-packing", FieldRow)
        boxes = set(re.findall("▐(.)▌ +(yes|no)", screen_text(pilot)))
        packing.focus_control()
        await pilot.press("space")
        await until(pilot, lambda: "1 change" in shown(pilot, "#form-title"))
        assert boxes | set(re.findall("▐(.)▌ +(yes|no)", screen_text(pilot))) == {("X", "yes"), (" ", "no")}


async def test_plain_characters_where_the_locale_has_no_others(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SO_TUI_GLYPHS", "ascii")
    run = write_run(runs_dir, steps=20, seconds_of_samples=3)
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "training" in shown(pilot, "#title"))
        plain = pilot.app._filters[-1]
        for number in "31245":
            await pilot.press(number)
            await pilot.pause(0.2)
            for strip in pilot.app.screen._compositor.render_strips(pilot.app.size):
                text = strip.apply_filter(plain, pilot.app.screen.background_colors[1]).text
                assert text.isascii(), text


@pytest.mark.parametrize("theme", ["so-tui-light", "textual-dark", "ansi-dark"])
async def test_every_theme_has_the_colours(runs_dir: Path, theme: str) -> None:
    run = write_run(runs_dir, steps=20, seconds_of_samples=3)
    async with opened(runs_dir, open_run=run) as pilot:
        await until(pilot, lambda: "training" in shown(pilot, "#title"))
        pilot.app.theme = theme
        for number in "12345":
            await pilot.press(number)
            await pilot.pause()
            assert "so-tui" in screen_text(pilot)


async def test_a_worker_that_fails_says_so(runs_dir: Path) -> None:
    async with opened(runs_dir, start=lambda *_, **__: 1 / 0) as pilot:
        await presets_ready(pilot)
        await pilot.press("l", "y")
        await until(pilot, lambda: any("ZeroDivisionError" in note.message for note in pilot.app._notifications))


async def test_a_real_directory_is_created_by_the_default_start(runs_dir: Path) -> None:
    """The run list sees what another process creates."""
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        spec = load_catalog().presets["tiny"].spec
        create_run(spec, runs_dir)
        pilot.app.list_runs()  # type: ignore[attr-defined]
        await until(pilot, lambda: len(pilot.app.runs) == 1)  # type: ignore[attr-defined]
        assert not pilot.app.screen.query_one("#first-visit").display


async def test_a_burst_of_keys_is_taken_in_the_order_it_was_typed(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow))
        await pilot.press("tab")
        field = pilot.app.focused
        assert isinstance(field, Input)
        for key, character in [("backspace", "\x7f")] * 4 + [("3", "3"), ("4", "4"), ("left", ""), ("1", "1")]:
            pilot.app.post_message(events.Key(key, character or None))
        await until(pilot, lambda: len(field.value) == 3)
        assert field.value == "314"


async def test_tab_goes_on_from_the_field_that_was_left(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.screen.query(FieldRow))
        await pilot.press("tab", "tab", "tab")
        third = pilot.app.focused
        await pilot.press("tab", "escape")
        assert pilot.app.focused is None
        await pilot.press("shift+tab")
        assert pilot.app.focused is third
        await pilot.press("escape", "tab", "escape", "shift+tab")
        assert pilot.app.focused is third


async def test_a_filter_keeps_the_chosen_model_and_says_when_there_is_none(runs_dir: Path) -> None:
    async with opened(runs_dir) as pilot:
        await presets_ready(pilot)
        await pilot.press("slash", *"30b", "enter")
        assert "Qwen3 30B" in shown(pilot, "#detail-title")
        await pilot.press("escape")
        await until(pilot, lambda: "Qwen3 30B" in shown(pilot, "#detail-title"))
        await pilot.press("slash", *"zzz")
        await until(pilot, lambda: "no model" in shown(pilot, "#detail-title"))


async def test_why_a_run_failed_is_read_whole_in_a_small_terminal(runs_dir: Path) -> None:
    run = write_run(runs_dir, steps=40, seconds_of_samples=3, state="failed")
    async with opened(runs_dir, (80, 24), open_run=run) as pilot:
        await until(pilot, lambda: "ran out of GPU memory" in screen_text(pilot))
        assert "11 GiB less" in " ".join(screen_text(pilot).split())
