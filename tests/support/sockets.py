"""The sockets of processes on which others could reach them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator
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
    return frozenset(found for pid in pids for found in _sockets_of(pid))


def tree(pid: int) -> tuple[int, ...]:
    """Return a process and all its descendants."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    return (pid, *(process.pid for process in below))


def _sockets_of(pid: int) -> Iterator[OpenSocket]:
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return
    for connection in connections:
        if connection.type == socket.SOCK_DGRAM or connection.status == psutil.CONN_LISTEN:
            yield OpenSocket(pid, connection.type.name, *connection.laddr)
