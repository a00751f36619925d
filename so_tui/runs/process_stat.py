"""What the kernel says about a process of this host, from /proc/PID/stat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that are used here; see proc_pid_stat(5)."""

    name: str
    """Chosen by its owner, at most 15 bytes."""
    state: str
    parent: int
    cpu_ticks: int
    start_time: int
    """Clock ticks after the host started. With the pid it identifies a process, because pids are reused."""
    cpu: int | None
    """The CPU that it ran on last."""
    wait_status: int
    """Of a zombie, as wait(2) encodes it; 0 if the kernel does not show it to us."""

    @property
    def alive(self) -> bool:
        """Whether it still runs. A zombie does not."""
        return self.state not in "ZX"


def read_stat(pid: int) -> Stat | None:
    """Return the stat of a process; None if there is no such process, or the kernel hides it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return parse_stat(text)


def parse_stat(text: bytes) -> Stat:
    """Return what a stat file says. Kernels and sandboxes that imitate one may leave out its last fields."""
    # The command name is in parentheses and may contain anything, so the numbers begin after the last parenthesis.
    end = text.rindex(b")")
    fields = text[end + 2 :].split()
    return Stat(
        name=text[text.index(b"(") + 1 : end].decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_time=int(fields[19]),
        cpu=int(fields[36]) if len(fields) > 36 else None,
        wait_status=int(fields[49]) if len(fields) > 49 else 0,
    )
