"""What starts supervisors, and what it knows of their jobs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from so_tui.runs.directory import RunDirectory
from so_tui.runs.outcome import OutcomeCode
from so_tui.spec import Problem

if TYPE_CHECKING:
    from so_tui.launch.preparation import Launch


class SupervisorHandle(Protocol):
    """A supervisor that an executor has started on this machine."""

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended; None while it runs."""


class JobPhase(StrEnum):
    """Where a job is, as its scheduler knows."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The scheduler did not answer, or has not been asked since the job was submitted."""


class JobStatus(Struct, frozen=True, kw_only=True):
    """What a scheduler knows of the job of an attempt."""

    job_id: str
    phase: JobPhase
    waits_for: str = ""
    """The scheduler's own word for why a queued job waits (``Priority``, ``Resources`` ...)."""
    expected_start: float | None = None
    """When the scheduler expects to start a queued job, in seconds since the epoch."""
    nodes: str = ""
    end: OutcomeCode | None = None
    """How a job ended that the scheduler ended, or that failed by itself; None where only the run directory can say."""
    output: str = ""
    """The last lines that a job wrote which ended before its supervisor had started."""


class Executor(Protocol):
    """Starts supervisors, and knows what becomes of them until they write the run's state."""

    @property
    def here(self) -> bool:
        """Whether runs start on this machine, so that what can be seen here decides whether they can."""

    def start(self, run: RunDirectory, attempt: int, token: str) -> SupervisorHandle | None:
        """Start the supervisor of an attempt so that it outlives this program, its terminal and its session.

        Args:
            run: The run.
            attempt: An attempt whose files are written.
            token: The starter's token, which the supervisor gets in its environment.

        Returns:
            The supervisor; None if it starts later and the run's state says ``queued``.

        Raises:
            OSError: It cannot be started.
            SoTuiError: A scheduler refused it; nothing is left of it.
        """

    def unavailable(self, launch: Launch) -> tuple[Problem, ...]:
        """Return a problem for each thing that a run could not get, or execute, where it starts, as far as that can be known here."""

    def preview(self, launch: Launch) -> str:
        """Return the batch script that a start would submit; empty if there is none."""

    def status(self, run: RunDirectory, attempt: int) -> JobStatus | None:
        """Return what a scheduler knows of an attempt; None where there is no scheduler. Cheap enough to be called every second."""

    def cancel(self, run: RunDirectory, attempt: int) -> bool:
        """Take an attempt out of a queue, or end its job. Return whether there was one. Raises SoTuiError if it cannot be done."""
