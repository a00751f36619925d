"""Checks of processes: what earlier runs left behind, and whether runs survive a logout."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator

from so_tui.machine.doctor.finding import Finding, Look
from so_tui.machine.tree import Tree

_TRAINER = "so_tui_trainer"
_LOGIND_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")
"""Later ones win, file by file."""
_TRUE = ("yes", "true", "1", "on")


def orphans(look: Look) -> Iterator[Finding]:
    """Trainer processes of this user without a parent of theirs. A run whose supervisor died looks the same, and is fine."""
    if not look.tree:
        return
    left = [pid for pid in map(int, filter(str.isdigit, look.tree.names("/proc"))) if _is_orphan(look.tree, pid)]
    if left:
        pids = " ".join(str(pid) for pid in left)
        yield Finding(
            severity="warning",
            title="Training processes without a supervisor",
            evidence=f"process {pids}: command line with {_TRAINER}, parent is init",
            cost="They hold cores, memory and GPUs.",
            remedy=f"`so-tui runs` shows whether a run is still alive and watches over it again; if none is: `kill {pids}`.",
        )


def _is_orphan(tree: Tree, pid: int) -> bool:
    try:
        if tree.path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return False
    except OSError:
        return False
    if _TRAINER not in (tree.text(f"/proc/{pid}/cmdline") or ""):
        return False
    # The name in parentheses may hold spaces: state and parent follow the last parenthesis.
    state_and_parent = (tree.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    if len(state_and_parent) < 2 or state_and_parent[0] == "Z":
        return False
    parent = int(state_and_parent[1])
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
            evidence=f"{where}: KillUserProcesses=yes; this is a login session of {user}, who {'lingers' if lingers else 'does not linger'}",
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
