"""Lines of figures on the dashboard: title and progress, the step's anatomy, the GPUs. Pure
functions from a snapshot to content.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.cells import cell_len

from so_tui.launch.supervisor.slowness import slowdown_remedy, slowdown_text
from so_tui.plan.saving import may_lose_much, saving_text
from so_tui.runs.records import FINAL_STATES, PhaseRecord, RunState, StepRecord
from so_tui.spec.run_spec import CheckpointSpec
from so_tui.trust.text import brief_message
from so_tui.ui.lines import Piece, Pieces, fill_pieces, legend, stacked, step_parts
from so_tui.ui.snapshot import Snapshot
from so_tui.ui.text import Content, faint, in_rows, shorten
from so_tui.units import age, bandwidth, duration, thousands

# From the confirmation to the first step: what a run does meanwhile, and how long each part takes.
# Pure.


CHECKS = "checks"
LAUNCHER = "launcher"
FIRST_STEP = "first step"
NAMES = {"checkpoint": "saved states"}
"""Names of stages that are not called by their code."""
BAR = 24
NAME_CELLS = 44
LEAST_NAME_CELLS = 12
FIGURE_CELLS = 13
"""What the sign and the seconds take."""
MOST_ROWS = 9


class Stage(NamedTuple):
    """One part of the way to the first step, until the next one begins."""

    name: str
    since: float
    detail: str = ""
    """Its present work, while it is the last stage."""


def _stages(
    phases: Sequence[PhaseRecord], attempt: int, started: float, checks_s: float | None
) -> list[Stage]:
    """Return the stages of an attempt that has done no step yet.

    Args:
        phases: What the trainer announced, in order. Records of one stage that follow each other
            are one row.
        attempt: The attempt.
        started: When its processes were started.
        checks_s: Duration of the checks before ``started``; None if there were none.
    """
    found = [] if checks_s is None else [Stage(CHECKS, started - checks_s)]
    found.append(Stage(LAUNCHER, started))
    code = ""
    for phase in phases:
        if phase.attempt == attempt:
            since = found.pop().since if phase.stage and phase.stage == code else phase.time
            code = phase.stage
            found.append(Stage(_name(phase), since, phase.detail if code else ""))
    return found


def _name(phase: PhaseRecord) -> str:
    """Return ``weights 3 of 8``; what records of older versions say of themselves stands for their
    stage.
    """
    if phase.phase == "training":
        return FIRST_STEP
    counted = f" {thousands(phase.done)} of {thousands(phase.total)}" if phase.total else ""
    return (
        f"{NAMES.get(phase.stage, phase.stage)}{counted}"
        if phase.stage
        else phase.detail or phase.phase
    )


def timeline_lines(stages: Sequence[Stage], now: float, width: int) -> Content:
    """Return one row a stage: its sign, name, seconds, and a bar that begins where the stage before
    it ended. The newest rows stay; the last stage is still running.
    """
    ends = [*(stage.since for stage in stages[1:]), now]
    # Clocks of hosts differ: none takes less than no time.
    took_s = [max(0.0, end - stage.since) for stage, end in zip(stages, ends, strict=True)]
    total = sum(took_s) or 1.0
    room = min(BAR, max(4, width - LEAST_NAME_CELLS - FIGURE_CELLS))
    name_cells = min(NAME_CELLS, max(4, width - room - FIGURE_CELLS))
    rows = []
    before = 0.0
    for stage, seconds in zip(stages, took_s, strict=True):
        running = stage is stages[-1]
        first = min(int(before / total * room), room - 1)
        cells = max(1, round(seconds / total * room))
        bar = " " * first + "━" * min(cells, room - first)
        sign, style = ("▸ ", "$run") if running else ("✓ ", "$success")
        name = shorten(brief_message(stage.name), name_cells)
        left = name_cells - cell_len(name) - 2
        detail = ""
        if running and stage.detail and left >= LEAST_NAME_CELLS:
            detail = f"  {shorten(brief_message(stage.detail), left)}"
        gap = " " * (name_cells - cell_len(name + detail))
        figure = f"{gap}{duration(seconds):>9}  "
        rows.append(Content.assemble((sign, style), name, (detail, "$faint"), figure, (bar, style)))
        before += seconds
    return in_rows(rows[-MOST_ROWS:])


PARTS = ("data_s", "forward_s", "backward_s", "exposed_optimizer_s", "other_s")
SIGNS = {
    "created": ("○", "$faint"),
    "queued": ("○", "$faint"),
    "starting": ("●", "$run"),
    "loading": ("●", "$run"),
    "training": ("●", "$success"),
    "saving": ("●", "$run"),
    "ending": ("●", "$run"),
    "checking": ("○", "$warning"),
    "finished": ("✓", "$success"),
    "stopped": ("■", "$warning"),
    "failed": ("✗", "$error"),
    "lost": ("✗", "$error"),
}
LEAST_BAR = 8
"""Cells of the bar of a run's progress; words give way to it, except what is saved."""
LEAST_STEP_BAR = 12
"""Cells of the bar of a step's parts; names give way to it."""
STALE_S = 8.0
"""Seconds without news after which a live run is marked as stale: several beats of a supervisor
that beats once a second.
"""
AFTER_THE_END = "E exports the model, and C talks to it"


def state_piece(name: str) -> tuple[str, str]:
    """Return ``● training`` with its style. Besides the states of runs there is ``checking``, for
    one that may have been lost.
    """
    sign, style = SIGNS.get(name, ("?", "$faint"))
    return f"{sign} {name}", f"bold {style}"


def title_line(snapshot: Snapshot, now: float, width: int) -> Content:
    """Return run, state, step, progress bar, time left, last checkpoint: as much of it as fits."""
    state = snapshot.state
    line: Pieces = [(shorten(snapshot.run.name, 34), "bold")]
    if state is None:
        return Content.assemble(*line, "  ", ("its state cannot be read yet", "$warning"))
    shown = "checking" if snapshot.checking else state.shown
    line += ["  ", ("✗ deleted", "bold $error") if snapshot.deleted else state_piece(shown)]
    silent_s = snapshot.heartbeat_age_s
    if snapshot.live and not snapshot.checking and (silent_s > STALE_S or snapshot.read_error):
        line += ["  ", (f"stale: no news for {age(silent_s)}", "bold $warning")]
    total = state.total_steps or (snapshot.events.start.total_steps if snapshot.events.start else 0)
    step = snapshot.latest.step if snapshot.latest else state.step
    if total:
        line.append(f"  step {thousands(step)} / {thousands(total)}")
    free = width - _cells(line) - 12
    tails = [
        [piece for pieces in tail for piece in ("  ", *pieces)][1:]
        for tail in _tails(snapshot, state, step, total, now)
    ]
    saving, plain = tails[:-2], tails[-2:]
    rest = next((tail for tail in tails if free - _cells(tail) >= LEAST_BAR), plain[-1])
    if rest in plain and saving and free + 10 >= _cells(saving[-1]):
        rest = saving[-1]  # what a stop would lose matters more than the bar
    room = free - _cells(rest)
    if total and room >= LEAST_BAR:
        bar = fill_pieces(step / total, min(40, room), "$run")
        line += ["  ", *bar, f" {100 * step / total:3.0f} %"]
    return Content.assemble(*line, "  ", *rest)


def _tails(
    snapshot: Snapshot, state: RunState, step: int, total: int, now: float
) -> Iterator[list[Pieces]]:
    """Yield the time left (or that it stops, or its duration) with what was saved and when it is
    next, in fewer and fewer words.
    """
    times = [record.step_s for record in snapshot.recent]
    step_s = statistics.median(times) if times else None
    begin: list[Pieces] = []
    if snapshot.live and snapshot.stop_asked:
        begin.append([("asked to stop", "$warning")])
    elif snapshot.training and total > step and step_s:
        begin.append([("left ", "$faint"), duration((total - step) * step_s)])
    elif not snapshot.live and not snapshot.deleted and state.took_s is not None:
        begin.append([("took ", "$faint"), duration(state.took_s)])
    if not snapshot.deleted:
        for saving in _saving(snapshot, state, step, total, step_s, now):
            yield [*begin, saving]
    yield begin
    yield []


def _saving(
    snapshot: Snapshot, state: RunState, step: int, total: int, step_s: float | None, now: float
) -> Iterator[Pieces]:
    """Yield which step was saved last, when the next one is due, and how often, in fewer and fewer
    words.
    """
    saved: Pieces = []
    if snapshot.events.checkpoints:
        last = snapshot.events.checkpoints[-1]
        saved = [("saved ", "$faint"), f"{thousands(last.step)}, {age(now - last.time)} ago"]
    plan = snapshot.plan
    if plan is None or not snapshot.live or snapshot.stop_asked:
        if saved:
            yield saved
        return
    words = saving_text(plan)
    if not plan.spec.checkpoint.repeats and not saved:
        style = "$warning" if may_lose_much(plan) else "$faint"
        yield [(words, style)]
        if may_lose_much(plan):
            yield [("nothing saved", style)]
        return
    due_s = _next_save_s(snapshot, plan.spec.checkpoint, state.attempt, step, step_s, now)
    left_s = (total - step) * step_s if step_s and total else None
    if due_s is None and plan.spec.checkpoint.repeats:  # before the first step of an attempt
        yield [*saved, ("; " if saved else "", "$faint"), (words, "$faint")]
        yield saved or [(words.partition(" (")[0], "$faint")]
        return
    if due_s is None or not math.isfinite(due_s) or (left_s is not None and due_s > left_s):
        soon = "at the end" if plan.spec.checkpoint.saves_at_end else ""
    else:
        soon = f"in {age(due_s)}" if due_s > 0 else "now"
    if saved and soon:
        yield [*saved, (", next ", "$faint"), soon, (f"; {words}", "$faint")]
        yield [*saved, (", next ", "$faint"), soon]
    elif soon:
        yield [(f"{words}, first ", "$faint"), soon]
        yield [("saves ", "$faint"), soon]
    if saved:
        yield saved


def _next_save_s(
    snapshot: Snapshot,
    checkpoint: CheckpointSpec,
    attempt: int,
    step: int,
    step_s: float | None,
    now: float,
) -> float | None:
    """Return in how many seconds the next checkpoint is due; None where that is at the end, or not
    known yet.
    """
    due: list[float] = []
    if checkpoint.every_steps and step_s:
        due.append((checkpoint.every_steps - step % checkpoint.every_steps) * step_s)
    began = None
    for phase in reversed(snapshot.events.phases if checkpoint.every_minutes else ()):
        if phase.attempt != attempt or phase.phase == "loading":
            break
        began = phase.time
        if phase.phase == "saving":  # restarts the interval
            break
    if began is not None:
        if (saved := snapshot.events.checkpoints) and saved[-1].attempt == attempt:
            began = max(began, saved[-1].time - saved[-1].seconds)
        due.append(began + 60 * checkpoint.every_minutes - now)
    return min(due, default=None)


def news(snapshot: Snapshot) -> Sequence[Piece]:
    """Return the news: why the run ended and what to do, its phase before the first step, or a
    warning; empty if there is none.
    """
    events, state = snapshot.events, snapshot.state
    if snapshot.deleted:
        ended = state is not None and state.state in FINAL_STATES
        rest = "" if ended else "processes of it that still run are being stopped; "
        figures = f"{rest}the figures below were read before ({snapshot.run.path})"
        return ("its folder has been deleted: ", "$error"), figures
    if state is not None and not snapshot.live:
        return _ending(snapshot, state)
    if snapshot.read_error:
        shown = f"{brief_message(snapshot.read_error)}; older data is shown"
        return ("cannot read the run right now: ", "$warning"), shown
    state = state or RunState(name=snapshot.run.name, state="created")
    if snapshot.checking:
        was = f"it was {state.state} on {brief_message(state.host)}; known within a minute"
        return ("checking: ", "$warning"), was
    if state.disk_full:
        return _unrecorded(snapshot, state)
    detail = brief_message(state.detail)
    if detail and state.state in ("queued", "starting", "saving"):
        return (f"{state.shown}: ", "$run"), detail
    if snapshot.latest is None and (phase := events.phase) is not None:
        text = brief_message(phase.detail)
        return ((f"{phase.phase}: ", "$run"), text) if text else ()
    if state.state == "training" and state.slowdown is not None:
        remedy = slowdown_remedy(state.slowdown)
        return ("~ ", "$warning"), slowdown_text(state.slowdown), (f"   {remedy}", "$faint")
    if (last := events.warning) is not None:
        more = f"   {brief_message(last.suggestion)}" if last.suggestion else ""
        return ("~ ", "$warning"), brief_message(last.message), (more, "$faint")
    if detail and not snapshot.stop_asked:  # the title says that
        return (f"{state.state}: ", "$run"), detail
    return ()


def _unrecorded(snapshot: Snapshot, state: RunState) -> Sequence[Piece]:
    """Return that the disk is full, and from which step on the charts lack what the log has."""
    remedy = "   Free space there: the next checkpoint needs it"
    return ("the run's disk is full: ", "$error"), _lost_text(snapshot, state), (remedy, "$faint")


def _lost_text(snapshot: Snapshot, state: RunState) -> str:
    last = snapshot.latest.step if snapshot.latest else state.step
    return f"steps after {thousands(last)} are in the log at most, not in the charts"


def _ending(snapshot: Snapshot, state: RunState) -> Sequence[Piece]:
    """Return why the run ended and what to do next."""
    end = snapshot.events.end
    reason = brief_message(state.reason or (end.reason if end else ""))
    suggestion = brief_message(state.suggestion or (end.suggestion if end else ""))
    if reason or suggestion:
        style = "$error" if state.state in ("failed", "lost") else "$warning"
        following = "   next: " if suggestion else ""
        lost = f"; {_lost_text(snapshot, state)}" if state.disk_full else ""
        return (reason or state.state, style), lost, (following, "$faint"), suggestion
    if state.state == "finished" and snapshot.events.checkpoints:
        return ("next: ", "$faint"), AFTER_THE_END
    return ()


def anatomy_lines(snapshot: Snapshot, now: float, width: int, *, plain: bool = False) -> Content:
    """Return the parts of a step's time, at the cursor or means over the newest steps, with as many
    names as fit.

    Before the first step, return the way to it, a line for each part. ``plain`` where the terminal
    shows ASCII only.
    """
    state = snapshot.state
    since = None if state is None else state.attempt_started or state.started
    if state is not None and since and snapshot.starting:
        return timeline_lines(
            _stages(snapshot.events.phases, state.attempt, since, state.checks_s), now, width
        )
    records, inspected = snapshot.examined, snapshot.hosts.inspected
    if not records:
        return faint("step anatomy: after the first step")
    # Means, which sum to the mean of the steps' time, unlike medians.
    sums = (sum(getattr(record, name) for record in records) for name in PARTS)
    parts = step_parts([max(0.0, total / len(records)) for total in sums], plain=plain)
    step_s = sum(record.step_s for record in records) / len(records)
    number = f"{thousands(records[0].step)}  " if inspected and inspected.step else ""
    head = Content.assemble((f"step {number}", "bold"), f"{duration(step_s)}  ")
    room = width - head.cell_length - LEAST_STEP_BAR - 2
    short = (replace(part, name=part.name.removeprefix("optimizer ")) for part in parts)
    shown = [part for part in short if part.amount > 0]
    # What offloading costs is what people look for: where room is short, small other parts go
    # first.
    while (named := Content("  ").join(legend(shown))).cell_length > room and shown:
        others = [part for part in shown if part.name != "exposed"] or shown
        shown.remove(min(others, key=lambda part: part.amount))
    room -= named.cell_length
    texts = _worker_texts(records[-1])
    worker = next((text for text in texts if text.cell_length <= room), Content(""))
    bar = stacked(parts, min(60, LEAST_STEP_BAR + max(0, room - worker.cell_length)))
    return head + bar + "  " + named + worker


def _worker_texts(record: StepRecord) -> list[Content]:
    """Return what the Adam worker did, the longest text first: its time and rate; steps it took too
    early and redid, or skipped. The last is empty if there is nothing to report.
    """
    counts = (("redone", record.redone_steps), ("skipped", record.skipped_steps))
    pieces = [f"{name} {thousands(count)}" for name, count in counts if count]
    texts = [pieces] if pieces else []
    if record.adam_busy_s and record.adam_bytes_per_s:
        adam = f"Adam {duration(record.adam_busy_s)} at {bandwidth(record.adam_bytes_per_s)}"
        texts.insert(0, [adam, *pieces])
    return [faint(f"  {', '.join(text)}") for text in texts] or [Content("")]


def _cells(pieces: Iterable[Piece]) -> int:
    return sum(cell_len(piece if isinstance(piece, str) else piece[0]) for piece in pieces)
