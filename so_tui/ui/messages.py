"""What workers tell the screens: each a frozen value, posted from a thread, handled in the event loop."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from textual.message import Message
from textual.worker import get_current_worker

if TYPE_CHECKING:
    from textual.message_pump import MessagePump

    from so_tui.launch import Launch
    from so_tui.machine.doctor import Finding
    from so_tui.machine.types import Machine
    from so_tui.plan.types import Plan
    from so_tui.runs import RunDirectory
    from so_tui.spec import Catalog, Problem


def answer(to: MessagePump, message: Message) -> None:
    """Post what a worker found. The thread of an exclusive one runs on when another takes its place, and its answer is none any more."""
    if not get_current_worker().is_cancelled:
        to.post_message(message)


class Loaded(Message):
    """The presets and the machine are known; ``machine_file`` describes it where it is not this one."""

    def __init__(self, catalog: Catalog, machine: Machine, machine_file: str) -> None:
        self.catalog, self.machine, self.machine_file = catalog, machine, machine_file
        super().__init__()


class Failed(Message):
    """A worker could not do its work; ``title`` says what was tried."""

    def __init__(self, title: str, lines: tuple[str, ...], *, retry_forced: Launch | None = None) -> None:
        self.title, self.lines, self.retry_forced = title, lines, retry_forced
        super().__init__()


class Launched(Message):
    """A run was started and is in the supervisor's hands."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        super().__init__()


class Planned(Message):
    """The plan of what stands in the form, or what is wrong with it; ``serial`` tells an old answer from a new one."""

    def __init__(self, serial: int, plan: Plan | None, problems: tuple[Problem, ...], launch: Launch | None = None) -> None:
        self.serial, self.plan, self.problems, self.launch = serial, plan, problems, launch
        super().__init__()

    @property
    def command(self) -> str:
        """The command that a launch starts; empty without a launch."""
        return shlex.join(self.launch.argv) if self.launch else ""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Planned)


class Diagnosed(Message):
    """Doctor's findings, worst first."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        self.findings = findings
        super().__init__()
