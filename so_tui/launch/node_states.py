"""What the supervisors of a run's nodes tell each other, in files of which each has one writer.

The first node's writes ``state.json``, as for every run; each other one writes ``node<N>.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from so_tui.launch.outcome import Outcome
from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.runs.outcome import OutcomeCode
from so_tui.runs.records import Process
from so_tui.trust.decoding import decode_json
from so_tui.trust.ownership import read_own

FIRST_SIGN_S = 300.0
"""How long a node may take to give its first sign: its interpreter may come from a slow file system."""
_END_S = 20.0
"""How long the first node waits for the others to end. Those that gave no sign meanwhile are lost."""
_POLL_S = 0.2


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
    """Why, if they failed. With the code ``unexpected`` it says nothing beyond what the ranks reported."""


def write_node_state(run: RunDirectory, attempt: int, node: int, state: NodeState) -> None:
    """Replace ``node<N>.json``. Raises OSError."""
    write_run_file(run, run.node_path(attempt, node), msgspec.json.encode(state))


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
        self._seen: dict[int, tuple[NodeState | None, float]] = {
            node: (None, clock()) for node in range(1, count)
        }
        """The newest state of each node, and when it was first seen, by the clock of this process."""

    def poll(self) -> None:
        """Read the states. Raises OSError."""
        for node, (before, _) in self._seen.items():
            try:
                state = decode_json(read_own(self._run.node_path(self._attempt, node)), NodeState)
            except (
                FileNotFoundError,
                msgspec.DecodeError,
            ):  # not yet, or just being replaced on a network file system
                continue
            if before is None or state.heartbeat != before.heartbeat:
                self._seen[node] = (state, self._clock())

    def cause(self, silent_s: float) -> Outcome | None:
        """Return why the run cannot go on: what a node reported, the most telling first, or that one is silent for too long.

        Args:
            silent_s: How long a node may give no sign of life.
        """
        states = [state for state, _ in self._seen.values() if state is not None]
        found = [
            msgspec.structs.replace(state.outcome, node=state.host)
            for state in states
            if state.outcome is not None
        ]
        told = sorted(found, key=lambda outcome: outcome.code == OutcomeCode.UNEXPECTED)
        if told and told[0].code != OutcomeCode.UNEXPECTED:
            return told[0]
        now = self._clock()
        for node, (state, since) in self._seen.items():
            allowed_s = silent_s if state is not None else max(silent_s, FIRST_SIGN_S)
            if not (state is not None and state.ended) and now - since > allowed_s:
                return Outcome(
                    state="failed",
                    code=OutcomeCode.NODE_LOST,
                    node=state.host if state is not None else f"number {node}",
                )
        return told[0] if told else None

    def wait(self) -> Outcome | None:
        """Wait for the end of the other nodes' processes, but not long, and return ``cause``."""
        began = self._clock()
        while (
            any(state is None or not state.ended for state, _ in self._seen.values())
            and self._clock() - began < _END_S
        ):
            time.sleep(_POLL_S)
            try:
                self.poll()
            except OSError:  # the file system is away: only silence is known
                continue
        return self.cause(self._clock() - began - _POLL_S)


def attributed(own: Outcome, others: Outcome | None, *, unprompted: bool) -> Outcome:
    """Return how an attempt on several nodes ended: as the first node saw it, or because of another one.

    When a node fails, ranks of the others report that they lost a rank, or are ended by their supervisors.

    Args:
        own: What the first node saw.
        others: What happened on another one, if anything did.
        unprompted: A process of the first node ended before any had been told to.
    """
    if others is None or own.state in ("finished", "stopped"):
        return own
    if own.reported and own.code != OutcomeCode.RANK_LOST:
        return own
    if others.code == OutcomeCode.UNEXPECTED or (
        own.signal is not None and unprompted and others.code != OutcomeCode.NODE_LOST
    ):
        return own
    return others
