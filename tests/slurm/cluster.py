"""A real Slurm on one machine: munge, slurmctld and one slurmd for each node, all in one folder,
and gone afterwards.

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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm import accounting

TOOLS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "squeue",
    "scontrol",
    "scancel",
    "sinfo",
    "srun",
    "unshare",
)
NODES = ("n1", "n2")
_SYSTEM_PATH = "/usr/sbin:/sbin"
_READY_S = 120.0

# Rules of TACC Vista: options that its job_submit plugin refuses.
_RULES = """
function slurm_job_submit(job, partition, uid)
    if job.partition == "strict" and (job.tres_per_node or job.tres_per_task) then
        slurm.log_user("--gres and --gpus-per-task are not allowed here")
        return 2051
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partition, uid)
    return slurm.SUCCESS
end
"""

_NODE = "NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2 State=UNKNOWN"
_CONF = """
ClusterName=simulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
EnforcePartLimits=ALL
SlurmdParameters=config_overrides
SlurmdTimeout=8
KillWait=2
MinJobAge={min_job_age_s}
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
JobCompType=jobcomp/none
JobSubmitPlugins=lua
GresTypes=gpu
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=01:00:00 State=UP
PartitionName=strict Nodes=n1,n2 MaxTime=01:00:00 State=UP
"""


def missing() -> tuple[str, ...]:
    """Return why Slurm cannot be run here: the programs that are missing, or the right to name a
    host.
    """
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
    absent = tuple(tool for tool in TOOLS if shutil.which(tool, path=path) is None)
    if absent:
        return absent
    if os.geteuid() != 0:
        return ("the right of root to start slurmd",)
    named = subprocess.run(["unshare", "--uts", "hostname", "n1"], capture_output=True, check=False)
    return () if named.returncode == 0 else ("the right to make a UTS namespace",)


@dataclass
class Cluster:
    """A running Slurm. ``environ`` is what its commands need."""

    folder: Path
    environ: Mapping[str, str]
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _a_node_failed: bool = False

    def run(self, *argv: str, check: bool = True, timeout_s: float = 60) -> str:
        """Run a command of Slurm and return what it printed."""
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
        """Start a node's slurmd, unless it runs."""
        if node in self._daemons:
            return
        self.start(
            node, ["unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -D -N {node}"]
        )

    def stop_node(self, node: str) -> None:
        """Kill a node as when its power fails: its slurmd, every step before it can report, and the
        processes of its jobs.
        """
        self._a_node_failed = True
        for pid in self._steps(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons[node].kill()
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons.pop(node).wait()

    def processes(self, node: str | None = None) -> tuple[int, ...]:
        """Return the processes that jobs of this cluster started (on one node): their environment
        names the cluster's configuration.
        """
        wanted = {f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()} | (
            {f"SLURMD_NODENAME={node}".encode()} if node else set()
        )
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = set((folder / "environ").read_bytes().split(b"\0"))
                if wanted <= variables and any(
                    variable.startswith(b"SLURM_JOB_ID=") for variable in variables
                ):
                    found.append(int(folder.name))
        return tuple(found)

    def _steps(self, node: str) -> tuple[int, ...]:
        """Return Slurm's own processes of all steps on a node, which have its host name."""
        host, found = (Path("/proc") / str(self._daemons[node].pid) / "ns/uts").readlink(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "comm").read_text() == "slurmstepd\n" and (
                    folder / "ns/uts"
                ).readlink() == host:
                    found.append(int(folder.name))
        return tuple(found)

    def has_steps(self) -> bool:
        """Return whether anything of a job is left on the nodes that run, Slurm's own processes
        included.
        """
        return bool(self.processes()) or any(
            self._steps(node) for node in NODES if node in self._daemons
        )

    def jobs(self) -> str:
        return self.run(
            "squeue",
            "--noheader",
            "--states=PENDING,RUNNING,COMPLETING,SUSPENDED",
            "--format=%i %T",
        )

    def wait_ready(self) -> None:
        """Wait until both nodes take jobs."""
        deadline = time.monotonic() + _READY_S
        while self.run(
            "sinfo", "--noheader", "--format=%T %D", "--partition=main", check=False
        ).split() != ["idle", str(len(NODES))]:
            logs = "\n".join(
                f"{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.log")
            )
            assert time.monotonic() < deadline, (
                f"no two idle nodes: {self.run('sinfo', check=False)}\n{logs}"
            )
            time.sleep(0.2)
        if self._a_node_failed:
            # Slurm 22.05 may count the devices of a job whose node failed as in use for good; it
            # counts anew then.
            self.run("scontrol", "reconfigure")
            self._a_node_failed = False

    def left(self) -> tuple[str, tuple[int, ...]]:
        """Return the jobs and processes that there are. A job outlives the end of its run, on a
        busy machine by many seconds.
        """
        deadline = time.monotonic() + 60
        while (left := (self.jobs(), self.processes())) != ("", ()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def clear(self) -> None:
        """Cancel every job and end what is left of jobs."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", f"--user={os.geteuid()}", check=False, timeout_s=10)
            deadline = time.monotonic() + 15
            while self.jobs() and time.monotonic() < deadline:
                time.sleep(0.2)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Clear the queue and end the daemons."""
        self.clear()
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()


@contextlib.contextmanager
def running_cluster(
    folder: Path, *, min_job_age_s: int = 300, accounted: bool = False
) -> Iterator[Cluster]:
    """Start Slurm in a folder whose path is short enough for a socket, and stop it.

    Args:
        folder: An empty folder.
        min_job_age_s: How long slurmctld remembers a job that has ended.
        accounted: Record jobs in a database, and charge accounts.
    """
    *ports, accounting_port, database_port = _free_ports(3 + len(NODES))
    nodes = [
        f"NodeName={node} NodeHostname={node} {_NODE} Port={port}"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    conf = folder / "slurm.conf"
    values = {
        "host": socket.gethostname(),
        "port": ports[0],
        # Ranks of several nodes meet at a port that follows from the job's number, and another
        # worker of pytest has a cluster on the same host.
        "first_job": 1 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
        "folder": folder,
        "nodes": "\n".join(nodes),
        "min_job_age_s": min_job_age_s,
    }
    storage = (
        accounting.SLURM_CONF.format(folder=folder, port=accounting_port)
        if accounted
        else "AccountingStorageType=accounting_storage/none\n"
    )
    conf.write_text(_CONF.format(**values) + storage)
    (folder / "gres.conf").write_text(
        "AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
    )
    (folder / "job_submit.lua").write_text(_RULES)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    environ = {
        **os.environ,
        "SLURM_CONF": str(conf),
        "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}",
    }
    cluster = Cluster(folder, environ)
    try:
        files = {
            "key-file": key,
            "socket": folder / "munge.socket",
            "pid-file": folder / "munged.pid",
            "log-file": folder / "munged.log",
        }
        options = [
            f"--{name}={path}"
            for name, path in {**files, "seed-file": folder / "munged.seed"}.items()
        ]
        cluster.start("munged", ["munged", "--foreground", "--force", *options])
        deadline = time.monotonic() + _READY_S
        while not (folder / "munge.socket").exists():
            assert time.monotonic() < deadline, "munged did not start"
            time.sleep(0.05)
        if accounted:
            accounting.start_accounting(cluster, accounting_port, database_port)
        cluster.start("slurmctld", ["slurmctld", "-D", "-c"])
        for node in NODES:
            cluster.start_node(node)
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
