"""Messages from workers to screens: posted from a thread, handled in the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from textual.message import Message
from textual.worker import get_current_worker

from so_tui.trust.text import quoted

if TYPE_CHECKING:
    from textual.message_pump import MessagePump

    from so_tui.launch.checks import Check
    from so_tui.launch.slurm.client import Partition
    from so_tui.machine.doctor import Finding
    from so_tui.machine.types import Machine
    from so_tui.plan.plan import Launch, Plan
    from so_tui.runs import RunDirectory
    from so_tui.spec import Catalog, Problem, SoTuiError
    from so_tui.ui.form import Strip


def answer(to: MessagePump, message: Message) -> None:
    """Post a worker's result, unless the worker was cancelled: the thread of an exclusive worker
    runs on after another has replaced it.
    """
    if not get_current_worker().is_cancelled:
        to.post_message(message)


class Loaded(Message):
    """Presets and machine are loaded; ``machine_file`` describes the machine where it is another
    one.
    """

    def __init__(self, catalog: Catalog, machine: Machine, machine_file: str) -> None:
        self.catalog, self.machine, self.machine_file = catalog, machine, machine_file
        super().__init__()


class Offer(NamedTuple):
    """An action that is offered where something failed."""

    text: str
    action: Callable[[], None]


class Failed(Message):
    """A worker failed; ``title`` names what was tried, and ``offer`` is what the user can do about
    it at once.
    """

    def __init__(self, title: str, lines: tuple[str, ...], *, offer: Offer | None = None) -> None:
        self.title, self.lines, self.offer = title, lines, offer
        super().__init__()


class CheckBegun(Message):
    """A launch that is being checked has come to this check, at this monotonic time."""

    def __init__(self, check: Check, since: float) -> None:
        self.check, self.since = check, since
        super().__init__()


class NotLaunched(Failed):
    """A launch was refused, or failed before its run was in a supervisor's hands."""

    def __init__(
        self, title: str, lines: tuple[str, ...], error: SoTuiError, *, offer: Offer | None = None
    ) -> None:
        self.error = error
        super().__init__(title, lines, offer=offer)


class Launched(Message):
    """A run was started and is in the supervisor's hands."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        super().__init__()


class Planned(Message):
    """The plan of the values in the form, or their problems; ``serial`` identifies the request."""

    def __init__(
        self,
        serial: int,
        plan: Plan | None,
        problems: tuple[Problem, ...],
        launch: Launch | None = None,
    ) -> None:
        self.serial, self.plan, self.problems, self.launch = serial, plan, problems, launch
        super().__init__()

    @property
    def command(self) -> str:
        """The command that a launch starts; empty without a launch."""
        return quoted(*self.launch.argv) if self.launch else ""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Planned)


class Compared(Message):
    """What other values of some fields would do."""

    def __init__(self, serial: int, strips: tuple[Strip, ...]) -> None:
        self.serial, self.strips = serial, strips
        super().__init__()

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Compared)


class Partitions(Message):
    """Slurm has said which partitions this user sees."""

    def __init__(self, partitions: tuple[Partition, ...]) -> None:
        self.partitions = partitions
        super().__init__()


class Diagnosed(Message):
    """Doctor's findings, worst first."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        self.findings = findings
        super().__init__()
