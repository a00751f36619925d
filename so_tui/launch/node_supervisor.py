"""The supervisor of another node than the first: it starts, watches, samples and ends the processes of its host.

What becomes of the run is the first node's to say. When that one has said it, or gives no sign of life, the processes here are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import msgspec

from so_tui.launch import locks
from so_tui.launch.evidence import not_started
from so_tui.launch.host_supervisor import HostSupervisor
from so_tui.launch.node_states import FIRST_SIGN_S, NodeState, write_node_state
from so_tui.launch.nodes import Nodes
from so_tui.launch.outcome import Outcome, conclude
from so_tui.launch.preparation import Launch
from so_tui.launch.shutdown import request_stop
from so_tui.runs.directory import RunDirectory
from so_tui.runs.liveness import STALE_S, identify
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import FINAL_STATES, Process
from so_tui.runs.sample import Sample
from so_tui.runs.state import read_state
from so_tui.spec import InputError, SoTuiError


class NodeSupervisor(HostSupervisor):
    """Watches one attempt on another node than the first."""

    def __init__(self, run: RunDirectory, attempt: int, launch: Launch, nodes: Nodes) -> None:
        super().__init__(run, attempt, launch, nodes)
        self._node = nodes.node
        self._state = NodeState(host=self._host, supervisor=identify(os.getpid(), "supervisor"))
        self._first_heartbeat = -1
        self._first_heard_at = time.monotonic()
        self._first_started = False

    def watch(self) -> int:
        """Run the attempt on this node from its start to its end. Return 0 if it did not fail here."""
        self._install_signals()
        self._write_state()
        try:
            self._job.start()
        except (locks.LockTakenError, SoTuiError, OSError) as error:
            return self._finish(not_started(error))
        self._tree.scan()
        self._follow()
        self._sweep()
        return self._finish(self._outcome())

    def _look(self) -> bool:
        with self._despite_errors_of("control"):
            self._pass_on_signal()
        self._check_first_node()
        return True

    def _report(self) -> None:
        self._state = msgspec.structs.replace(self._state, processes=self._tree.alive)
        self._write_state()

    def _sampled(self, sample: Sample) -> None:
        pass  # alerts and causes of slowness are the first node's

    def _check_losses(self, before: set[Process]) -> None:
        super()._check_losses(before)
        roles = {process.role for process in self._tree.alive}
        if (
            self._shutdown.ended_at is None
            and "launcher" in roles
            and "rank" not in roles
            and self._first_loss.process is not None
        ):
            self._shutdown.ended_at = (
                time.monotonic()
            )  # the trainer's end record may come later: it is the first node's

    def _pass_on_signal(self) -> None:
        """Ask the run to stop, on all nodes. A scheduler's warning reaches the first node, too, which asks for that."""
        if self._signal not in (None, signal.SIGUSR1):
            assert self._signal is not None
            request_stop(
                self._run,
                reason=f"the supervisor on {self._host} received {self._signal.name}",
                signalled=True,
            )
        self._signal = None

    def _check_first_node(self) -> None:
        """End the processes here once the run has ended, or nobody is left to say that it has."""
        now, over = time.monotonic(), False
        with contextlib.suppress(
            InputError, OSError
        ):  # deleted, or its file system is away: that is silence, too
            found = read_state(self._run)
            if found.heartbeat != self._first_heartbeat:
                self._first_heartbeat, self._first_heard_at = found.heartbeat, now
            self._first_started = found.attempt >= self._attempt
            over = found.attempt > self._attempt or (
                found.attempt == self._attempt and found.state in FINAL_STATES
            )
        silent = now - self._first_heard_at > (STALE_S if self._first_started else FIRST_SIGN_S)
        if (over or silent) and self._shutdown.broken_at is None:
            self._shutdown.broken_at = now

    def _outcome(self) -> Outcome | None:
        """Return why the processes failed here; None if they did not. What they did because others failed has no code of its own."""
        ranks = {
            self._tree.exit_code(process) for process in self._tree.gone if process.role == "rank"
        }
        if self._job.status() == 0 and ranks <= {
            None,
            0,
        }:  # DeepSpeed's runner returns 0 after its launcher was killed, too
            return None
        evidence = self._evidence()
        if self._first_loss.unprompted or evidence.missing_network:
            return conclude(evidence)
        return Outcome(state="failed", code=OutcomeCode.UNEXPECTED)

    def _finish(self, outcome: Outcome | None) -> int:
        self._state = msgspec.structs.replace(
            self._state, processes=(), ended=True, outcome=outcome
        )
        self._write_state()
        self._job.release()
        return 0 if outcome is None else outcome.run_exit_code

    def _write_state(self) -> None:
        self._state = msgspec.structs.replace(self._state, heartbeat=self._state.heartbeat + 1)
        with self._despite_errors_of("state"):
            write_node_state(self._run, self._attempt, self._node, self._state)
