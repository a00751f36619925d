"""When the processes of an attempt are terminated and killed."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from so_tui.launch import DEFAULT_GRACE_S, EXIT_GRACE_S, KILL_AFTER_S
from so_tui.launch.supervisor.ending import Shutdown, StopRequest


def test_the_trainers_processes_get_time_after_the_end_record() -> None:
    shutdown = Shutdown(ended_at=100.0, broken=True)
    assert shutdown.next_signal(102.0) is None
    assert shutdown.next_signal(100.0 + EXIT_GRACE_S) == SIGTERM
    assert shutdown.next_signal(100.0 + EXIT_GRACE_S + 1) is None
    assert shutdown.next_signal(100.0 + EXIT_GRACE_S + KILL_AFTER_S) == SIGKILL


def test_broken_run_ends_and_stop_is_overdue() -> None:
    assert Shutdown(broken=True).next_signal(5.0) == SIGTERM
    stop = Shutdown(overdue_at=50.0)
    assert stop.next_signal(49.0) is None
    assert stop.next_signal(50.0) == SIGTERM
    assert stop.stop_overdue(50.0)
    assert not Shutdown(overdue_at=50.0, ended_at=40.0).stop_overdue(60.0)


def test_stop_has_its_time_again_after_a_checkpoint() -> None:
    asked, shutdown = StopRequest(by="me", time=1.0), Shutdown()
    for saved_step, now, overdue_at in (
        (20, 10.0, 10.0),
        (20, 50.0, 10.0),
        (40, 500.0, 500.0),
        (40, 700.0, 500.0),
    ):
        shutdown.stop(asked, saved_step, now)
        assert shutdown.overdue_at == overdue_at + DEFAULT_GRACE_S
    shutdown.stop(StopRequest(by="me", time=2.0, grace_s=30.0), 40, 800.0)
    shutdown.stop(StopRequest(by="me", time=2.0, grace_s=30.0), 60, 820.0)
    assert shutdown.overdue_at == 830.0, "a time that somebody gave is kept"
