"""The sockets on which a process and all its descendants accept connections or datagrams, as the kernel lists them."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_TCP_LISTEN, _UDP_UNCONNECTED = "0A", "07"
_TABLES = {"tcp": _TCP_LISTEN, "tcp6": _TCP_LISTEN, "udp": _UDP_UNCONNECTED, "udp6": _UDP_UNCONNECTED}


@dataclass(frozen=True)
class Listening:
    """One socket that others can reach."""

    protocol: str
    address: IPv4Address | IPv6Address
    port: int
    process: str
    """The command line of a process that has it open."""

    @property
    def on_loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        mapped = getattr(self.address, "ipv4_mapped", None)
        return (mapped or self.address).is_loopback


def listening(root: int) -> set[Listening]:
    """Return what a process and its descendants listen on. Processes that end meanwhile are left out."""
    owners = {inode: pid for pid in tree(root) for inode in _socket_inodes(pid)}
    found = set()
    for protocol, state in _TABLES.items():
        table = Path("/proc/net", protocol)
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == state and int(fields[9]) in owners:
                address, port = fields[1].split(":")
                found.add(Listening(protocol, _address(address), int(port, 16), _command(owners[int(fields[9])])))
    return found


def tree(root: int) -> set[int]:
    """Return the process ids of a process and its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, added = {root}, {root}
    while added := {pid for pid, parent in parents.items() if parent in added}:
        found |= added
    return found


def _socket_inodes(pid: int) -> set[int]:
    found = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:
        return found
    return found


def _address(text: str) -> IPv4Address | IPv6Address:
    """Return an address from the kernel's notation: words of 32 bits in the byte order of the host, in hexadecimal."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return ip_address(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
