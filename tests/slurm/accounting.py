"""Accounting for a simulated cluster: MariaDB and slurmdbd, in the cluster's folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.slurm.cluster import Cluster

TOOLS = ("mariadb-install-db", "mariadbd", "slurmdbd", "sacctmgr", "sacct")
ACCOUNT = "project"
"""The account that may be charged."""
_READY_S = 120.0
_DATABASE = """
CREATE DATABASE slurm_acct_db;
CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'simulated';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
"""
_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=simulated
StorageLoc=slurm_acct_db
"""
SLURM_CONF = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits
"""


def missing() -> tuple[str, ...]:
    """Return the programs that are missing."""
    return tuple(
        tool
        for tool in TOOLS
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None
    )


def start_accounting(cluster: Cluster, port: int, database_port: int) -> None:
    """Start the database and slurmdbd, before slurmctld, and let root charge one account."""
    folder, data = cluster.folder, cluster.folder / "database"
    made = [
        "mariadb-install-db",
        "--no-defaults",
        f"--datadir={data}",
        "--user=root",
        "--skip-test-db",
    ]
    subprocess.run(
        [*made, "--auth-root-authentication-method=normal"],
        env=cluster.environ,
        capture_output=True,
        check=True,
    )
    (folder / "database.sql").write_text(
        "".join(f"{line}\n" for line in _DATABASE.strip().splitlines())
    )
    options = {
        "datadir": data,
        "socket": folder / "database.socket",
        "pid-file": folder / "database.pid",
        "port": database_port,
    }
    options |= {"init-file": folder / "database.sql", "bind-address": "127.0.0.1", "user": "root"}
    cluster.start(
        "mariadbd",
        ["mariadbd", "--no-defaults", *(f"--{name}={value}" for name, value in options.items())],
    )
    _wait(cluster, lambda: (folder / "database.socket").exists())
    conf = folder / "slurmdbd.conf"
    conf.write_text(_CONF.format(folder=folder, port=port, database_port=database_port))
    conf.chmod(0o600)
    cluster.start("slurmdbd", ["slurmdbd", "-D"])
    _wait(
        cluster,
        lambda: (
            "simulated"
            in cluster.run("sacctmgr", "-i", "add", "cluster", "simulated", check=False).lower()
        ),
    )
    cluster.run("sacctmgr", "-i", "add", "account", ACCOUNT, "cluster=simulated")
    cluster.run("sacctmgr", "-i", "add", "user", "root", f"account={ACCOUNT}", check=False)


def _wait(cluster: Cluster, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _READY_S
    while not ready():
        logs = "\n".join(
            f"{log.name}: {log.read_text(errors='replace')[-2000:]}"
            for log in cluster.folder.glob("*.out")
        )
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
