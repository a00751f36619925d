"""Check processes: what earlier runs left behind, and whether runs survive a logout.

Codes: orphaned-trainers, orphaned-ranks, killed-at-logout, shm-left-behind.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterator

from so_tui.machine.doctor.types import CheckContext, Finding
from so_tui.machine.system_files import SystemFiles
from so_tui.trust.printable import printable_line, quoted
from so_tui.units import memory_size

_TRAINER = "so_tui_trainer"
_RUN_VARIABLE = "SO_TUI_RUN="
"""Set in the environment of every process of a run."""
_SHELLS = ("bash", "sh", "dash", "zsh", "fish", "tmux: server", "slurmstepd")
_SESSION = 3
"""Index of the session among the fields after the command name in /proc/PID/stat."""
_SHM = "/dev/shm"
_SEGMENT = re.compile(r"torch_\d+_|psm_|deepspeed_allreduce_buffer_|nccl-")
"""Names of segments of torch, Python, DeepSpeed and NCCL."""
_LEFT_BYTES = 32 << 20
"""Less is not reported."""
_LOGIND_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")
"""Folders in order of precedence, the last wins."""
_TRUE = ("yes", "true", "1", "on")


def check_orphans(context: CheckContext) -> Iterator[Finding]:
    """Find training processes of this user without a supervisor. The run may still be fine: its supervisor may have died."""
    if not context.files:
        return
    ours: dict[int, str] = {}
    others: list[int] = []
    for pid in sorted(int(name) for name in context.files.names("/proc") if name.isdigit()):
        if not _own_and_alive(context.files, pid):
            continue
        arguments = _strings(context.files, pid, "cmdline")
        run = run_of(context.files, pid)
        # Adam workers are spawned by multiprocessing: only their environment shows which run they belong to.
        if run is not None or any(_TRAINER in argument for argument in arguments):
            if _is_unsupervised(context.files, pid):
                ours[pid] = run or ""
        elif _adopted(context.files, pid) and _is_rank(context.files, pid, arguments):
            others.append(pid)
    if ours:
        runs = ", ".join(sorted({run for run in ours.values() if run})) or "unknown"
        processes = " ".join(map(str, ours))
        yield Finding(
            code="orphaned-trainers",
            severity="warning",
            title="Training processes without a supervisor",
            evidence=f"process {processes}, no supervisor among its parents; run: {runs}",
            cost="They hold cores, memory and GPUs.",
            remedy=f"`so-tui runs` shows whether the run is alive, and then starts a supervisor again. If it is not: `kill {processes}`.",
        )
    if others:
        processes = " ".join(map(str, others))
        yield Finding(
            code="orphaned-ranks",
            severity="warning",
            title="Processes of another distributed run without a launcher",
            evidence=f"process {processes}, parent ended: DeepSpeed's launcher leaves ranks and Adam workers behind when it is killed",
            cost="They hold cores, memory and GPUs.",
            remedy=f"`kill {processes}`, if that run has ended.",
        )


def run_of(files: SystemFiles, pid: int) -> str | None:
    """Return the run directory that a process of so-tui belongs to; None for any other process."""
    return next(
        (
            text.removeprefix(_RUN_VARIABLE)
            for text in _strings(files, pid, "environ")
            if text.startswith(_RUN_VARIABLE)
        ),
        None,
    )


def _is_rank(files: SystemFiles, pid: int, arguments: list[str]) -> bool:
    """Return whether a process is a rank, a child of one, or DeepSpeed's launcher, judging by the variables that torch launchers set."""
    names = {text.partition("=")[0] for text in _strings(files, pid, "environ")}
    return {"LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} <= names or any(
        "deepspeed.launcher" in argument for argument in arguments
    )


def _own_and_alive(files: SystemFiles, pid: int) -> bool:
    """Return whether a process belongs to this user and has not ended."""
    try:
        return (
            files.path(f"/proc/{pid}").stat().st_uid == os.getuid()
            and _state_and_parent(files, pid)[0] not in "ZX"
        )
    except OSError:
        return False


def _state_and_parent(files: SystemFiles, pid: int) -> tuple[str, int]:
    """Return the state and the parent of a process; ("Z", 0) if it has ended."""
    # The name in parentheses may contain spaces and parentheses: the fields follow the last one.
    fields = (files.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if len(fields) > 1 else ("Z", 0)


def _is_unsupervised(files: SystemFiles, pid: int) -> bool:
    """Return whether a process has no supervisor among its parents, and its run's topmost process lost its parent or session leader.

    Which process adopts orphans depends on the machine. A run that a user's script started still has the script's session.
    """
    top = pid
    while pid > 1:
        if "supervise" in _strings(files, pid, "cmdline"):
            return False
        if run_of(files, pid) is not None:
            top = pid
        pid = _state_and_parent(files, pid)[1]
    fields = (files.text(f"/proc/{top}/stat") or "").rpartition(")")[2].split()
    leaderless = len(fields) > _SESSION and not files.exists(f"/proc/{fields[_SESSION]}")
    return leaderless or _adopted(files, top)


def _adopted(files: SystemFiles, pid: int) -> bool:
    """Return whether the parent is process 1 or the user's service manager, which usually adopt orphans.

    In a container, process 1 may be the user's shell.
    """
    parent = _state_and_parent(files, pid)[1]
    name = files.text(f"/proc/{parent}/comm")
    return name not in _SHELLS if parent == 1 else name == "systemd"


def _strings(files: SystemFiles, pid: int, name: str) -> list[str]:
    """Return the NUL-separated strings of a file in /proc/PID."""
    return (files.text(f"/proc/{pid}/{name}") or "").split("\0")


def check_logout(context: CheckContext) -> Iterator[Finding]:
    """Find login sessions whose processes end at logout. Those of the user's service manager outlive it if the user lingers."""
    if not context.files or "/session-" not in context.text("/proc/self/cgroup"):
        return
    where, settings = _logind_settings(context.files)
    user = pwd.getpwuid(os.getuid()).pw_name
    if (
        settings.get("KillUserProcesses", "no").lower() in _TRUE
        and user not in settings.get("KillExcludeUsers", "root").split()
    ):
        lingers = context.files.exists(f"/var/lib/systemd/linger/{user}")
        first = "" if lingers else "`loginctl enable-linger` once, then "
        yield Finding(
            code="killed-at-logout",
            severity="warning",
            title="Runs end when you log out",
            evidence=f"{where}: KillUserProcesses=yes; login session of {user}, lingering is {'on' if lingers else 'off'}",
            cost="systemd kills every process of a session when it ends, including tmux and detached runs.",
            remedy=f"{first}start so-tui with `systemd-run --user --scope so-tui`. Alternatively, run in a job of the scheduler.",
        )


def _logind_settings(files: SystemFiles) -> tuple[str, dict[str, str]]:
    """Return the file that sets KillUserProcesses, and all settings. Drop-ins are read after the main files, in name order."""
    drop_ins = {
        name: folder
        for folder in _LOGIND_FOLDERS
        for name in files.names(f"{folder}/logind.conf.d")
        if name.endswith(".conf")
    }
    names = [f"{folder}/logind.conf" for folder in _LOGIND_FOLDERS] + [
        f"{drop_ins[name]}/logind.conf.d/{name}" for name in sorted(drop_ins)
    ]
    where = ""
    settings: dict[str, str] = {}
    for file in names:
        found = dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", files.text(file) or "", re.MULTILINE))
        where = file if "KillUserProcesses" in found else where
        settings |= found
    return where, settings


def check_shared_memory_left(context: CheckContext) -> Iterator[Finding]:
    """Find segments in /dev/shm that no process has open: they take memory until they are removed."""
    if not context.files:
        return
    found = {
        name: size
        for name in context.files.names(_SHM)
        if _SEGMENT.match(name) and (size := _own_size(context.files, f"{_SHM}/{name}"))
    }
    if found:
        open_now = _open_segments(context.files)
        found = {name: size for name, size in found.items() if name not in open_now}
    if sum(found.values()) < _LEFT_BYTES:
        return
    paths = [f"{_SHM}/{name}" for name in sorted(found, key=lambda name: -found[name])]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    total = context.machine.shm_total_bytes or 0
    largest = printable_line(", ".join(name.rpartition("/")[2] for name in paths[:3]))
    yield Finding(
        code="shm-left-behind",
        severity="warning" if sum(found.values()) > total // 10 else "note",
        title="Ended processes left shared memory behind",
        evidence=f"{memory_size(sum(found.values()))} in {_SHM}: {largest}{more}",
        cost="It takes memory until it is removed or the machine restarts.",
        remedy=f"`{quoted('rm', *paths[:8])}`"
        + (", then run doctor again" if len(paths) > 8 else "")
        + ". None of your processes has them open.",
    )


def _own_size(files: SystemFiles, path: str) -> int:
    """Return the size of a regular file in bytes if it belongs to this user, otherwise 0. Another user's link to one is not this user's."""
    try:
        found = files.path(path).lstat()
    except OSError:
        return 0
    return found.st_size if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode) else 0


def _open_segments(files: SystemFiles) -> set[str]:
    """Return the names in /dev/shm that a process has mapped, as far as this user may see."""
    mapped = (
        files.text(f"/proc/{name}/maps") or "" for name in files.names("/proc") if name.isdigit()
    )
    names = {
        name
        for maps in mapped
        for name in re.findall(rf"{_SHM}/(.+?)(?: \(deleted\))?$", maps, re.MULTILINE)
    }
    return {name.replace("\\012", "\n") for name in names}  # as the kernel writes the end of a line


CHECKS = (check_orphans, check_shared_memory_left, check_logout)
