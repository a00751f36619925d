"""The network between the hosts of a run: how fast ZeRO-3's collectives can be that every host takes part in.

Such a collective passes through all ranks as in a ring: each byte enters and leaves every host once, and every rank once. The slower of the
two links, between hosts and within one, sets its rate.
"""

from __future__ import annotations

from so_tui.machine.types import Network

LINE_RATE_SHARE = 0.9
"""What collectives of many megabytes reach of the adapters' line rate. Not measured: published figures are between 0.8 and 0.95."""
ASSUMED_GBIT_PER_S = 200
"""Of each GPU where nothing is known of the network: what Alps, Isambard-AI, JUPITER and DeltaAI have, and half of what Vista has."""
_BYTES_PER_GBIT = 1e9 / 8


def assumed_network(gpus: int) -> Network:
    """Return the network that is assumed for a host with this many GPUs."""
    return Network(gbit_per_s=float(ASSUMED_GBIT_PER_S * max(1, gpus)), source="")


def between_hosts_bytes_per_s(network: Network, share: float) -> float:
    """Return how fast a collective enters and leaves each host.

    Args:
        network: Of each host.
        share: Of the host's GPUs that take part. Adapters belong to GPUs, so the others' stay unused.
    """
    reached = 1.0 if network.measured else LINE_RATE_SHARE
    return network.gbit_per_s * _BYTES_PER_GBIT * reached * share


def measured_network(bytes_per_s: float, share: float, source: str) -> Network:
    """Return the network of a host whose collectives were measured; the inverse of ``between_hosts_bytes_per_s``."""
    return Network(
        gbit_per_s=float(f"{bytes_per_s / _BYTES_PER_GBIT / share:.3g}"),
        source=source,
        measured=True,
    )
