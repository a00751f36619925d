"""The supervisor of a run: one light process on its host, or on the first of its nodes, that starts
the training processes, watches them, and ends what they leave.

The trainer's log and metrics do not pass through it, so training continues if it is killed, and
another supervisor takes over from the record in ``state.json``. It is the only writer of the state
and of this host's samples.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from so_tui.launch.command import log_line
from so_tui.launch.launch import read_launch
from so_tui.launch.supervisor import ending
from so_tui.launch.supervisor.alerts import Announcer, remembered
from so_tui.launch.supervisor.ending import (
    Outcome,
    StopRequest,
    conclude,
    not_started,
    request_stop,
    stop_request,
)
from so_tui.launch.supervisor.host import ALONE, Host, Nodes
from so_tui.launch.supervisor.node import OtherNodes, attributed
from so_tui.launch.supervisor.processes import become_subreaper, markers, own_environs
from so_tui.launch.supervisor.slowness import SlowWatch
from so_tui.plan.plan import Launch
from so_tui.runs.directory import RunDirectory, deleted, exchanged, known_id, own_run
from so_tui.runs.liveness import STALE_S, host_of, sees_processes_of
from so_tui.runs.lock import RunLock, ended_state, run_lock
from so_tui.runs.metrics import MetricsReader
from so_tui.runs.records import (
    FINAL_STATES,
    Alerts,
    EndRecord,
    MetricRecord,
    OutcomeCode,
    RunState,
    Sample,
)
from so_tui.runs.state import (
    FULL,
    failures,
    overwrite_state,
    read_state,
    write_state,
    write_state_even_if_full,
)
from so_tui.spec import InputError, SoTuiError
from so_tui.spec.errors import reject
from so_tui.trust.files import Distrust, distrust_of_file
from so_tui.trust.folders import umask_of

# Whether a supervisor may act for an attempt: start it once, or attach to its living processes.
#
# Problem codes: no-such-attempt, unreadable-attempt: The attempt was never made, or its files are
# damaged. attempt-already-started: The attempt has a state, or a later one was started first. not-
# this-host: The attempt runs on another host. no-living-process: Every process of the attempt has
# ended, so there is nothing to supervise.


def refuse_unknown_attempt(run: RunDirectory, attempt: int) -> None:
    """Refuse an attempt that was never made. Raises InputError."""
    if attempt < 1 or distrust_of_file(run.launch_path(attempt)) is Distrust.MISSING:
        raise reject(
            "no-such-attempt",
            "--attempt",
            str(attempt),
            f"{run.path} has no such attempt",
            "`so-tui resume` makes the next one.",
        )


def refuse_start(run: RunDirectory, attempt: int, state: RunState) -> None:
    """Refuse to start an attempt a second time.

    Raises:
        InputError: With the codes of this module.
    """
    if state.attempt >= attempt:
        raise reject(
            "attempt-already-started",
            "--attempt",
            str(attempt),
            f"attempt {state.attempt} of the run was started already",
            _BY_COMMAND,
        )


def _refuse_attaching(run: RunDirectory, attempt: int, state: RunState) -> None:
    """Refuse to attach to an attempt that has no living process of this user here.

    Raises:
        InputError: With the codes of this module.
    """
    if not sees_processes_of(host_of(state)):
        raise reject(
            "not-this-host",
            "--attempt",
            str(attempt),
            f"the attempt runs on {state.host or 'no host'}",
            "Supervise it there.",
        )
    if not any(markers(run, attempt) <= environ for environ in own_environs()):
        raise reject(
            "no-living-process",
            "--attempt",
            str(attempt),
            "every process of the attempt has ended",
            _BY_COMMAND,
        )


_BY_COMMAND = "`so-tui run` and `so-tui resume` start attempts, each with a supervisor of its own."


_DELETED_S = 10.0
"""How long the run directory may be missing before it counts as deleted. A network file system may
lose it for a moment.
"""


class Supervisor:
    """Watches one attempt, on the first node of a run, and concludes what became of it."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        found: RunState,
        launch: Launch,
        digest: str,
        lock: RunLock,
        nodes: Nodes,
    ) -> None:
        """Prepare to start an attempt whose launch has this hash, or to attach to one."""
        self._run = run
        self._known = known_id(run)
        self._attempt = attempt
        nodes = replace(nodes, count=launch.spec.nodes)
        self._host = Host(run, attempt, launch, digest, nodes, lock)
        self._superseded = False
        # A state of this attempt: its supervisor has died, and the processes it started may still
        # be alive.
        self._takes_over = found.attempt == attempt
        self._state = (
            replace(found, heartbeat=found.heartbeat + 1, **ending.supervised_here())
            if self._takes_over
            else ending.first_state(run.name, attempt, found, launch)
        )
        self._others = OtherNodes(run, attempt, launch.spec.nodes)
        self._reader = MetricsReader(run)
        self._stop: StopRequest | None = None
        self._directory_seen_at = time.monotonic()
        self._records: list[MetricRecord] = []
        self._slow = SlowWatch(launch.plan, launch.machine, attempt)
        # Before its first step, an attempt's state has the step of the one before.
        told_step = (
            found.step if self._takes_over and found.state not in ("starting", "loading") else 0
        )
        self.announcer = Announcer(
            run, attempt, self._host.name, launch.spec.checkpoint.folder, told_step
        )

    def watch(self) -> int:
        """Run the attempt from its start to its end. Return the run's exit code. The commands that
        tell the user of the end are still under way; the run may be continued meanwhile.
        """
        host = self._host
        host.install_signals()
        heartbeat_at = self._run.state_path.stat().st_mtime
        # On a full disk nothing is started, but what lives is watched.
        (write_state_even_if_full if self._takes_over else write_state)(self._run, self._state)
        if self._takes_over:
            host.take_over()
        else:
            try:
                host.start()
            except (SoTuiError, OSError) as error:
                return self._finish(not_started(error))
        host.tree.scan(thorough=self._takes_over)
        gone_unseen = self._takes_over and not host.tree.alive
        host.follow(self._tick, self._take)
        if host.handed_over:
            return 0  # the other supervisor watches the same processes
        host.sweep()
        with host.despite_errors_of("records"):
            self._read()
        overdue = host.shutdown.stop_overdue(time.monotonic())
        evidence = replace(
            host.evidence(),
            end=self._end,
            failures=failures(self._run, self._attempt),
            stop_overdue_s=self._stop.grace_s if self._stop is not None and overdue else None,
            gone_unseen=gone_unseen,
            exchanged=exchanged(self._run, self._known),
        )
        others = None if self._superseded else self._others.wait()
        own = conclude(evidence)
        return self._finish(
            attributed(own, others, unprompted=evidence.unprompted),
            heartbeat_at if gone_unseen else None,
        )

    def _tick(self) -> bool:
        host = self._host
        self._check_directory()
        host.reap(self.announcer.command.pid)
        with host.despite_errors_of("records"):
            self._read()
        self._check_superseded()
        if self._superseded:
            return False
        with host.despite_errors_of("control"):
            self._check_stop_request()
        # Processes would wait for those of another node that have failed.
        self._others.poll()
        if self._others.cause(STALE_S) is not None:
            host.shutdown.broken = True
        self._end_launchers()
        host.act()
        self._report()
        return True

    def _read(self) -> None:
        # Earlier segments are read on at each tick: a resumed run may have gigabytes of them, and
        # the heartbeat must not wait.
        behind = True
        while behind:
            progress = self._reader.poll(limit_records=10_000, limit_s=0.2)
            self._records += progress.records
            behind = progress.behind
        if self._host.shutdown.ended_at is None and self._end is not None:
            self._host.shutdown.ended_at = time.monotonic()

    @property
    def _end(self) -> EndRecord | None:
        """The trainer's end record of this attempt."""
        return self._reader.events.end_of(self._attempt)

    def _report(self) -> None:
        state = ending.observed(self._state, self._reader)
        if self._stop is not None:
            state = replace(state, detail=state.detail or "asked to stop")
        records, self._records = self._records, []
        self._slow.take(records)
        self._state = replace(
            state,
            heartbeat=state.heartbeat + 1,
            processes=self._host.tree.alive,
            slowdown=self._slow.found,
            disk_full=self._host.disk_full,
        )
        with self._host.despite_errors_of("alerts"):
            new = self.announcer.tick(self._state, records, full=self._host.disk_full)
            self._remember(new)
        self._write_state()

    def _take(self, sample: Sample) -> None:
        self._slow.sample(sample)
        self.announcer.publish(self._state, self._reader.latest, sample)

    def _remember(self, alerts: Alerts) -> None:
        self._state = replace(self._state, alerts=remembered(self._state.alerts, alerts))

    def _check_stop_request(self) -> None:
        if received := self._host.signal:
            warned = received is signal.SIGUSR1
            request_stop(
                self._run,
                reason=f"the supervisor received {received.name}",
                warned=warned,
                signalled=not warned,
            )
            self._host.signal = None
        asked = stop_request(self._run)
        if asked is not None:
            self._stop = asked
            checkpoints = self._reader.events.checkpoints
            saved = checkpoints[-1].step if checkpoints else None
            self._host.shutdown.stop(asked, saved, time.monotonic())

    def _check_directory(self) -> None:
        """End a run whose directory was deleted: it can be neither seen nor stopped, and would save
        into a folder that is no run. End it at once if another folder has its name: the ranks would
        read what is there.
        """
        now, shutdown = time.monotonic(), self._host.shutdown
        if exchanged(self._run, self._known):
            self._host.signal_all(signal.SIGKILL)
            shutdown.broken = True
        elif not deleted(self._run):
            self._directory_seen_at = now
        elif not shutdown.broken and now - self._directory_seen_at > _DELETED_S:
            log_line(f"{self._run.path} has been deleted: ending its processes")
            shutdown.broken = True

    def _check_superseded(self) -> None:
        """Stop acting for a run that another supervisor has taken over, and end what a newer
        attempt repeats.

        It can happen to a supervisor that was suspended, or cut off from the file system, for so
        long that the run counted as lost.
        """
        try:
            found = read_state(self._run)
        except (InputError, OSError):
            return  # deleted, or its file system is away: neither says who supervises it
        same = found.attempt == self._attempt
        if found.attempt < self._attempt or (same and found.supervisor == self._state.supervisor):
            return
        if not self._superseded:
            log_line(
                f"{self._run.path} is supervised by another process now: attempt {found.attempt} "
                f"on {found.host}"
            )
            self._superseded = True
            self._host.handed_over = same
        if not self._host.handed_over:
            self._host.signal_all(signal.SIGKILL)

    def _end_launchers(self) -> None:
        """End DeepSpeed's runner and launcher, which wait for ranks, once none is left and the
        trainer has said how it ended.

        By themselves they take seconds: the launcher looks once a second, and each takes its
        interpreter with torch apart.
        """
        tree, end = self._host.tree, self._end
        roles = {process.role for process in tree.alive}
        ended = any(process.role == "rank" for process in tree.gone)
        if end is not None and end.state != "failed" and ended and roles <= {"runner", "launcher"}:
            self._host.signal_all(signal.SIGKILL)

    def _finish(self, outcome: Outcome, heartbeat_at: float | None = None) -> int:
        """Record the outcome. ``heartbeat_at`` is the last sign of life of a supervisor that died,
        if the processes are gone that it watched.
        """
        state = ending.observed(self._state, self._reader)
        ended = (
            time.time()
            if heartbeat_at is None
            else _last_alive(self._reader, self._attempt, heartbeat_at)
        )
        state = replace(state, heartbeat=state.heartbeat + 1)
        self._state = ending.final_state(
            state, outcome, ended, _planned_advice(outcome, self._host.launch)
        )
        moved = outcome.code == OutcomeCode.FOLDER_EXCHANGED
        if (moved or not deleted(self._run)) and not self._superseded:
            new: Alerts = ()
            with self._host.despite_errors_of("alerts"):
                new = self.announcer.end(self._state)
                self._remember(new)
            with self._host.despite_errors_of("state"):
                write_state_even_if_full(self._run, self._state)
            # Last, because the command may look at the state.
            with self._host.despite_errors_of("alerts"):
                self.announcer.tell(new, self._state)
        self._host.release()
        return outcome.run_exit_code

    def _write_state(self) -> None:
        """Write the state, except into a deleted run directory: that would look like a run, or
        prevent the deletion.
        """
        if not deleted(self._run):
            with self._host.despite_errors_of("state"):
                try:
                    write_state(self._run, self._state)
                except OSError as error:
                    if error.errno in FULL and not self._state.disk_full:
                        self._state = replace(self._state, disk_full=True)
                        overwrite_state(self._run, self._state)
                    # on a full disk: other hosts judge by its age whether we live
                    os.utime(self._run.state_path)
                    raise


def _planned_advice(outcome: Outcome, launch: Launch) -> str:
    """Return the plan's advice for a run that was out of memory; empty for others. The final state
    does not depend on it: without it, the advice is general.
    """
    if (short := _SHORT_OF.get(outcome.code)) is None:
        return ""
    try:
        from so_tui.plan import remedies  # heavy, and may be gone since the run began

        return remedies.memory_advice(launch.spec, short, launch.plan).message
    except Exception as error:  # noqa: BLE001 - the final state must be written in any case
        log_line(f"no advice from the plan: {type(error).__name__}: {error}")
    return ""


_SHORT_OF: dict[str, Literal["gpu", "node"]] = {
    OutcomeCode.OUT_OF_GPU_MEMORY: "gpu",
    OutcomeCode.OUT_OF_HOST_MEMORY: "node",
    OutcomeCode.KILLED_FOR_MEMORY: "node",
}
"""Whose memory did not suffice."""


def _last_alive(reader: MetricsReader, attempt: int, heartbeat_at: float) -> float:
    """Return when an attempt with an unobserved end was last known to be alive, in seconds since
    the epoch.

    ``heartbeat_at`` is when the supervisor that died last wrote the state.
    """
    events = reader.events
    records = (events.end, reader.latest, events.phase, *events.checkpoints[-1:])
    times = (record.time for record in records if record and record.attempt == attempt)
    return max([heartbeat_at, *times])


# The main function of the supervisor's process: check that it may act for an attempt, take the
# lock, and supervise.


def supervise(
    run: RunDirectory,
    attempt: int,
    digest: str,
    nodes: Nodes = ALONE,
    ended: Callable[[], None] = lambda: None,
) -> int:
    """Start an attempt, or attach to one whose supervisor has died, and watch it to its end. Return
    the run's exit code.

    Return 0 immediately if the run has another supervisor. At the end the run is free to be
    continued before the user's commands that tell of it are waited for.

    Args:
        run: A run of this user.
        attempt: The number of the attempt.
        digest: The hash of its launch, as whoever prepared it told; not compared for attaching.
        nodes: The nodes of the run, of which this is the first.
        ended: Called once the run is free, before those commands are waited for.

    Raises:
        InputError, Refused: This may not be done here (see ``admission``).
        OSError: The run directory cannot be written.
    """
    with own_run(run) as run, contextlib.ExitStack() as last:
        refuse_unknown_attempt(run, attempt)
        os.umask(umask_of(run.at))
        starts = read_state(run).attempt < attempt
        launch = read_launch(run, attempt, digest if starts else None)
        with run_lock(run, assume_dead=starts and launch.assume_dead) as lock:
            if lock is None:
                return 0
            state = read_state(run)
            if state.attempt == attempt and state.state in FINAL_STATES:
                return state.exit_code or 0
            if state.attempt == attempt:
                _refuse_attaching(run, attempt, state)
            else:
                refuse_start(run, attempt, state)
                if state.host:
                    state = ended_state(run, assume_dead=launch.assume_dead)
            supervisor = Supervisor(run, attempt, state, launch, digest, lock, nodes)
            last.callback(supervisor.announcer.finish)  # also where the lock cannot be given back
            become_subreaper()
            code = supervisor.watch()
        ended()
    return code
