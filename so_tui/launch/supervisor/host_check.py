"""Check that a host is the one that a launch was planned for. A plan's binding means nothing on
other hardware.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct, json

from so_tui.folders import host_folder, state_home
from so_tui.machine.host import cpu_ranges
from so_tui.machine.types import Gpu, Machine
from so_tui.plan.plan import Launch
from so_tui.spec import Refusal, Refused
from so_tui.trust.files import NotOwnError
from so_tui.trust.folders import private_folder


class HostDiffersError(Refused):
    """The host lacks something that the plan uses."""


def refuse_different_host(launch: Launch, host: Machine) -> None:
    """Refuse a host without the GPUs, NUMA nodes or cores that the launch uses.

    Raises:
        HostDiffersError: With the codes ``gpu-missing``, ``numa-node-missing``,
            ``cores-not-allowed``.
    """
    ranks = launch.plan.binding
    gpus = {(gpu.index, gpu.pci_bus_id) for gpu in chosen_gpus(launch)}
    gpus -= {(gpu.index, gpu.pci_bus_id) for gpu in host.gpus}
    nodes = {rank.numa_node for rank in ranks if rank.numa_node is not None}
    nodes = nodes.union(*(rank.memory_policy.nodes for rank in ranks))
    nodes -= {node.id for node in host.numa_nodes}
    cores = {cpu for rank in ranks for cpu in rank.cpus} - set(host.allowed_cpus)
    named = ", ".join(f"{index} ({bus_id})" for index, bus_id in sorted(gpus))
    without = f"which {host.hostname} does not have"
    used = (
        (gpus, Refusal("gpu-missing", f"the plan uses GPU {named}, {without}")),
        (
            nodes,
            Refusal("numa-node-missing", f"the plan uses NUMA node {cpu_ranges(nodes)}, {without}"),
        ),
        (
            cores,
            Refusal(
                "cores-not-allowed",
                f"the plan uses cores {cpu_ranges(cores)}, which may not be used on "
                f"{host.hostname}",
            ),
        ),
    )
    missing = [refusal for lacking, refusal in used if lacking]
    if missing:
        raise HostDiffersError(missing)


# Locks on the GPUs that a run uses on its host. They are flock(2), released with the holder.


class _Holder(Struct, frozen=True):
    """The holder of a lock, as written in its file; without values if it has not yet written
    them.
    """

    run: str = ""
    pid: int = 0


@dataclass
class Lock:
    """A lock that is held as long as any process has its descriptor, or a copy of it, open."""

    path: Path
    holder: _Holder
    descriptor: int

    def refresh(self) -> None:
        """Keep cleaners of old files away from the lock, and take it again if one has removed its
        file.

        Processes that inherited the old descriptor no longer hold anything then, but their
        supervisor does.

        Raises:
            LockTakenError: Another process took it after its file had been removed.
            OSError: It cannot be taken.
        """
        if _names(self.path, self.descriptor):
            os.utime(self.descriptor)
        else:
            again = take(self.path.parent, self.path.stem, self.holder)
            self.release()
            self.descriptor = again.descriptor

    def release(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)


class LockTakenError(OSError):
    """Another process holds the lock."""

    def __init__(self, name: str, holder: _Holder) -> None:
        self.holder = holder
        who = f"run {Path(holder.run).name} (pid {holder.pid})" if holder.run else "another run"
        super().__init__(f"{name} is used by {who}")


def lock_folder() -> Path:
    """Return this user's folder for locks on this host, and make it if necessary.

    It is the same in every shell: XDG_RUNTIME_DIR is not set in all of them, and vanishes with the
    last login session.

    Raises:
        NotOwnError: Another user has taken both names.
        OSError: It cannot be made.
    """
    try:
        return private_folder(host_folder())
    except NotOwnError:  # another user made it, to block or deceive us
        return private_folder(state_home() / f"locks.{socket.gethostname()}")


def take(folder: Path, name: str, holder: _Holder) -> Lock:
    """Take a lock without waiting, or raise LockTakenError."""
    path = folder / f"{name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            current = _Holder()
            with contextlib.suppress(ValueError):
                # 4 KiB of a folder that only the user can open
                current = json.decode(os.pread(descriptor, 4096, 0), type=_Holder)  # noqa: TID251
            os.close(descriptor)
            raise LockTakenError(name, current) from None
        if _names(path, descriptor):
            break
        os.close(descriptor)  # a cleaner of old files removed it between the two calls
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.encode(holder), 0)
    return Lock(path, holder, descriptor)


def take_gpus(gpus: Iterable[Gpu], run: str) -> tuple[Lock, ...]:
    """Take the locks of all the GPUs for a run, by its path, or another use; or none and raise
    LockTakenError for the first that is held. Raises OSError.
    """
    folder, holder = lock_folder(), _Holder(run=run, pid=os.getpid())
    with contextlib.ExitStack() as undo:
        locks = []
        for gpu in gpus:
            try:
                # A name that does not depend on how devices are numbered.
                lock = take(folder, f"gpu-{gpu.uuid or gpu.pci_bus_id.replace(':', '-')}", holder)
            except LockTakenError as error:
                raise LockTakenError(f"GPU {gpu.index}", error.holder) from None
            undo.callback(lock.release)
            locks.append(lock)
        undo.pop_all()
    return tuple(locks)


def chosen_gpus(launch: Launch) -> list[Gpu]:
    """Return the GPUs that a launch uses."""
    chosen = {rank.gpu for rank in launch.plan.binding}
    return [gpu for gpu in launch.machine.gpus if gpu.index in chosen]


def _names(path: Path, descriptor: int) -> bool:
    """Return whether a path still names the file of a descriptor."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
