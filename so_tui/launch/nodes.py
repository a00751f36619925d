"""The nodes of a run as one of them sees them: its number, and where the ranks of all nodes meet.

A node is a host here and wherever a run's nodes have numbers, as schedulers call it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from so_tui.launch.placeholders import Placeholder
from so_tui.plan.types import Plan, RankBinding

_FIRST_PORT, _PORTS = 12_000, 16_000
"""Ports of rendezvous: below those that Linux gives to connections."""


class Nodes(Struct, frozen=True, kw_only=True):
    """One node among those of a run."""

    node: int = 0
    """This node's number, from 0."""
    count: int = 1
    address: str = ""
    """Of the first node; empty where there is only one."""
    port: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the node of rank 0, whose supervisor writes the run's state."""
        return self.node == 0

    @property
    def init_method(self) -> str:
        """Where the ranks meet, as torch's ``init_process_group`` takes it."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


ALONE = Nodes()
"""The only node of a run."""


def nodes_of_job(environ: Mapping[str, str]) -> Nodes:
    """Return what Slurm says of the nodes of the step that this process belongs to."""
    count = int(environ.get("SLURM_NNODES") or 1)
    if count == 1:
        return ALONE
    return Nodes(
        node=int(environ["SLURM_NODEID"]),
        count=count,
        address=environ[
            "SLURM_LAUNCH_NODE_IPADDR"
        ],  # srun runs in the batch script, on the first node
        port=_FIRST_PORT + int(environ["SLURM_JOB_ID"]) % _PORTS,  # two jobs may share a node
    )


def numbered(binding: tuple[RankBinding, ...], node: int) -> tuple[RankBinding, ...]:
    """Return a host's bindings with the numbers that its ranks have among those of all nodes."""
    return tuple(
        msgspec.structs.replace(rank, rank=rank.rank + node * len(binding)) for rank in binding
    )


def hostfile(nodes: Nodes, plan: Plan) -> str:
    """Return a file of nodes for DeepSpeed's launcher. Without ssh their names mean nothing, and only this node's slots are GPUs."""
    return "".join(
        f"{_name(node)} slots={1 + max(_devices(nodes, plan, node))}\n"
        for node in range(nodes.count)
    )


def node_values(nodes: Nodes, plan: Plan, hostfile: str) -> dict[Placeholder, str]:
    """Return the values of the placeholders that only a run on several nodes has.

    Args:
        nodes: The nodes.
        plan: This node's plan.
        hostfile: The path of its file of nodes.
    """
    devices = (
        f"{_name(node)}:{','.join(map(str, _devices(nodes, plan, node)))}"
        for node in range(nodes.count)
    )
    return {
        Placeholder.NODE: str(nodes.node),
        Placeholder.ADDRESS: nodes.address,
        Placeholder.PORT: str(nodes.port),
        Placeholder.HOSTFILE: hostfile,
        Placeholder.DEVICES: "@".join(devices),
    }


def _name(node: int) -> str:
    return f"node{node}"


def _devices(nodes: Nodes, plan: Plan, node: int) -> list[int]:
    """Return the GPUs of a node, or the numbers of its ranks without GPUs; of other nodes only how many there are is known."""
    gpus = [rank.gpu for rank in plan.binding if rank.gpu is not None]
    return gpus if gpus and node == nodes.node else list(range(len(plan.binding)))
