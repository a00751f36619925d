"""The sockets of processes on which others could reach them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil


class OpenSocket(NamedTuple):
    """A TCP socket that listens, or a bound UDP socket."""

    pid: int
    kind: str
    address: str
    port: int

    @property
    def reachable(self) -> bool:
        """Whether another host could reach it, as far as its address says."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return not (mapped or address).is_loopback


def open_sockets(pids: Iterable[int]) -> frozenset[OpenSocket]:
    """Return the sockets of processes that live on which something could arrive unasked."""
    found = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(pid).net_connections("inet"):
                if each.type == socket.SOCK_DGRAM or each.status == psutil.CONN_LISTEN:
                    found.add(OpenSocket(pid, each.type.name, *each.laddr))
    return frozenset(found)


def tree(pid: int) -> tuple[int, ...]:
    """Return a process and all its descendants."""
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
    return (pid, *(process.pid for process in below))
