"""Checks of processes: what earlier runs left behind, and whether runs survive a logout."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator

from so_tui.machine.doctor.finding import Finding, Look
from so_tui.machine.tree import Tree

_TRAINER = "so_tui_trainer"
_RUN_VARIABLE = "SO_TUI_RUN="
"""Set in the environment of every process of a run."""
_LOGIND_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")
"""Later ones win, file by file."""
_TRUE = ("yes", "true", "1", "on")


def orphans(look: Look) -> Iterator[Finding]:
    """Training processes of this user whose parent is gone. A run whose supervisor died looks the same, and is fine."""
    if not look.tree:
        return
    pids = (int(name) for name in look.tree.names("/proc") if name.isdigit())
    left = {pid: run for pid in sorted(pids) if (run := _orphaned_run(look.tree, pid)) is not None}
    if left:
        runs = ", ".join(sorted({run for run in left.values() if run})) or "unknown"
        processes = " ".join(map(str, left))
        yield Finding(
            severity="warning",
            title="Training processes without a supervisor",
            evidence=f"process {processes}, parent gone; run: {runs}",
            cost="They hold cores, memory and GPUs.",
            remedy=f"`so-tui runs` tells whether the run is still alive, and watches over it again; if not: `kill {processes}`.",
        )


def _orphaned_run(tree: Tree, pid: int) -> str | None:
    """The run directory of an orphaned training process of this user, "" where it does not say; None for every other process."""
    try:
        if tree.path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return None
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses: state and parent follow the last one.
    state_and_parent = (tree.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()[:2]
    if len(state_and_parent) < 2 or state_and_parent[0] == "Z" or not _is_init(tree, int(state_and_parent[1])):
        return None
    arguments = (tree.text(f"/proc/{pid}/cmdline") or "").split("\0")
    variables = (tree.text(f"/proc/{pid}/environ") or "").split("\0")
    run = next((variable.removeprefix(_RUN_VARIABLE) for variable in variables if variable.startswith(_RUN_VARIABLE)), None)
    # Adam workers are spawned by multiprocessing: only their environment tells what they belong to.
    if run is None and not any(_TRAINER in argument for argument in arguments):
        return None
    return None if "supervise" in arguments else run or ""


def _is_init(tree: Tree, parent: int) -> bool:
    """The first process, or a user's service manager: who inherits orphans."""
    return parent == 1 or tree.text(f"/proc/{parent}/comm") == "systemd"


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


CHECKS = (orphans, killed_at_logout)
