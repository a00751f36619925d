"""When the processes of an attempt are terminated and killed."""

from __future__ import annotations

from so_tui.launch.shutdown import Shutdown
from so_tui.launch.time_limits import EXIT_GRACE_S, KILL_AFTER_S


def test_the_trainers_processes_get_time_after_the_end_record() -> None:
    shutdown = Shutdown(ended_at=100.0, broken_at=101.0)
    assert shutdown.next_action(102.0) == "wait"
    assert shutdown.next_action(100.0 + EXIT_GRACE_S) == "terminate"
    assert shutdown.next_action(100.0 + EXIT_GRACE_S + 1) == "wait"
    assert shutdown.next_action(100.0 + EXIT_GRACE_S + KILL_AFTER_S) == "kill"


def test_a_broken_run_is_ended_immediately_and_an_ignored_stop_when_it_is_overdue() -> None:
    assert Shutdown(broken_at=5.0).next_action(5.0) == "terminate"
    stop = Shutdown(overdue_at=50.0)
    assert stop.next_action(49.0) == "wait"
    assert stop.next_action(50.0) == "terminate"
    assert stop.stop_overdue(50.0)
    assert not Shutdown(overdue_at=50.0, ended_at=40.0).stop_overdue(60.0)
