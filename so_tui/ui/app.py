"""The application: the five screens, starting and leaving. What the screens share is in
``shared_app``.

Nothing is computed before the first paint. Named workers compute presets, machine, plans and runs
in threads.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import SystemCommand
from textual.binding import ActiveBinding
from textual.screen import ModalScreen, Screen, ScreenResultType
from textual.widgets import Input
from textual.worker import Worker

from so_tui.trust.text import printable_line, so_tui_command
from so_tui.ui import messages
from so_tui.ui.page import PAGES, Page
from so_tui.ui.preset_actions import start_launch
from so_tui.ui.shared_app import Checking, SharedApp
from so_tui.ui.textual_fixes import settle
from so_tui.ui.widgets import keys
from so_tui.units import plural

if TYPE_CHECKING:
    from so_tui.machine.types import Machine
    from so_tui.plan.plan import Launch
    from so_tui.runs import RunDirectory
    from so_tui.settings_file import Loaded
    from so_tui.spec import RunSpec, SoTuiError
    from so_tui.spec.generation import LoadModel
    from so_tui.ui.dialogs import KeyGroup, KeyRow


# The five screens of the application, each imported when it is first shown: the first paint needs
# one of them only.


def _make_page(name: str, title: str) -> Page:
    module = importlib.import_module(f"so_tui.ui.{name}.screen")
    page: Page = getattr(module, f"{title}Screen")()
    return page


RUNS_POLL_S = 2.0
SETTLED_S = 3.0
"""After the first paint: the first screen is complete."""
PACKAGES = (
    "so_tui.spec",
    "so_tui.runs",
    "so_tui.machine",
    "so_tui.doctor",
)
"""Packages that import their own modules. They are imported before any worker starts: of two
threads that import such a package and one of its modules at the same time, each may wait for the
other, and Python then lets one of them fail with an ImportError.
"""


def _import_packages() -> None:
    """Import what the threads of the workers use."""
    for package in PACKAGES:
        importlib.import_module(package)


class SoTuiApp(SharedApp):
    """``catalog`` and ``machine`` are loaded after the first paint where they are not given."""

    TITLE = "so-tui"
    CSS_PATH = "app.tcss"
    MODES: ClassVar[dict[str, str | Callable[[], Screen[None]]]] = {
        name: partial(_make_page, name, title) for name, title in PAGES
    }
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-medium"), (160, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall"), (45, "-very-tall")]
    BINDINGS = keys("application")

    def __init__(
        self,
        machine: Machine | None = None,
        runs_dir: Path | None = None,
        open_run: RunDirectory | None = None,
        *,
        launch: Launch | None = None,
        machine_file: str = "",
        settings: Loaded | None = None,
    ) -> None:
        """Create the application.

        Args:
            machine: The machine to plan for; this one if absent.
            runs_dir: The folder of runs; the user's own if absent.
            open_run: What the dashboard shows.
            launch: What a command wants started: its checks are shown at once, and a refusal ends
                the application.
            machine_file: File that describes ``machine``, where that is another one.
            settings: The user's settings; the defaults if absent.
        """
        self._launch, self._given_machine = launch, machine
        self.launched: RunDirectory | None = None
        """The first run that was started here."""
        self.refused: SoTuiError | None = None
        """Why what the command wanted was not started."""
        at_run = open_run is not None or launch is not None
        if at_run:
            _import_packages()  # the dashboard's workers start with the first paint
        # Set on the instance before Textual reads it, so that a given run is shown without another
        # screen first.
        self.__dict__["DEFAULT_MODE"] = "dashboard" if at_run else "presets"
        super().__init__(runs_dir, settings)
        self.machine_file, self.opened = machine_file, open_run
        self.inspecting = not at_run or machine is not None
        if launch is not None:
            self.checking = Checking(launch.spec.label, time.monotonic(), "dashboard")

    def on_mount(self) -> None:
        self.call_after_refresh(self._after_first_paint)

    def _after_first_paint(self) -> None:
        _import_packages()
        if self._launch is not None:
            start_launch(self, self._launch)
        self.report_settings()
        self.mode_change_signal.subscribe(self, self._load_for)
        # Another screen may have been chosen before the first paint.
        self._load_for(self.current_mode)
        self.list_runs()
        self.set_interval(RUNS_POLL_S, self.list_runs_in_time)
        if not self.is_headless:  # or an application would stay in the memory of the tests
            self.set_timer(SETTLED_S, settle)

    def _load_for(self, mode: str) -> None:
        """Load presets and machine, but not while only the dashboard of the run that was opened is
        shown.
        """
        if self.inspecting or mode != "dashboard":
            self.mode_change_signal.unsubscribe(self)
            self.inspecting = True
            self.load(self._given_machine, self.machine_file)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """End the state of starting when its worker ends. A start that was refused may have been
        repeated before its thread has ended.
        """
        if event.worker.group == "launch" and not messages.is_working(self, "launch"):
            self.starting = ""
            self._go_back()
        self.report_failure(event)

    # Starting runs.

    def _go_back(self) -> None:
        """Leave the checks of a launch that came to nothing for where it was confirmed.

        Not if the user has gone elsewhere, has a dialog open, or is quitting, when there is no
        screen any more.
        """
        checking, self.checking = self.checking, None
        here = self.current_mode == "dashboard" and len(self.screen_stack) == 1
        if checking is not None and here:
            self.switch_mode(checking.asked_on)

    def on_launched(self, message: messages.Launched) -> None:
        self.launched = self.launched or message.run
        self.list_runs()
        watched = self.checking is not None and self.current_mode == "dashboard"
        self.checking = None
        if not watched and (
            isinstance(self.screen, ModalScreen) or isinstance(self.focused, Input)
        ):
            self.notify(
                f"{message.run.name} was started. Close this with esc; 4 lists the run and enter "
                "opens it.",
                markup=False,
            )
        else:
            self.open_run(message.run)

    def on_not_launched(self, message: messages.NotLaunched) -> None:
        self.starting = ""  # what the message offers may start it again at once
        self._go_back()
        if self._launch is not None and self.launched is None:
            self.refused = message.error
            self.exit()
        else:
            self.on_failed(message)

    def on_failed(self, message: messages.Failed) -> None:
        from so_tui.ui.dialogs import Notice

        offer = message.offer
        self.push_screen(
            Notice(message.title, message.lines, offer=offer.text if offer else ""),
            lambda taken: offer.action() if taken and offer else None,
        )

    # Commands.

    def action_other_machine(self) -> None:
        from so_tui.ui.other_machine import ask_for_machine

        ask_for_machine(self)

    def action_show(self, name: str) -> None:
        page = self.screen_stack[0]
        self.switch_mode(name)
        if isinstance(page, Page):
            page.left()

    async def action_quit(self) -> None:
        """Quit. Ask first where unsaved edits in Configure would be lost."""
        unsaved = self.unsaved()
        if not unsaved:
            self._leave()
        elif self.screen.id != "quit":  # it is being asked already
            lines = [
                f"Configure: {plural(count, 'change')} to preset {preset}, not saved"
                for preset, count in unsaved.items()
            ]
            self.ask(
                "Quit and lose unsaved changes?",
                lines,
                self._leave,
                yes="Quit",
                no="No, stay",
                id="quit",
            )

    def _leave(self) -> None:
        """Leave the application, and say what goes on."""
        live = [row.run.name for row in self.runs if row.live]
        lines = []
        if live:
            names = printable_line(", ".join(live))
            goes_on = "continues" if len(live) == 1 else "continue"
            lines.append(
                f"{names} {goes_on} training. `{so_tui_command('watch', live[0])}` shows it again."
            )
        if self.starting:
            lines.append(f"{self.starting} is still being started. `so-tui watch latest` shows it.")
        self.announcer.show_title("")
        self.exit(message="\n".join(lines) or None)

    def open_chat(self, load: LoadModel) -> None:
        from so_tui.spec.generation import Sampling
        from so_tui.ui.chat.screen import ChatScreen

        self.push_screen(ChatScreen(load, Sampling()))

    def edit_plan(self, preset: str, wanted: RunSpec, field: str, *, keep_edits: bool) -> None:
        from so_tui.ui.configure.screen import ConfigureScreen

        page = self.screen_stack[0]
        if isinstance(page, ConfigureScreen) and not (keep_edits and self.unsaved()):
            page.edit(preset, wanted, field=field)

    def action_help(self) -> None:
        from so_tui.ui.dialogs import Notice, key_lines

        page = self.screen
        if isinstance(page, Page):
            keys = partial(key_lines, _key_groups(page))
            self.push_screen(
                Notice(
                    f"{dict(PAGES)[page.PAGE]}: what it is for, and its keys",
                    [page.HELP_TEXT, keys],
                    bad=False,
                )
            )

    def get_system_commands(self, screen: Screen[ScreenResultType]) -> Iterable[SystemCommand]:
        """Yield every command of the screen and the application with its key, then Textual's
        own.
        """

        for node, binding, enabled, _ in _bindings(screen):
            if enabled:
                go = "Go to " if binding.action.startswith("show(") else ""
                title = f"{go}{binding.description}"
                more = f"{binding.tooltip}; " if binding.tooltip not in ("", title) else ""
                key = self.get_key_display(binding)
                action = partial(self.run_action, binding.action, node)
                yield SystemCommand(title, f"{more}key {key}", action)
        yield SystemCommand("Theme", "Choose another theme", self.action_change_theme)
        yield SystemCommand(
            "Screenshot",
            "Save a picture (SVG) of this screen",
            lambda: self.set_timer(0.1, self.deliver_screenshot),
        )


# Keys as help and as palette commands, both read from the bindings that are in force.


SIZES = ("larger", "smaller", "reset-sizes")
"""Keys that many screens have and few users look for: they come after a screen's own."""


def _bindings(screen: Screen[ScreenResultType]) -> Iterable[ActiveBinding]:
    """Return the application's own bindings, which have an id, once per action. Moving within
    tables and fields is Textual's.
    """
    found: dict[str, ActiveBinding] = {}
    for active in screen.active_bindings.values():
        if active.binding.id:
            found.setdefault(active.binding.action, active)
    return found.values()


def _key_groups(screen: Screen[ScreenResultType]) -> list[KeyGroup]:
    """Return the keys of the screen, of the application, and for moving, each as key, name and
    details.
    """
    here: list[KeyRow] = []
    everywhere: list[KeyRow] = []
    for node, binding, *_ in sorted(_bindings(screen), key=lambda found: found.binding.id in SIZES):
        row = screen.app.get_key_display(binding), binding.description, binding.tooltip
        (everywhere if node is screen.app else here).append(row)
    everywhere += [
        ("^p", "Commands", "Every command by name"),
        ("^q", "Quit", "Also from a text field"),
    ]
    vim = ("j k g G ^d ^u", "Move as in vim", "Where the screen has no command on that key")
    moving = [
        ("tab", "Next field or panel", ""),
        ("esc", "Leave a text field", "Single keys are commands again"),
        ("arrows", "Move", "In tables, lists and logs; the mouse does the same"),
        *([vim] if screen.app.check_action("vim", ()) else []),
    ]
    return [("This screen", here), ("Everywhere", everywhere), ("Moving about", moving)]
