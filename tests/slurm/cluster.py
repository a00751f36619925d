"""A real Slurm on one machine: munge, slurmctld and one slurmd for each node, and if asked for,
MariaDB and slurmdbd, all in one folder, and gone afterwards.

Each slurmd has a host name of its own (a UTS namespace), so what runs in a job finds itself on
another host than the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.commands import forget_cluster

NODES = ("n1", "n2")
ACCOUNT = "project"
"""The account that may be charged, with accounting."""
_TOOLS = "munged slurmctld slurmd sbatch squeue scontrol scancel sinfo srun unshare"
_ACCOUNTING_TOOLS = "mariadb-install-db mariadbd slurmdbd sacctmgr sacct"
_DATA = Path(__file__).parents[1] / "data" / "slurm"
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_NODE = "NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2 State=UNKNOWN"


def _skip_without(tools: str) -> None:
    """Skip where Slurm cannot run: programs are missing, or the right to name a host."""
    absent = [tool for tool in tools.split() if shutil.which(tool, path=_PATH) is None]
    if not absent:
        if os.geteuid() != 0:
            absent = ["the right of root to start slurmd"]
        elif subprocess.run(
            ["unshare", "--uts", "hostname", "n1"], capture_output=True, check=False
        ).returncode:
            absent = ["the right to make a UTS namespace"]
    if absent:
        pytest.skip(f"Slurm cannot be run here without {', '.join(absent)}")


@dataclass
class Cluster:
    """A running Slurm. ``environ`` is what its commands need."""

    folder: Path
    environ: Mapping[str, str]
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _a_node_failed: bool = False

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the test's own commands find this cluster."""
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, self.environ[name])
        forget_cluster(monkeypatch)

    def run(self, *argv: str, check: bool = True, timeout_s: float = 60) -> str:
        done = subprocess.run(
            argv, env=self.environ, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a daemon in the foreground, in a session of its own."""
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                argv,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        if node not in self._daemons:
            named = f"hostname {node} && exec slurmd -D -N {node}"
            self.start(node, ["unshare", "--uts", "sh", "-c", named])

    def stop_node(self, node: str) -> None:
        """Kill a node as when its power fails, before any step of it can report."""
        self._a_node_failed = True
        _kill(self._steps(node))
        self._daemons[node].kill()
        _kill(self.processes(node))
        self._daemons.pop(node).wait()

    def processes(self, node: str | None = None) -> tuple[int, ...]:
        """Return the processes of this cluster's jobs (on one node), by their environment."""
        wanted = {f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()}
        wanted |= {f"SLURMD_NODENAME={node}".encode()} if node else set()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = set((folder / "environ").read_bytes().split(b"\0"))
                if wanted <= variables and any(
                    each.startswith(b"SLURM_JOB_ID=") for each in variables
                ):
                    found.append(int(folder.name))
        return tuple(found)

    def _steps(self, node: str) -> tuple[int, ...]:
        """Return Slurm's own processes of all steps on a node, which have its host name."""
        host, found = (Path("/proc") / str(self._daemons[node].pid) / "ns/uts").readlink(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_step = (folder / "comm").read_text() == "slurmstepd\n"
                if is_step and (folder / "ns/uts").readlink() == host:
                    found.append(int(folder.name))
        return tuple(found)

    def has_steps(self) -> bool:
        """Return whether anything of a job is left on the nodes, Slurm's own included."""
        running = [node for node in NODES if node in self._daemons]
        return bool(self.processes()) or any(map(self._steps, running))

    def jobs(self) -> str:
        states = "--states=PENDING,RUNNING,COMPLETING,SUSPENDED"
        return self.run("squeue", "--noheader", states, "--format=%i %T")

    def wait_ready(self) -> None:
        asked = ("sinfo", "--noheader", "--format=%T %D", "--partition=main")
        _wait_until(lambda: self.run(*asked, check=False).split() == ["idle", str(len(NODES))])
        if self._a_node_failed:
            # Slurm 22.05 may count the devices of a job whose node failed as in use for good; it
            # counts anew then.
            self.run("scontrol", "reconfigure")
            self._a_node_failed = False

    def left(self) -> tuple[str, tuple[int, ...]]:
        """Return the jobs and processes left; a job outlives its run, perhaps by many seconds."""
        deadline = time.monotonic() + 60
        while (left := (self.jobs(), self.processes())) != ("", ()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def clear(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", f"--user={os.geteuid()}", check=False, timeout_s=10)
            _wait_until(lambda: not self.jobs(), 15)
        _kill(self.processes())

    def stop(self) -> None:
        self.clear()
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def start_accounting(self, database_port: int) -> None:
        """Start the database and slurmdbd, before slurmctld, and let root charge one account."""
        data, database = self.folder / "database", self.folder / "database.socket"
        made = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root"]
        made += ["--skip-test-db", "--auth-root-authentication-method=normal"]
        subprocess.run(made, env=self.environ, capture_output=True, check=True)
        options = {
            "datadir": data,
            "socket": database,
            "pid-file": self.folder / "database.pid",
            "port": database_port,
            "init-file": _DATA / "database.sql",
            "bind-address": "127.0.0.1",
            "user": "root",
        }
        self.start("mariadbd", ["mariadbd", "--no-defaults", *_long(options)])
        _wait_until(database.exists)
        self.start("slurmdbd", ["slurmdbd", "-D"])
        add = ("sacctmgr", "-i", "add")
        _wait_until(lambda: "simulated" in self.run(*add, "cluster", "simulated", check=False))
        self.run(*add, "account", ACCOUNT, "cluster=simulated")
        self.run(*add, "user", "root", f"account={ACCOUNT}", check=False)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _long(options: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def _wait_until(ready: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Return once something is ready; Slurm is asked a few times a second."""
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextlib.contextmanager
def running_cluster(*, accounted: bool = False) -> Iterator[Cluster]:
    """Start Slurm in a folder whose path is short enough for a socket, and stop it; skip where it
    cannot run. If ``accounted``, it records jobs in a database, and charges accounts.
    """
    _skip_without(f"{_TOOLS} {_ACCOUNTING_TOOLS}" if accounted else _TOOLS)
    with tempfile.TemporaryDirectory(prefix="slurm.", dir="/tmp") as path:
        folder, conf = Path(path), Path(path) / "slurm.conf"
        (folder / "state").mkdir()
        folder.chmod(0o755)
        database_port = _configure(folder, accounted=accounted)
        key, munge = folder / "munge.key", folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        environ = {**os.environ, "SLURM_CONF": str(conf), "PATH": _PATH}
        cluster = Cluster(folder, environ)
        files = {"pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
        options = {name: folder / file for name, file in files.items()}
        options |= {"key-file": key, "socket": munge}
        try:
            cluster.start("munged", ["munged", "--foreground", "--force", *_long(options)])
            _wait_until(munge.exists)
            if accounted:
                cluster.start_accounting(database_port)
            cluster.start("slurmctld", ["slurmctld", "-D", "-c"])
            for node in NODES:
                cluster.start_node(node)
            cluster.wait_ready()
            yield cluster
        except BaseException:
            for log in (*folder.glob("*.log"), *folder.glob("*.out")):
                print(log.name, log.read_text(errors="replace")[-2000:])
            raise
        finally:
            cluster.stop()


def _configure(folder: Path, *, accounted: bool) -> int:
    """Write the files that Slurm reads, and return the port of the database."""
    port, accounting_port, database_port, *ports = _free_ports(3 + len(NODES))
    nodes = [
        f"NodeName={node} NodeHostname={node} {_NODE} Port={port}"
        for node, port in zip(NODES, ports, strict=True)
    ]
    values = {
        "host": socket.gethostname(),
        "port": port,
        # Ranks of several nodes meet at a port that follows from the job's number, and another
        # worker of pytest has a cluster on the same host.
        "first_job": 1 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
        "folder": folder,
        "nodes": "\n".join(nodes),
        "accounting_port": accounting_port,
        "database_port": database_port,
    }
    texts = {path.name: path.read_text() for path in _DATA.glob("*.conf")}
    accounting = texts.pop("accounting.conf").format_map(values)
    values["accounting"] = (
        accounting if accounted else "AccountingStorageType=accounting_storage/none"
    )
    for name, text in texts.items():
        (folder / name).write_text(text.format_map(values))
        (folder / name).chmod(0o600 if name == "slurmdbd.conf" else 0o644)
    shutil.copy(_DATA / "job_submit.lua", folder)
    return database_port


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
