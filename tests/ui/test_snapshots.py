"""Pictures of screens, compared with those in ``__snapshots__``; CONTRIBUTING.md: how to renew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from so_tui.machine.types import Machine
from so_tui.runs import RunDirectory
from so_tui.ui.chat.screen import ChatScreen
from so_tui.ui.configure.screen import ConfigureScreen
from so_tui.ui.dashboard.screen import DashboardScreen
from so_tui.ui.machine.screen import MachineScreen
from so_tui.ui.presets.screen import PresetsScreen
from so_tui.ui.runs.screen import RunsScreen
from tests.support import pictured
from tests.support.machines import x86
from tests.support.make_run import quad_machine
from tests.support.picture import picture_of
from tests.support.screen import Driver, opened

THIS_HOST = replace(quad_machine(), live=True)
LOGIN_NODE = replace(x86(), hostname="login02", live=True)
SMALL, MEDIUM, LARGE = (80, 24), (120, 36), (200, 50)
HERE = Path("/proc/self/cwd")
"""The folder of a test by the same name everywhere: paths are shown."""
STANDING = ("list runs", "follow the run", "sample this machine", "load and ask the model")
"""Workers that go on. What the others answer is awaited."""


@dataclass(frozen=True)
class Picture:
    """A screen, the keys that lead to it from the picture before, and the sizes of its pictures."""

    name: str
    keys: str = ""
    text: str = ""
    """Typed and entered after the keys."""
    sizes: tuple[tuple[int, int], ...] = (SMALL, MEDIUM, LARGE)
    theme: str = "so-tui-dark"


@dataclass(frozen=True)
class Walk:
    """Pictures of one application, in this order: starting it costs as much as five pictures."""

    name: str
    pictures: tuple[Picture, ...]
    run: str = ""
    """The run that is opened; the dashboard is the first screen then."""
    machine: Machine = THIS_HOST
    runs: str = "runs"
    """Folder of the runs."""
    silent_s: float = 0.0
    """Seconds since the last heartbeat of live runs."""
    environment: dict[str, str] = field(default_factory=dict)
    short_form: bool = False
    """Whether Configure has its first groups only: the others are not seen."""


def state(name: str, keys: str = "", **more: str) -> Picture:
    return Picture(name, keys, sizes=(MEDIUM,), **more)


LIVE = "qwen3-14b-a"


def looks(name: str, *themes: str, **environment: str) -> Walk:
    """Return dashboard and Configure, with a wrong field, in other looks, called by their names."""
    same = [(name.lower().replace(" ", "-"), "so-tui-dark")]
    named = [(theme, f"so-tui-{theme}") for theme in themes] or same
    dashboard = [state(f"dashboard-{called}", theme=theme) for called, theme in named]
    configure = [
        state(f"configure-{called}", "" if at else "1 enter tab 9 escape", theme=theme)
        for at, (called, theme) in enumerate(named)
    ]
    return Walk(name, (*dashboard, *configure), LIVE, environment=environment, short_form=True)


WALKS = (
    Walk(
        "preset",
        (
            Picture("presets"),
            Picture("launch", "l"),
            Picture("data", "d"),
            Picture("configure", "enter k right"),
        ),
    ),
    Walk(
        "run",
        (
            Picture("dashboard"),
            Picture("metrics", "M"),
            state("help", "question_mark"),
            Picture("settings", "comma"),
            Picture("stop", "s", sizes=(SMALL,)),
            Picture("log", "shift+tab m"),
            state("cursor", "m i left left left"),
            state("overlay", "escape v space down space down space enter"),
            state("hardware", "H"),
            state("heat", "H h"),
        ),
        run=LIVE,
    ),
    Walk(
        "runs",
        (
            Picture("runs", "4"),
            state("loading", "down enter"),
            state("failed", "4 down enter"),
            state("resume", "r"),
            state("finished", "4 down enter"),
            state("lost", "4 down enter"),
            Picture("delete", "4 D", sizes=(LARGE,)),
            Picture("chat", "up C", text="What is the difference between git fetch and git pull?"),
            Picture("compare", "space down space equals_sign"),
        ),
    ),
    Walk("machine", (Picture("machine", "5"), state("validation", "e"))),
    Walk(
        "first start",
        (state("first-start-without-gpu"), state("empty", "3")),
        machine=LOGIN_NODE,
        runs="none",
    ),
    Walk("silence", (state("stale"),), run=LIVE, silent_s=42.0),
    looks("themes", "light", "contrast"),
    looks("no colour", NO_COLOR="1"),
    looks("ASCII", SO_TUI_GLYPHS="ascii"),
)
IN_LARGE = ", large"


class SvgExtension(SingleFileSnapshotExtension):
    file_extension = "svg"
    _write_mode = WriteMode.TEXT

    @classmethod
    def get_snapshot_name(cls, **where: Any) -> str:
        """Keep the pictures of a walk together, whatever their size."""
        return super().get_snapshot_name(**where).replace(IN_LARGE, "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        pictured.write_runs(folder / "runs", patch)
        patch.setattr("time.time", lambda: pictured.NOW)
        yield folder
    time.tzset()


@pytest.fixture(autouse=True)
def _same_everywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing on the screen to this host, to chance, or to when it is drawn."""
    monkeypatch.chdir(folder)
    for name in ("CONFIG", "STATE", "DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(HERE / name.lower()))
    monkeypatch.setattr(
        "so_tui.doctor.findings", lambda machine, **_: pictured.FINDINGS if machine.gpus else ()
    )
    monkeypatch.setattr("so_tui.runs.liveness._age_s", lambda _: 0.0)
    monkeypatch.setattr("so_tui.ui.machine.screen.Monitor", pictured.FixedMonitor)
    monkeypatch.setattr("so_tui.launch.helper_jobs.preview_data", pictured.preview_data)
    monkeypatch.setattr("so_tui.launch.helper_jobs.ModelProcess", pictured.FixedModel)
    monkeypatch.setattr("so_tui.validation.report.read", lambda _: pictured.validation_report())
    monkeypatch.setattr("textual.widgets.Input.cursor_blink", False)
    # A third of the form, which is never in view.
    monkeypatch.setattr("so_tui.ui.configure.form.advanced_paths", tuple)


def complete(ui: Driver) -> bool:
    """Return whether the page on the screen has everything that it will show."""
    app = ui.app
    working = any(worker.is_running and worker.name not in STANDING for worker in app.workers)
    if app.findings is None or app.starting or working or ui.screen._layout_required:
        return False
    if isinstance(ui.screen, ChatScreen):
        return bool(ui.screen._columns) and not ui.screen.writing
    match app.screen_stack[0]:
        case PresetsScreen() as page:
            # A table knows how much of it there is to scroll.
            return bool(page.rows) and not page.table._require_update_dimensions
        case ConfigureScreen() as page:
            return page._planned is not None and page._planned.serial == page._serial
        case DashboardScreen() as page:
            return page.run_shown is None or (
                page.snapshot is not None and not page.snapshot.unread_share
            )
        case RunsScreen() as page:
            read = all(row.run in page._curves or not row.state.step for row in app.runs)
            return read and not page.table._require_update_dimensions
        case MachineScreen() as page:
            return page._view is not None or not page.host.display
    return False


async def at_rest(ui: Driver) -> None:
    """Wait until the screen is complete, and drawn as of the last key and the present size."""
    await ui.until(lambda: complete(ui))
    page = ui.app.screen_stack[0]
    if isinstance(page, DashboardScreen) and page.run_shown is not None and page.is_current:
        for _ in range(2):  # the first may have begun before the last key or size
            before = page.snapshot
            await ui.until(lambda: page.snapshot is not before)  # noqa: B023 - called at once
    drawn = False
    while not drawn:
        await ui.until(lambda: complete(ui))
        # Textual lays out what is under a dialog only if it happens to be in time.
        for screen in ui.app.screen_stack[:-1]:
            while screen._layout_required:
                screen._layout_required = False
                screen._refresh_layout()
                await ui.pilot.pause()
        drawn = complete(ui)  # nothing came while the screen was drawn
    # A scroll bar that a smaller size or a longer text needed goes with the next layout, whenever
    # that is. The page may not even have heard of its size yet.
    for screen in ui.app.screen_stack[:-1]:
        for _ in range(2):
            taken = asyncio.Event()
            screen.call_later(taken.set)
            await taken.wait()
            if isinstance(screen, DashboardScreen):
                # was laid out with the rows of another size since; the next snapshot of the run
                # does the same
                await screen.on_resize()
            screen._refresh_layout()
            await ui.pilot.pause()
    ui.screen.refresh(layout=True)
    await ui.pilot.pause()
    await ui.until(lambda: complete(ui))


async def go_to(ui: Driver, picture: Picture) -> None:
    """Leave the dialog of the picture before, and press the keys."""
    if len(ui.app.screen_stack) > 1:
        await ui.press("escape")
    ui.app.theme = picture.theme
    for key in picture.keys.split():
        await ui.press(key)
        await ui.until(lambda: complete(ui))
    if picture.text:
        await ui.type_text(picture.text)
        await ui.press("enter")


def walks() -> Iterator[Any]:
    """Yield each walk with the sizes of its pictures: the largest and other looks are slow."""
    for walk in WALKS:
        slow = [pytest.mark.slow]
        yield pytest.param(
            walk, (SMALL, MEDIUM), id=walk.name, marks=slow if walk.short_form else []
        )
        if any(LARGE in picture.sizes for picture in walk.pictures):
            yield pytest.param(walk, (LARGE,), id=f"{walk.name}{IN_LARGE}", marks=slow)


@pytest.mark.parametrize(("walk", "sizes"), list(walks()))
async def test_pictures(
    walk: Walk,
    sizes: tuple[tuple[int, int], ...],
    snapshot: SnapshotAssertion,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    for name, value in walk.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("so_tui.runs.HeartbeatWatch.unchanged_s", lambda *_: walk.silent_s)
    if walk.short_form:
        request.getfixturevalue("_short_form")
    run = RunDirectory(HERE / walk.runs / walk.run) if walk.run else None
    differ = []
    async with opened(
        HERE / walk.runs, walk.pictures[0].sizes[0], machine=walk.machine, open_run=run
    ) as ui:
        await ui.until(lambda: complete(ui))
        for picture in walk.pictures:
            await go_to(ui, picture)
            for width, height in picture.sizes:  # keys are pressed in the last of them
                await ui.resize(width, height)
                if (width, height) not in sizes:
                    continue
                await at_rest(ui)
                name = f"{picture.name}-{width}x{height}"
                if picture_of(ui.app) != snapshot(name=name, extension_class=SvgExtension):
                    differ.append(name)
    assert not differ
