"""The supervisor of another node than the first: it starts, watches, samples and ends the processes
of its host.

What becomes of the run is the first node's to say. When that one has said it, or gives no sign of
life, the processes here are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from so_tui.launch.supervisor.ending import Outcome, conclude, not_started, request_stop
from so_tui.launch.supervisor.host import Host, Nodes
from so_tui.plan.plan import Launch
from so_tui.runs.directory import RunDirectory, write_run_json
from so_tui.runs.liveness import STALE_S, identify
from so_tui.runs.records import FINAL_STATES, OutcomeCode, Process
from so_tui.runs.state import read_state
from so_tui.spec import InputError, SoTuiError
from so_tui.trust.decoding import readable_json

# What the supervisors of a run's nodes tell each other, in files of which each has one writer.
#
# The first node's writes ``state.json``, as for every run; each other one writes ``node<N>.json``.


FIRST_SIGN_S = 300.0
"""How long a node may take to give its first sign: its interpreter may come from a slow file
system.
"""
_END_S = 20.0
"""How long the first node waits for the others to end. Those that gave no sign meanwhile are
lost.
"""
_POLL_S = 0.2
_SILENT = -1
"""The heartbeat of a node that gave no sign yet."""


class NodeState(Struct, frozen=True, kw_only=True):
    """``node<N>.json``: the state of another node than the first, replaced once a second."""

    v: int = 1
    host: str
    heartbeat: int = 0
    """Grows while its supervisor lives."""
    supervisor: Process | None = None
    processes: tuple[Process, ...] = ()
    ended: bool = False
    """All of its processes have ended."""
    outcome: Outcome | None = None
    """Why, if they failed. With the code ``unexpected`` it says nothing beyond what the ranks
    reported.
    """


class OtherNodes:
    """The other nodes of a run, as the first node's supervisor sees them."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to read the states of ``count`` nodes but the first."""
        self._run, self._attempt, self._clock = run, attempt, clock
        self._seen = {
            node: (NodeState(host=f"number {node}", heartbeat=_SILENT), clock())
            for node in range(1, count)
        }
        """The newest state of each node, and when it was first seen, by the clock of this
        process.
        """

    def poll(self) -> None:
        """Read the states. One that cannot be read is silence."""
        for node, (before, _) in self._seen.items():
            state = readable_json(self._run.node_path(self._attempt, node), NodeState, own=True)
            if state is not None and state.heartbeat != before.heartbeat:
                self._seen[node] = (state, self._clock())

    def cause(self, silent_s: float) -> Outcome | None:
        """Return why the run cannot go on: what a node reported, the most telling first, or that
        one is silent for too long.

        Args:
            silent_s: How long a node may give no sign of life.
        """
        told = [
            replace(state.outcome, node=state.host)
            for state, _ in self._seen.values()
            if state.outcome is not None
        ]
        for outcome in told:
            if outcome.code != OutcomeCode.UNEXPECTED:
                return outcome
        now = self._clock()
        for state, since in self._seen.values():
            allowed_s = max(silent_s, FIRST_SIGN_S) if state.heartbeat == _SILENT else silent_s
            if not state.ended and now - since > allowed_s:
                return Outcome(code=OutcomeCode.NODE_LOST, node=state.host)
        return told[0] if told else None

    def wait(self) -> Outcome | None:
        """Wait for the end of the other nodes' processes, but not long, and return ``cause``."""
        began = self._clock()
        while (
            not all(state.ended for state, _ in self._seen.values())
            and self._clock() - began < _END_S
        ):
            time.sleep(_POLL_S)
            self.poll()
        return self.cause(self._clock() - began - _POLL_S)


def attributed(own: Outcome, others: Outcome | None, *, unprompted: bool) -> Outcome:
    """Return how an attempt on several nodes ended: as the first node saw it, or because of another
    one.

    When a node fails, ranks of the others report that they lost a rank, or are ended by their
    supervisors.

    Args:
        own: What the first node saw.
        others: What happened on another one, if anything did.
        unprompted: A process of the first node ended before any had been told to.
    """
    if (
        others is None
        or own.state in ("finished", "stopped")
        or (own.reported and own.code != OutcomeCode.RANK_LOST)
        or others.code == OutcomeCode.UNEXPECTED
        or (own.signal is not None and unprompted and others.code != OutcomeCode.NODE_LOST)
    ):
        return own
    return others


class NodeSupervisor:
    """Watches one attempt on another node than the first."""

    def __init__(
        self, run: RunDirectory, attempt: int, launch: Launch, digest: str, nodes: Nodes
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._host = Host(run, attempt, launch, digest, nodes)
        self._path = run.node_path(attempt, nodes.node)
        self._state = NodeState(
            host=self._host.name, supervisor=identify(os.getpid(), "supervisor")
        )
        self._first_heartbeat = -1
        self._first_heard_at = time.monotonic()
        self._first_started = False

    def watch(self) -> int:
        """Run the attempt on this node from its start to its end. Return 0 if it did not fail
        here.
        """
        self._host.install_signals()
        self._write_state()
        try:
            self._host.start()
        except (SoTuiError, OSError) as error:
            return self._finish(not_started(error))
        self._host.tree.scan()
        # Alerts and causes of slowness are the first node's.
        self._host.follow(self._tick, lambda _: None)
        self._host.sweep()
        return self._finish(self._outcome())

    def _tick(self) -> bool:
        self._host.reap()
        self._check_launcher()
        with self._host.despite_errors_of("control"):
            self._pass_on_signal()
        self._check_first_node()
        self._host.act()
        self._write_state(processes=self._host.tree.alive)
        return True

    def _check_launcher(self) -> None:
        """Give the launcher its time to end once its ranks have: the trainer's end record may come
        later, for it is the first node's.
        """
        shutdown, roles = self._host.shutdown, {process.role for process in self._host.tree.alive}
        lost = self._host.first_loss is not None
        if shutdown.ended_at is None and lost and "launcher" in roles and "rank" not in roles:
            shutdown.ended_at = time.monotonic()

    def _pass_on_signal(self) -> None:
        """Ask the run to stop, on all nodes. A scheduler's warning reaches the first node, too,
        which asks for that.
        """
        received = self._host.signal
        if received is not None and received is not signal.SIGUSR1:
            request_stop(
                self._run,
                reason=f"the supervisor on {self._host.name} received {received.name}",
                signalled=True,
            )
        self._host.signal = None

    def _check_first_node(self) -> None:
        """End the processes here once the run has ended, or nobody is left to say that it has."""
        now, over = time.monotonic(), False
        # An error means deleted, or a file system that is away: that is silence, too.
        with contextlib.suppress(InputError, OSError):
            found = read_state(self._run)
            if found.heartbeat != self._first_heartbeat:
                self._first_heartbeat, self._first_heard_at = found.heartbeat, now
            self._first_started = found.attempt >= self._attempt
            over = found.attempt > self._attempt or (
                found.attempt == self._attempt and found.state in FINAL_STATES
            )
        silent = now - self._first_heard_at > (STALE_S if self._first_started else FIRST_SIGN_S)
        if over or silent:
            self._host.shutdown.broken = True

    def _outcome(self) -> Outcome | None:
        """Return why the processes failed here; None if they did not. What they did because others
        failed has no code of its own.
        """
        tree = self._host.tree
        ranks = {code for process, code in tree.gone.items() if process.role == "rank"}
        # DeepSpeed's runner returns 0 after its launcher was killed, too.
        if self._host.status() == 0 and ranks <= {None, 0}:
            return None
        evidence = self._host.evidence()
        if evidence.unprompted or evidence.missing_network:
            return conclude(evidence)
        return Outcome(code=OutcomeCode.UNEXPECTED)

    def _finish(self, outcome: Outcome | None) -> int:
        self._write_state(processes=(), ended=True, outcome=outcome)
        self._host.release()
        return 0 if outcome is None else outcome.run_exit_code

    def _write_state(self, **changes: Any) -> None:
        self._state = replace(self._state, heartbeat=self._state.heartbeat + 1, **changes)
        with self._host.despite_errors_of("state"):
            write_run_json(self._run, self._path, self._state)
