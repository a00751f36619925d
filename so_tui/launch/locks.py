"""Locks on what a run owns on its host: GPUs, and being supervised once. They are flock(2), released with the holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct, json

from so_tui.machine.types import Gpu
from so_tui.runs.directory import RunDirectory


class Holder(Struct, frozen=True):
    """The holder of a lock, as written in its file."""

    run: str
    pid: int


@dataclass(frozen=True)
class Lock:
    """A lock that is held as long as any process has this descriptor, or a copy of it, open."""

    name: str
    descriptor: int

    def release(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)


class LockTakenError(Exception):
    """Another process holds the lock."""

    def __init__(self, name: str, holder: Holder | None) -> None:
        self.name = name
        self.holder = holder
        who = f"run {Path(holder.run).name} (pid {holder.pid})" if holder and holder.run else "another run"
        super().__init__(f"{name} is used by {who}")


def lock_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this user's folder for locks on this host, and make it if necessary.

    Raises:
        PermissionError: The folder under /tmp belongs to another user, who could block or deceive us.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    folder = (
        Path(runtime) / "so-tui"
        if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK)
        else Path(f"/tmp/so-tui-{os.getuid()}")
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def take(folder: Path, name: str, holder: Holder) -> Lock:
    """Take a lock without waiting, or raise LockTakenError."""
    path = folder / f"{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        current = _read_holder(descriptor)
        os.close(descriptor)
        raise LockTakenError(name, current) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.encode(holder), 0)
    return Lock(name, descriptor)


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


@contextlib.contextmanager
def supervisor_lock(run: RunDirectory) -> Iterator[bool]:
    """Yield whether this process is now the run's only supervisor.

    On a file system without locks it yields True, and only the recorded supervisor's liveness protects the run.
    """
    with run.supervisor_lock_path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            print(f"no lock on {run.supervisor_lock_path}: {error}", file=sys.stderr)
        yield True


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
                pids = tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
            except pynvml.NVMLError:
                continue  # not permitted or not supported here, so nothing is known about this GPU
            if pids:
                users[gpu.index] = pids
    finally:
        pynvml.nvmlShutdown()
    return users


def _read_holder(descriptor: int) -> Holder | None:
    try:
        return json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except ValueError:
        return None  # the holder has locked the file and not yet written its name
