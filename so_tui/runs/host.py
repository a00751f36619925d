"""Which host this is, exactly enough to know whether its processes can be seen from here."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

from msgspec import Struct

from so_tui.runs.records import RunState


class HostIdentity(Struct, frozen=True):
    """A host as a process sees it."""

    name: str
    boot_id: str = ""
    """Changes with each start of the kernel; empty if unknown."""
    pid_namespace: int = 0
    """Containers have one of their own, in which pids mean other processes; 0 if unknown."""


def this_host() -> HostIdentity:
    """Return the identity of the host that this process runs on."""
    try:
        boot_id = _boot_id()
    except OSError:
        boot_id = ""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a link that only the kernel can follow
    except OSError:
        namespace = 0
    return HostIdentity(socket.gethostname(), boot_id, namespace)


@cache
def _boot_id() -> str:
    """Return what the kernel chose when it started, which this process does not outlive. Raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_of(state: RunState) -> HostIdentity:
    """Return the host that a state was written on. States of older versions have only its name."""
    return HostIdentity(state.host, state.boot_id, state.pid_namespace)


def same_boot(one: HostIdentity, other: HostIdentity) -> bool:
    """Return whether these are one host that has not restarted. What is unknown counts as equal."""
    return one.name == other.name and (
        not one.boot_id or not other.boot_id or one.boot_id == other.boot_id
    )


def sees_processes_of(one: HostIdentity, other: HostIdentity) -> bool:
    """Return whether pids on one mean the same processes on the other."""
    namespaces = one.pid_namespace, other.pid_namespace
    return same_boot(one, other) and (0 in namespaces or namespaces[0] == namespaces[1])
