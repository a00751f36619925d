"""Checks of processes: what earlier runs left behind, and whether runs survive a logout."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator

from so_tui.machine.doctor.finding import Finding, Look, gib
from so_tui.machine.tree import Tree

_TRAINER = "so_tui_trainer"
_RUN_VARIABLE = "SO_TUI_RUN="
"""Set in the environment of every process of a run."""
_SHELLS = ("bash", "sh", "dash", "zsh", "fish", "tmux: server", "slurmstepd")
_SESSION = 3
"""Of the fields behind the command's name in /proc/PID/stat."""
_SHM = "/dev/shm"
_SEGMENT = re.compile(r"torch_\d+_|psm_|deepspeed_allreduce_buffer_|nccl-")
"""What torch, Python, DeepSpeed and NCCL name theirs."""
_LEFT_BYTES = 32 << 20
"""Less is not worth a word."""
_LOGIND_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")
"""Later ones win, file by file."""
_TRUE = ("yes", "true", "1", "on")


def orphans(look: Look) -> Iterator[Finding]:
    """Training processes of this user that nobody watches over. A run whose supervisor died looks the same, and is fine."""
    if not look.tree:
        return
    ours: dict[int, str] = {}
    others: list[int] = []
    for pid in sorted(int(name) for name in look.tree.names("/proc") if name.isdigit()):
        if not _own_and_alive(look.tree, pid):
            continue
        arguments = _strings(look.tree, pid, "cmdline")
        run = run_of(look.tree, pid)
        # Adam workers are spawned by multiprocessing: only their environment tells what they belong to.
        if run is not None or any(_TRAINER in argument for argument in arguments):
            if _left_alone(look.tree, pid):
                ours[pid] = run or ""
        elif _adopted(look.tree, pid) and _is_rank(look.tree, pid, arguments):
            others.append(pid)
    if ours:
        runs = ", ".join(sorted({run for run in ours.values() if run})) or "unknown"
        processes = " ".join(map(str, ours))
        yield Finding(
            severity="warning",
            title="Training processes without a supervisor",
            evidence=f"process {processes}, no supervisor above; run: {runs}",
            cost="They hold cores, memory and GPUs.",
            remedy=f"`so-tui runs` tells whether the run is still alive, and watches over it again; if not: `kill {processes}`.",
        )
    if others:
        processes = " ".join(map(str, others))
        yield Finding(
            severity="warning",
            title="Processes of another distributed run without a launcher",
            evidence=f"process {processes}, parent gone: DeepSpeed's launcher leaves ranks and Adam workers behind when it is killed",
            cost="They hold cores, memory and GPUs.",
            remedy=f"`kill {processes}`, if that run is over.",
        )


def run_of(tree: Tree, pid: int) -> str | None:
    """The run directory that a process of ours belongs to; None for every other process."""
    return next(
        (text.removeprefix(_RUN_VARIABLE) for text in _strings(tree, pid, "environ") if text.startswith(_RUN_VARIABLE)),
        None,
    )


def _is_rank(tree: Tree, pid: int, arguments: list[str]) -> bool:
    """A rank, what it spawned, or DeepSpeed's launcher: by the variables that every launcher of torch sets."""
    names = {text.partition("=")[0] for text in _strings(tree, pid, "environ")}
    return {"LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} <= names or any("deepspeed.launcher" in argument for argument in arguments)


def _own_and_alive(tree: Tree, pid: int) -> bool:
    try:
        return tree.path(f"/proc/{pid}").stat().st_uid == os.getuid() and _state_and_parent(tree, pid)[0] not in "ZX"
    except OSError:
        return False


def _state_and_parent(tree: Tree, pid: int) -> tuple[str, int]:
    """("Z", 0) for a process that is gone."""
    # The name in parentheses may hold spaces and parentheses: state and parent follow the last one.
    fields = (tree.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if len(fields) > 1 else ("Z", 0)


def _left_alone(tree: Tree, pid: int) -> bool:
    """Whether no supervisor is above the process, and the uppermost of its run has lost its parent or the leader of its session.

    Who adopts orphans differs from machine to machine; a run that a script started by itself still has the script's session.
    """
    top = pid
    while pid > 1:
        if "supervise" in _strings(tree, pid, "cmdline"):
            return False
        if run_of(tree, pid) is not None:
            top = pid
        pid = _state_and_parent(tree, pid)[1]
    fields = (tree.text(f"/proc/{top}/stat") or "").rpartition(")")[2].split()
    leaderless = len(fields) > _SESSION and not tree.exists(f"/proc/{fields[_SESSION]}")
    return leaderless or _adopted(tree, top)


def _adopted(tree: Tree, pid: int) -> bool:
    """Whether the parent is the first process, or a user's service manager: who mostly inherits orphans.

    In a container the first process may be the shell one works in.
    """
    parent = _state_and_parent(tree, pid)[1]
    name = tree.text(f"/proc/{parent}/comm")
    return name not in _SHELLS if parent == 1 else name == "systemd"


def _strings(tree: Tree, pid: int, name: str) -> list[str]:
    return (tree.text(f"/proc/{pid}/{name}") or "").split("\0")


def killed_at_logout(look: Look) -> Iterator[Finding]:
    """Only for processes of a login session: those of the user's own service manager outlive it where the user lingers."""
    if not look.tree or "/session-" not in look.text("/proc/self/cgroup"):
        return
    where, settings = _logind_settings(look.tree)
    user = pwd.getpwuid(os.getuid()).pw_name
    if settings.get("KillUserProcesses", "no").lower() in _TRUE and user not in settings.get("KillExcludeUsers", "root").split():
        lingers = look.tree.exists(f"/var/lib/systemd/linger/{user}")
        first = "" if lingers else "`loginctl enable-linger` once, then "
        yield Finding(
            severity="warning",
            title="Runs end when you log out",
            evidence=f"{where}: KillUserProcesses=yes; a login session of {user}, who {'lingers' if lingers else 'does not linger'}",
            cost="systemd kills every process of a session that ends, tmux and detached runs too.",
            remedy=f"{first}start with `systemd-run --user --scope so-tui`. Or run in a job of the scheduler.",
        )


def _logind_settings(tree: Tree) -> tuple[str, dict[str, str]]:
    """(the file that says KillUserProcesses, all settings). Drop-ins are read after the main files, in name order."""
    drop_ins = {name: folder for folder in _LOGIND_FOLDERS for name in tree.names(f"{folder}/logind.conf.d") if name.endswith(".conf")}
    files = [f"{folder}/logind.conf" for folder in _LOGIND_FOLDERS] + [
        f"{drop_ins[name]}/logind.conf.d/{name}" for name in sorted(drop_ins)
    ]
    where = ""
    settings: dict[str, str] = {}
    for file in files:
        found = dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", tree.text(file) or "", re.MULTILINE))
        where = file if "KillUserProcesses" in found else where
        settings |= found
    return where, settings


def shared_memory_left(look: Look) -> Iterator[Finding]:
    """Segments in /dev/shm that nobody has open any more: they are memory until somebody removes them."""
    if not look.tree:
        return
    found = {name: size for name in look.tree.names(_SHM) if _SEGMENT.match(name) and (size := _own_size(look.tree, f"{_SHM}/{name}"))}
    if found:
        open_now = _open_segments(look.tree)
        found = {name: size for name, size in found.items() if name not in open_now}
    if sum(found.values()) < _LEFT_BYTES:
        return
    paths = [f"{_SHM}/{name}" for name in sorted(found, key=lambda name: -found[name])]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    total = look.machine.shm_total_bytes or 0
    yield Finding(
        severity="warning" if sum(found.values()) > total // 10 else "note",
        title="Shared memory that ended processes left behind",
        evidence=f"{gib(sum(found.values()))} in {_SHM}: {', '.join(name.rpartition('/')[2] for name in paths[:3])}{more}",
        cost="It stays in memory until it is removed or the machine restarts.",
        remedy=f"`rm {' '.join(paths[:8])}`" + (", then look again" if len(paths) > 8 else "") + ". No process of yours has them open.",
    )


def _own_size(tree: Tree, path: str) -> int:
    """Bytes of a file of this user; 0 for others'."""
    try:
        stat = tree.path(path).stat()
    except OSError:
        return 0
    return stat.st_size if stat.st_uid == os.getuid() else 0


def _open_segments(tree: Tree) -> set[str]:
    """Names in /dev/shm that a process has mapped, as far as this user may look."""
    mapped = (tree.text(f"/proc/{name}/maps") or "" for name in tree.names("/proc") if name.isdigit())
    return {name for maps in mapped for name in re.findall(rf"{_SHM}/(\S+)", maps)}


CHECKS = (orphans, shared_memory_left, killed_at_logout)
