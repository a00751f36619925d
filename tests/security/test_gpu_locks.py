"""Where the locks of GPUs are: the same in all shells of a user, out of reach of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.users import SharedMachine, User

FOLDER = "from so_tui.launch.supervisor.host_check import lock_folder; print(lock_folder())"


def folders(user: User) -> set[Path]:
    """Return the folder of locks in a shell with XDG_RUNTIME_DIR, and in one without."""
    found = set()
    shells: tuple[dict[str, str], ...] = ({}, {"XDG_RUNTIME_DIR": str(user.home)})
    for changes in shells:
        done = user.run(
            user.interpreter, "-P", "-c", FOLDER, timeout_s=60.0, umask=0o022, **changes
        )
        assert done.returncode == 0, done.stderr
        found.add(Path(done.stdout.strip()))
    return found


@pytest.mark.parametrize("squatted", [False, True])
def test_gpu_locks_are_the_same_in_all_shells(squatted: bool, machine: SharedMachine) -> None:
    usual = Path(f"/tmp/so-tui-{machine.owner.uid}")
    try:
        if squatted:
            assert machine.other.run("mkdir", "-m", "777", str(usual)).returncode == 0
        (folder,) = folders(machine.owner)
        assert (folder != usual) == squatted
        assert (folder.stat().st_uid, oct(folder.stat().st_mode & 0o777)) == (
            machine.owner.uid,
            "0o700",
        )
        assert not squatted or list(usual.iterdir()) == []
    finally:
        usual.rmdir()
