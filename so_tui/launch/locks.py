"""Locks on the GPUs that a run uses on its host. They are flock(2), released with the holder."""

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
from so_tui.machine.types import Gpu
from so_tui.trust.ownership import NotOwnError, private_folder


class Holder(Struct, frozen=True):
    """The holder of a lock, as written in its file."""

    run: str
    pid: int


@dataclass(frozen=True)
class Lock:
    """A lock that is held as long as any process has this descriptor, or a copy of it, open."""

    name: str
    descriptor: int
    path: Path

    def release(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)


class LockTakenError(Exception):
    """Another process holds the lock."""

    def __init__(self, name: str, holder: Holder | None) -> None:
        self.name = name
        self.holder = holder
        who = (
            f"run {Path(holder.run).name} (pid {holder.pid})"
            if holder and holder.run
            else "another run"
        )
        super().__init__(f"{name} is used by {who}")


def lock_folder() -> Path:
    """Return this user's folder for locks on this host, and make it if necessary.

    It is the same in every shell: XDG_RUNTIME_DIR is not set in all of them, and vanishes with the last login session.

    Raises:
        NotOwnError: Another user has taken both names.
        OSError: It cannot be made.
    """
    try:
        return private_folder(host_folder())
    except NotOwnError:  # another user made it, to block or deceive us
        return private_folder(state_home() / f"locks.{socket.gethostname()}")


def take(folder: Path, name: str, holder: Holder) -> Lock:
    """Take a lock without waiting, or raise LockTakenError."""
    path = folder / f"{name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            current = _read_holder(descriptor)
            os.close(descriptor)
            raise LockTakenError(name, current) from None
        if _names(path, descriptor):
            break
        os.close(descriptor)  # a cleaner of old files removed it between the two calls
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.encode(holder), 0)
    return Lock(name, descriptor, path)


def refreshed(lock: Lock, holder: Holder) -> Lock:
    """Keep cleaners of old files away from a lock, and take it again if one has removed its file. Return the lock to hold from now on.

    Processes that inherited the old descriptor no longer hold anything then, but their supervisor does.

    Raises:
        LockTakenError: Another process took it after its file had been removed.
        OSError: It cannot be taken.
    """
    if _names(lock.path, lock.descriptor):
        os.utime(lock.descriptor)
        return lock
    again = take(lock.path.parent, lock.name, holder)
    lock.release()
    return again


def take_gpus(folder: Path, gpus: Iterable[Gpu], holder: Holder) -> tuple[Lock, ...]:
    """Take the locks of all the GPUs, or none and raise LockTakenError for the first that is held."""
    with contextlib.ExitStack() as undo:
        locks = []
        for gpu in gpus:
            try:
                lock = take(folder, gpu_lock_name(gpu), holder)
            except LockTakenError as error:
                raise LockTakenError(f"GPU {gpu.index}", error.holder) from None
            undo.callback(lock.release)
            locks.append(lock)
        undo.pop_all()
    return tuple(locks)


def gpu_lock_name(gpu: Gpu) -> str:
    """Return a name that does not depend on how devices are numbered: the UUID, else the PCI address."""
    return f"gpu-{gpu.uuid or gpu.pci_bus_id.replace(':', '-')}"


def foreign_processes(gpus: Iterable[Gpu]) -> dict[int, tuple[int, ...]]:
    """Return the pids of processes that already use these GPUs, by GPU index, as far as NVML reports them. Empty without NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    users: dict[int, tuple[int, ...]] = {}
    try:
        for gpu in gpus:
            try:
                handle = pynvml.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id.encode())
                pids = tuple(
                    process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                )
            except pynvml.NVMLError:
                continue  # not permitted or not supported here, so nothing is known about this GPU
            if pids:
                users[gpu.index] = pids
    finally:
        pynvml.nvmlShutdown()
    return users


def _names(path: Path, descriptor: int) -> bool:
    """Return whether a path still names the file of a descriptor."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> Holder | None:
    try:
        return json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except ValueError:
        return None  # the holder has locked the file and not yet written its name
