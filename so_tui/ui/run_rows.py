"""A run's mean loss, for the sparklines and overlays of the list of runs. Read in a worker."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from so_tui.runs import HeartbeatWatch, RunDirectory, list_runs, readable_spec
from so_tui.runs.listing import RunNotes, read_notes
from so_tui.runs.liveness import unconfirmed
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import FINAL_STATES, RunState
from so_tui.runs.results import RunResults, mean_steps_of, results_of
from so_tui.spec import InputError, RunSpec
from so_tui.ui.charts.series import MOST_ROWS, FollowedSteps, Line, Series, Wanted, mean_of

# Every run as a row: read in a worker, and only again where something changed.


SUPERVISION_S = 10.0
LOOK_S = 5.0
"""How long a look at all runs may take."""
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

    @property
    def model(self) -> str:
        """The model's label; ``?`` for a run whose settings cannot be read."""
        return self.spec.label if self.spec is not None else "?"

    @property
    def sources(self) -> tuple[str, ...]:
        """What it trains on."""
        return tuple(source.source for source in self.spec.data.sources) if self.spec else ()


class _Known(NamedTuple):
    """What was read of a run."""

    look: int
    """Number of the look."""
    changed: tuple[int, int] | None
    """When its files were written; None if it is read again in any case."""
    row: RunRow


class RunLister:
    """Lists runs repeatedly, for one thread at a time. A run that has ended is read again only
    after a change.
    """

    def __init__(self, runs_dir: Path | None) -> None:
        self._runs_dir = runs_dir
        self._supervision_checked: dict[Path, float] = {}
        self._watch = HeartbeatWatch()
        self._known: dict[Path, _Known] = {}
        self._sections: dict[bytes, Any] = {}
        """Parts of runs' settings by their content."""
        self._looks = 0
        self.unread = 0
        """Runs that the last look did not reach, and none before it."""

    def rows(self) -> tuple[RunRow, ...]:
        """Return all runs, newest first. Runs that this look has no time for (``LOOK_S``) are
        returned as they were at an earlier one; those never read are left out.
        """
        from so_tui.launch.executors import ensure_supervised
        from so_tui.launch.supervisor.processes import own_environs

        environs, deadline = cache(own_environs), time.monotonic() + LOOK_S
        self._looks += 1
        runs, known = list_runs(self._runs_dir), self._known
        # Those come first that the last look did not reach.
        for run in sorted(runs, key=lambda run: known[run.path].look if run.path in known else 0):
            if time.monotonic() >= deadline:
                break
            changed = _written_ns(run.state_path), _written_ns(run.notes_path)
            before = known.get(run.path)
            if before is not None and before.changed == changed:
                known[run.path] = before._replace(look=self._looks)
                continue
            row = self._row(run)
            # Otherwise its file system may be back at the next look, with nothing of it changed.
            final = row.readable and not row.live
            known[run.path] = _Known(self._looks, changed if final else None, row)
            if row.live:
                # Make sure that it has a supervisor, at intervals: one needs a moment to take over.
                now, checked = time.monotonic(), self._supervision_checked
                if now - checked.get(run.path, -SUPERVISION_S) >= SUPERVISION_S:
                    checked[run.path] = now
                    ensure_supervised(run, environs)
        self._known = {run.path: known[run.path] for run in runs if run.path in known}
        self.unread = len(runs) - len(self._known)
        return tuple(found.row for found in self._known.values())

    def _row(self, run: RunDirectory) -> RunRow:
        from so_tui.launch.lifecycle import current_state

        readable = True
        try:
            state = current_state(run, self._watch)
        except InputError as error:
            readable, why = False, error.problems[0]
            state = RunState(name=run.name, state="lost", reason=why.message, suggestion=why.remedy)
        spec = self._shared(readable_spec(run))
        return RunRow(
            run, spec, state, unconfirmed(run, state, self._watch), read_notes(run), readable
        )

    def _shared(self, spec: RunSpec | None) -> RunSpec | None:
        """Return the same settings, whose parts are those of other runs where they are equal: the
        parts of thousands of runs take hundreds of megabytes.
        """
        if spec is None:
            return None
        parts = {name: getattr(spec, name) for name in spec.__struct_fields__}
        shared = {
            name: self._sections.setdefault(name.encode() + msgspec.json.encode(part), part)
            for name, part in parts.items()
            if isinstance(part, msgspec.Struct)
        }
        return msgspec.structs.replace(spec, **shared)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        # there are no notes, or the run was deleted meanwhile: state_with_truth reports what is
        # left
        return 0


ROWS = 4_000
"""Most rows of the curve of an ended run: half as many are more than a terminal has dots."""
READ_S = 1.0
"""How long one look at a run may take: others wait."""
SPARK_COLUMNS = 12
_NO_RESULTS = RunResults()
_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The loss of a run over its steps, as the mean of several."""

    line: Line
    span: int
    """Steps that a mean covers."""
    spark: str
    unread_share: float = 0.0
    """Share of the run that is still to be read."""
    results: RunResults = _NO_RESULTS
    state: RunState | None = None
    """The state of the run before this was read."""

    def outdated(self, row: RunRow) -> bool:
        """Return whether there may be more of the run than was read: it lives, or has changed
        since, or is long.
        """
        return row.live or self.unread_share > 0 or self.state != row.state

    @property
    def steps(self) -> tuple[float, float]:
        steps = self.line.steps
        assert steps is not None
        return (steps[0], steps[self.line.length - 1]) if self.line.length else (0.0, 0.0)


Curves = Mapping[RunDirectory, LossCurve]


class CurveReader:
    """Reads the curves of runs repeatedly, for one thread at a time, and only what is new of
    each.
    """

    def __init__(self) -> None:
        self._followed: dict[RunDirectory, tuple[MetricsReader, FollowedSteps]] = {}

    def read(self, row: RunRow) -> LossCurve | None:
        """Return the present curve of a run; None before its first step.

        Raises:
            OSError: The run cannot be read.
        """
        if row.run not in self._followed:
            reader = MetricsReader(row.run)
            # Each time that rows are combined, those of a run that is watched halve once more.
            self._followed[row.run] = (
                reader,
                FollowedSteps(reader, most_rows=MOST_ROWS if row.live else ROWS),
            )
        reader, steps = self._followed[row.run]
        deadline, more = time.monotonic() + READ_S, True
        while more and time.monotonic() < deadline:
            more = reader.poll(limit_records=20_000, limit_s=0.5, earlier=False).more
        latest = reader.latest
        if latest is None:
            return None
        span = mean_steps_of(row.spec, row.state.total_steps, latest.step)
        more = (
            steps.read(Wanted(("loss",), ("loss",)), span, max(0.1, deadline - time.monotonic()))
            or more
        )
        line = steps.series.line(mean_of("loss"), "main", len(steps.series))
        if not row.live and not more:
            del self._followed[row.run]  # it does not change any more
        return LossCurve(
            line,
            span,
            _spark(line.series, line.length, SPARK_COLUMNS),
            steps.unread_share,
            results_of(reader, row.spec, row.state.total_steps),
            row.state,
        )


def _spark(series: Series, length: int, width: int) -> str:
    """Return the first ``length`` values of a series as one row of bars, blank where it has no
    value.
    """
    width = min(width, length)
    if not width:
        return ""
    edges = [index * length // width for index in range(width + 1)]
    spans = [series.extremes(start, stop) for start, stop in itertools.pairwise(edges)]
    return bars([math.nan if span is None else span[0] / 2 + span[1] / 2 for span in spans])


def bars(values: Sequence[float]) -> str:
    """Return values as bars between the least and the greatest of them."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite) / 2, max(finite) / 2  # halves, whose difference is finite
    top = len(_LEVELS) - 1
    width = high - low or 1.0
    return "".join(
        _LEVELS[round((value / 2 - low) / width * top)] if math.isfinite(value) else " "
        for value in values
    )
