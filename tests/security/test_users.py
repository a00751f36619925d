"""The two users of these tests are what they are meant to be."""

from __future__ import annotations

from tests.support.users import SharedMachine


def test_one_user_reads_nothing_of_the_others_home(machine: SharedMachine) -> None:
    secret = machine.owner.home / "secret"
    secret.write_text("x")
    machine.owner.give(secret)
    assert machine.owner.run("cat", str(secret)).stdout == "x"
    assert machine.other.run("cat", str(secret)).returncode != 0


def test_only_the_owner_removes_from_the_scratch_folder(machine: SharedMachine) -> None:
    left = machine.scratch / "left"
    assert machine.owner.run("touch", str(left)).returncode == 0
    assert machine.other.run("rm", str(left)).returncode != 0
    assert machine.owner.run("rm", str(left)).returncode == 0


def test_a_user_runs_commands_of_so_tui(machine: SharedMachine) -> None:
    done = machine.owner.so_tui("runs")
    assert (done.returncode, done.stderr) == (0, "")
