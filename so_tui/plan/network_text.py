"""How fast the network between hosts is, and who says so, in words."""

from __future__ import annotations

from so_tui.machine.types import Machine, Network
from so_tui.plan.network import assumed_network


def network_text(machine: Machine) -> str:
    """Return how fast a host's network is, for the head of a plan."""
    return f"network of {network_rate_text(machine.network or assumed_network(len(machine.gpus)))} each"


def network_rate_text(network: Network) -> str:
    """Return ``200 Gb/s (measured by ...)``."""
    return f"{network.gbit_per_s:g} Gb/s ({network.source or 'assumed: 200 for each GPU'})"
