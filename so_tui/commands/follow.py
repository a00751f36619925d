"""Follow a run without a screen: one line for each event."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime

from so_tui.commands.common import print_note
from so_tui.runs import RunDirectory, RunReader, Update, deleted
from so_tui.runs import state as run_state
from so_tui.runs.liveness import EXIT_CODES
from so_tui.runs.records import (
    ENDING,
    FINAL_STATES,
    BindingRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    MetricRecord,
    PhaseRecord,
    ResumedRecord,
    RunState,
    StartRecord,
    StepRecord,
    WarningRecord,
)
from so_tui.spec import SoTuiError
from so_tui.trust.streams import outlive_output
from so_tui.trust.text import brief_line, brief_message, so_tui_command
from so_tui.units import count, disk_size, duration, plural, rate, significant, thousands

_LONGEST_LINE = 2000
POLL_S = 0.5
# The least time between printed steps: small models make several steps a second, too many for a
# terminal or a log file.
STEP_LINE_S = 2.0


def follow(run: RunDirectory, *, owner: bool) -> int:
    """Print progress until the run ends, and return its exit code. With ``--quiet``, print only how
    it ended.

    An interrupt asks the run to stop if this command started it (``owner``), and otherwise only
    stops watching. SIGUSR1, a scheduler's warning, and SIGTERM, with which containers and
    schedulers end a job, do the same: both may reach only this process. A lost terminal (SIGHUP)
    only stops watching. Output that cannot be written does not: a job would end, and the run with
    it.

    Raises:
        SoTuiError: The run directory was deleted.
        OSError: It cannot be read at all. Later it may be away for a while.
    """
    from so_tui.launch.executors import ensure_supervised
    from so_tui.launch.lifecycle import current_state

    received: list[signal.Signals] = []
    if owner:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, lambda number, _: received.append(signal.Signals(number)))
        outlive_output(run.name)
    reader = RunReader(run, state_of=current_state)
    printer = _Printer()
    print_note(f"run {run.name} in {run.path}")
    stopping, waiting = False, ""
    update: Update | None = None
    checked = time.monotonic()
    while True:
        try:
            if received and _asked_to_stop(run, received[-1], printer):
                received.clear()
            try:
                update = reader.poll()
            except OSError as error:
                if update is None:
                    raise
                printer.note_once(
                    brief_message(f"{run.name} cannot be read at the moment: {error}")
                )
                time.sleep(POLL_S)
                continue
            for record in update.records:
                printer.show(record)
            if (state := update.state) is not None:
                if state.state == "queued" and state.detail != waiting:
                    waiting = state.detail
                    print_note(brief_message(f"queued: {waiting}"))
                printer.compare(state)
                if state.state in FINAL_STATES and not update.records:
                    return printer.finish(run, state)
            # The supervisor may have been killed; every reader replaces it.
            if time.monotonic() - checked > 5:
                checked = time.monotonic()
                if deleted(run):
                    raise SoTuiError(
                        f"the folder of {run.name} has been deleted; its supervisor ends the "
                        "processes that are left"
                    )
                ensure_supervised(run)
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            if not owner:
                return 130
            if stopping:
                print_note("")
                print_note(f"no longer watching; {run.name} stops by itself after its step")
                return 4
            stopping = True
            run_state.request(run, "stop")
            print_note("")
            print_note(
                "stopping after this step, with a checkpoint (interrupt again to stop watching)"
            )


def _asked_to_stop(run: RunDirectory, received: signal.Signals, printer: _Printer) -> bool:
    """Ask a run to stop because of a signal, and return whether that could be written: its disk may
    be full for a while.
    """
    try:
        run_state.request(run, "stop", reason=f"so-tui received {received.name}")
    except (OSError, SoTuiError) as error:
        printer.note_once(
            brief_message(f"{run.name} cannot be asked to stop at the moment: {error}")
        )
        return False
    return True


class _Printer:
    """Prints records as lines, but not every step."""

    _total_steps = 0
    _last_step_line = 0.0
    _step_times: tuple[float, ...] = ()
    _pending: StepRecord | None = None
    _slow_because: tuple[str, ...] | None = None
    _disk_full = False
    _noted = ""

    def note_once(self, text: str) -> None:
        """Print what may be said again and again."""
        if text != self._noted:
            self._noted = text
            print_note(text)

    def show(self, record: MetricRecord) -> None:
        if isinstance(record, StepRecord):
            self._step(record)
            return
        self._flush()  # a step that was not printed yet came before it
        if isinstance(record, StartRecord):
            self._total_steps = record.total_steps
        if isinstance(record, EndRecord):  # the results, which --quiet leaves
            for name, value in record.summary.items():
                print(_line(record.time, f"{name}: {value:.6g}"), flush=True)
        for text in _texts(record):
            print_note(_line(record.time, text))

    def compare(self, state: RunState) -> None:
        """Print that the run's disk is full, and that the run is slower than its plan, once for
        each most likely cause; and that it is so no longer.
        """
        if state.disk_full != self._disk_full:
            self._disk_full = state.disk_full
            self._flush()
            full = "warning: the run's disk is full: later steps are not recorded. Free space there"
            text = full if state.disk_full else "the run's disk has space again"
            print_note(_line(time.time(), text))
        from so_tui.launch.supervisor.slowness import slowdown_remedy, slowdown_text

        found = state.slowdown
        because = None if found is None else tuple(cause.code for cause in found.causes[:1])
        if because == self._slow_because or state.state != "training":
            return
        self._slow_because = because
        self._flush()
        text = (
            "no longer slower than planned"
            if found is None
            else f"{slowdown_text(found)}. {slowdown_remedy(found)}"
        )
        print_note(_line(time.time(), f"warning: {text}" if found else text))

    def _step(self, record: StepRecord) -> None:
        self._step_times = (*self._step_times[-19:], record.step_s)
        self._pending = record
        if record.time - self._last_step_line >= STEP_LINE_S or record.step in (
            1,
            self._total_steps,
        ):
            self._flush()

    def _flush(self) -> None:
        record = self._pending
        if record is None:
            return
        self._pending = None
        self._last_step_line = record.time
        mean_s = sum(self._step_times) / len(self._step_times)
        left = (
            f"  left {duration((self._total_steps - record.step) * mean_s)}"
            if self._total_steps > record.step
            else ""
        )
        example = (
            f" ({significant(record.seed_tflops_total)} by DeepSpeed's example)"
            if record.seed_tflops_total
            else ""
        )
        step = f"step {thousands(record.step)}/{thousands(self._total_steps)}"
        print_note(
            _line(
                record.time,
                f"{step}  loss {record.loss:.4f}  lr {record.learning_rate:.2e}  "
                f"{significant(record.step_s)} s"
                f"  {rate(record.useful_tokens_per_s_total)} tokens/s  "
                f"{significant(record.model_tflops_per_gpu)} TFLOPS{example}{left}",
            )
        )

    def finish(self, run: RunDirectory, state: RunState) -> int:
        self._flush()
        words = f"{state.state} at step {thousands(state.step)}"
        if state.saved_step is not None:
            words += f", saved step {thousands(state.saved_step)}"
        print(brief_message(words + (f": {state.reason}" if state.reason else "")), flush=True)
        if state.suggestion:
            print(brief_message(f"next: {state.suggestion}"), flush=True)
        if state.state in ("failed", "lost"):
            print(
                f"`{so_tui_command('logs', run.name)}` shows what its processes wrote",
                file=sys.stderr,
            )
        return EXIT_CODES[state.state]


def _line(when: float, text: str) -> str:
    return f"{datetime.fromtimestamp(when):%H:%M:%S} {brief_line(text, _LONGEST_LINE)}"


def _texts(record: MetricRecord) -> Iterator[str]:
    """Yield a line for each event of a record; a step has its own."""
    match record:
        case StartRecord():
            size = f"{count(record.parameters)} parameters on {plural(record.ranks, 'rank')}"
            steps = f"{plural(record.total_steps, 'step')}{_step_size(record)}"
            yield f"{record.model}: {size}, {record.mode}, {steps}"
        case PhaseRecord():
            phase = ENDING if record.stage == ENDING else record.phase
            yield f"{phase}: {record.detail}" if record.detail else phase
        case BindingRecord():
            for rank in record.ranks:
                where = f"GPU {rank.gpu}" if rank.gpu is not None else "CPU"
                state = rank.problem or ("bound by the rank" if rank.corrected else "bound")
                bound = f"{_cores(rank.cpus)}, memory {rank.memory_policy}"
                yield f"rank {rank.rank} on {where}: {bound} ({state})"
        case CheckpointRecord():
            yield f"checkpoint of step {thousands(record.step)}: {_written(record)}, {record.path}"
        case EvaluationRecord():
            perplexity = (
                "" if record.perplexity is None else f", perplexity {record.perplexity:.4g}"
            )
            yield (
                f"evaluation at step {thousands(record.step)}: loss {record.loss:.4f}{perplexity} "
                f"on {thousands(record.tokens)} tokens, {duration(record.seconds)}"
            )
        case WarningRecord():
            suggestion = f". {record.suggestion}" if record.suggestion else ""
            yield f"warning: {record.message}{suggestion}"
        case ResumedRecord():
            yield f"resumed from step {thousands(record.step)}"


def _written(record: CheckpointRecord) -> str:
    text = f"{disk_size(record.bytes)} in {duration(record.seconds)}"
    if record.paused_s is not None and record.paused_s < record.seconds:
        text += f" while training went on, after a pause of {duration(record.paused_s)}"
    return (
        text if record.due_step is None else f"{text}, due since step {thousands(record.due_step)}"
    )


def _step_size(record: StartRecord) -> str:
    if not record.tokens_per_step:
        return ""
    accumulated = (
        f" in {thousands(record.gradient_accumulation_steps)} micro-batches"
        if record.gradient_accumulation_steps > 1
        else ""
    )
    return f" of {thousands(record.tokens_per_step)} tokens{accumulated}"


def _cores(cpus: tuple[int, ...]) -> str:
    from so_tui.machine.host import cpu_ranges

    return f"{plural(len(cpus), 'core')} ({cpu_ranges(cpus)})"
