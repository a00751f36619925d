"""Train on two simulated nodes of this host and on one node with two ranks, and compare the losses.

    PYTHONPATH=.:trainer python benchmarks/two_nodes.py --accelerator cuda [--preset tiny] [--steps
        30]

Each node has a launcher of its own, as in a job of Slurm, and with CUDA one GPU. NCCL is told that
the nodes are different hosts, so that it uses its network. Prints one JSON line: the losses of
both, their largest relative difference, and the network that NCCL named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from so_tui.launch import command
from so_tui.launch.launch import prepare, visible_machine, write_launch
from so_tui.launch.supervisor.host import (
    ALONE,
    Nodes,
    hostfile,
    init_method,
    make_rendezvous,
    node_values,
    numbered,
)
from so_tui.launch.supervisor.host_check import lock_folder
from so_tui.machine import inspect_machine
from so_tui.machine.software import make_code_folders
from so_tui.machine.types import Machine
from so_tui.plan.plan import Launch
from so_tui.runs import RunDirectory, create_run, new_attempt
from so_tui.runs.directory import known_id
from so_tui.runs.metrics import MetricsReader
from so_tui.spec import RunSpec, find_preset, with_values

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "trainer")]


RANKS = 2
TIMEOUT_S = 1800.0
TOLERANCE = 1e-5
"""Of float32 sums whose order is the same: what two runs on the same ranks differ by at most."""


def main() -> int:
    """Train both, print the comparison, and return 1 if the losses differ."""
    given = _parser().parse_args()
    machine = inspect_machine()
    if given.accelerator == "cpu":
        machine = msgspec.structs.replace(machine, gpus=())
    elif len(machine.gpus) < RANKS:
        sys.exit(f"{machine.label} has {len(machine.gpus)} GPUs, and two nodes need one each")
    changes = {
        "train.steps": str(given.steps),
        "train.deterministic": "true",
        "checkpoint.at_end": "false",
    }
    changes |= {"offload.mode": "superoffload"}
    spec = with_values(find_preset(given.preset).spec, changes)
    with tempfile.TemporaryDirectory(prefix="two-nodes.") as folder:
        one = train(with_values(spec, {"gpus": str(RANKS)}), [machine], Path(folder))
        gpus = [gpu.index for gpu in machine.gpus[:RANKS]]
        hosts = [
            visible_machine(machine, {"CUDA_VISIBLE_DEVICES": str(index)}) for index in gpus
        ] or RANKS * [machine]
        two = train(with_values(spec, {"gpus": "1", "nodes": str(RANKS)}), hosts, Path(folder))
        losses = {"one_node": _losses(one), "two_nodes": _losses(two)}
        networks = sorted(
            {
                name
                for path in two.logs(1).values()
                for name in re.findall(r"Using network (\S+)", path.read_text())
            }
        )
    pairs = list(zip(losses["one_node"], losses["two_nodes"], strict=True))
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    device = machine.gpus[0].name if machine.gpus else "cpu"
    print(
        json.dumps(
            {
                "device": device,
                **vars(given),
                **losses,
                "largest_relative_difference": difference,
                "networks": networks,
            }
        )
    )
    return int(difference > TOLERANCE)


def train(spec: RunSpec, hosts: list[Machine], folder: Path) -> RunDirectory:
    """Train to the end on nodes that this host simulates, given the part of it that each one has.

    Raises:
        RuntimeError: A launcher failed; its log is the message.
    """
    run = create_run(spec, folder)
    attempt, port, launchers = new_attempt(run), _free_port(), []
    for node, host in enumerate(hosts):
        nodes = (
            ALONE
            if len(hosts) == 1
            else Nodes(node=node, count=len(hosts), address="127.0.0.1", port=port)
        )
        launch = prepare(spec, host)
        launch = msgspec.structs.replace(
            launch,
            plan=msgspec.structs.replace(launch.plan, binding=numbered(launch.plan.binding, node)),
        )
        digest = write_launch(run, attempt, launch, node)
        launchers.append(_start(run, attempt, nodes, launch, digest))
    failed = [launcher.wait(TIMEOUT_S) for launcher in launchers]
    if any(failed):
        raise RuntimeError(
            "\n".join(path.read_text()[-4000:] for path in run.logs(attempt).values())
        )
    return run


def _start(
    run: RunDirectory, attempt: int, nodes: Nodes, launch: Launch, digest: str
) -> subprocess.Popen[bytes]:
    if nodes.count == 1:
        meeting, others = init_method(make_rendezvous(lock_folder(), run.path, attempt)), {}
    else:
        listed = run.hostfile_path(attempt, nodes.node)
        listed.write_text(hostfile(nodes, launch.plan))
        meeting, others = nodes.init_method, node_values(nodes, launch.plan, str(listed))
    here = launch.resolved(
        {
            **others,
            "{RUN}": str(run.path),
            "{RUN_ID}": known_id(run),
            "{LAUNCH}": digest,
            "{ATTEMPT}": str(attempt),
            "{RENDEZVOUS}": meeting,
        }
    )
    simulated = {
        "NCCL_HOSTID": f"node{nodes.node}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    variables = command.apply(here.environment, os.environ) | (simulated if nodes.count > 1 else {})
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    variables |= make_code_folders(variables)
    with run.log_path(attempt, f"node{nodes.node}").open("wb") as log:
        return subprocess.Popen(
            here.argv, env=variables, cwd=run.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _losses(run: RunDirectory) -> list[float]:
    reader = MetricsReader(run)
    while reader.poll(limit_records=10_000, limit_s=1.0).more:
        continue
    return [record.loss for record in reader.recent(100_000)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    return parser


if __name__ == "__main__":
    sys.exit(main())
