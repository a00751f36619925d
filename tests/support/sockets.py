"""The sockets of processes on which others could reach them."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"
_TABLES = ("tcp", "tcp6", "udp", "udp6")


class OpenSocket(NamedTuple):
    """A TCP socket that listens, or a bound UDP socket."""

    pid: int
    table: str
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
    owners = {inode: pid for pid in pids for inode in _inodes(pid)}
    return frozenset(
        OpenSocket(owners[inode], table, address, port)
        for table in _TABLES
        for inode, address, port in _entries(table)
        if inode in owners
    )


def tree(pid: int) -> tuple[int, ...]:
    """Return a process and all its descendants, whichever of its threads started them."""
    children: list[str] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += listed.read_text().split()
    return (pid, *(below for child in children for below in tree(int(child))))


def _inodes(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - thousands of names, many times a second
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _entries(table: str) -> Iterator[tuple[str, str, int]]:
    try:
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    except FileNotFoundError:  # a kernel without IPv6
        return
    for line in lines:
        fields = line.split()
        if table.startswith("udp") or fields[3] == _LISTENING:
            words, port = fields[1].split(":")
            yield fields[9], _address(words), int(port, 16)


def _address(words: str) -> str:
    """Decode an address of /proc/net: 32-bit words in the byte order of this machine."""
    packed = b"".join(
        struct.pack("=I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8)
    )
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
