"""Every run as a row: read in a worker, and only again where something changed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from so_tui.runs import HeartbeatWatch, RunDirectory, list_runs, readable_spec
from so_tui.runs.liveness import unconfirmed
from so_tui.runs.notes import RunNotes, read_notes
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.spec import InputError, RunSpec

if TYPE_CHECKING:
    from so_tui.launch import OwnProcesses

SUPERVISION_S = 10.0
_NO_NOTES = RunNotes()


@dataclass(frozen=True)
class RunRow:
    """One run as the list of runs shows it."""

    run: RunDirectory
    spec: RunSpec | None
    """None when its ``spec.json`` cannot be read."""
    state: RunState
    checking: bool = False
    """Whether the run still lives is not known yet."""
    notes: RunNotes = _NO_NOTES
    readable: bool = True
    """Whether ``state`` was read; otherwise it says why it was not."""

    @property
    def live(self) -> bool:
        return self.state.state not in FINAL_STATES

    @property
    def shown_state(self) -> str:
        """The state as it is shown."""
        return "checking" if self.checking else self.state.shown


class RunLister:
    """Lists runs repeatedly, for one thread at a time. A run that has ended is read again only after a change."""

    def __init__(self, runs_dir: Path | None) -> None:
        self._runs_dir = runs_dir
        self._supervision_checked: dict[Path, float] = {}
        self._watch = HeartbeatWatch()
        self._ended: dict[Path, tuple[tuple[int, int], RunRow]] = {}

    def rows(self) -> tuple[RunRow, ...]:
        """Return all runs, newest first."""
        from so_tui.launch import OwnProcesses

        rows = []
        own_processes = OwnProcesses()
        for run in list_runs(self._runs_dir):
            changed = _changed_ns(run)
            known = self._ended.get(run.path)
            if known is not None and known[0] == changed:
                rows.append(known[1])
                continue
            row = self._row(run)
            if row.live:
                self._keep_supervised(run, own_processes)
            elif row.readable:  # otherwise its file system may be back at the next look, and nothing of it has changed
                self._ended[run.path] = (changed, row)
            rows.append(row)
        return tuple(rows)

    def _keep_supervised(self, run: RunDirectory, own_processes: OwnProcesses) -> None:
        """Make sure that a live run of this user has a supervisor, at intervals, because one needs a moment to take over."""
        from so_tui.launch import ensure_supervised

        now = time.monotonic()
        if now - self._supervision_checked.get(run.path, -SUPERVISION_S) >= SUPERVISION_S:
            self._supervision_checked[run.path] = now
            ensure_supervised(run, own_processes)

    def _row(self, run: RunDirectory) -> RunRow:
        from so_tui.launch import current_state

        readable = True
        try:
            state = current_state(run, self._watch)
        except InputError as error:
            readable = False
            state = RunState(
                name=run.name,
                state="lost",
                reason=error.problems[0].message,
                suggestion=error.problems[0].remedy,
            )
        return RunRow(
            run,
            readable_spec(run),
            state,
            unconfirmed(run, state, self._watch),
            read_notes(run),
            readable,
        )


def _changed_ns(run: RunDirectory) -> tuple[int, int]:
    """Return when the state and the notes of a run were written."""
    return _written_ns(run.state_path), _written_ns(run.notes_path)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # there are no notes, or the run was deleted meanwhile: state_with_truth reports what is left
        return 0
