"""Read the adapters of the network that joins the nodes of a cluster: InfiniBand, and the high-speed interfaces of Slingshot."""

from __future__ import annotations

import re
from collections.abc import Iterator

from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import Network

_INFINIBAND = "/sys/class/infiniband"
_INTERFACES = "/sys/class/net"
_RATE = re.compile(r"(\d{1,5}(?:\.\d+)?) Gb/sec")
_SLINGSHOT = re.compile(r"hsn\d+")


def read_network(files: SystemFiles) -> Network | None:
    """Return the adapters whose link is up, as far as they belong to a cluster's network; None if there are none.

    Ethernet is left out: that it would be used cannot be seen.
    """
    found = dict(_infiniband(files)) or dict(_slingshot(files))
    return Network(gbit_per_s=sum(found.values()), source=", ".join(found)) if found else None


def _infiniband(files: SystemFiles) -> Iterator[tuple[str, float]]:
    for adapter in files.names(_INFINIBAND):
        for port in files.names(f"{_INFINIBAND}/{adapter}/ports"):
            folder = f"{_INFINIBAND}/{adapter}/ports/{port}"
            rate = _RATE.match(files.text(f"{folder}/rate") or "")
            if (
                rate
                and "ACTIVE" in (files.text(f"{folder}/state") or "")
                and files.text(f"{folder}/link_layer") == "InfiniBand"
            ):
                yield f"{adapter}:{port}", float(rate[1])


def _slingshot(files: SystemFiles) -> Iterator[tuple[str, float]]:
    for name in files.names(_INTERFACES):
        mbit_per_s = (
            files.integer(f"{_INTERFACES}/{name}/speed") if _SLINGSHOT.fullmatch(name) else None
        )
        if mbit_per_s is not None and mbit_per_s > 0:  # -1 where the link is down
            yield name, mbit_per_s / 1000
