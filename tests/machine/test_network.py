"""Adapters of a cluster's network, as /sys shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from so_tui.machine.system_files import SystemFiles, read_network


def written(root: Path, files: dict[str, str]) -> SystemFiles:
    for name, content in files.items():
        path = root / "sys" / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return SystemFiles(root)


def infiniband(
    adapter: str, rate: str, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> dict[str, str]:
    folder = f"infiniband/{adapter}/ports/1"
    return {f"{folder}/rate": rate, f"{folder}/state": state, f"{folder}/link_layer": layer}


def test_infiniband_ports_that_are_up_add_up(tmp_path: Path) -> None:
    files = infiniband("mlx5_0", "200 Gb/sec (4X HDR)") | infiniband(
        "mlx5_1", "400 Gb/sec (4X NDR)"
    )
    files |= infiniband("mlx5_2", "400 Gb/sec (4X NDR)", "1: DOWN") | infiniband(
        "mlx5_3", "100 Gb/sec (4X EDR)", layer="Ethernet"
    )
    found = read_network(written(tmp_path, files))
    assert found is not None
    assert (found.gbit_per_s, found.source) == (600, "mlx5_0:1, mlx5_1:1")


def test_slingshot_adds_up_and_other_ethernet_not(tmp_path: Path) -> None:
    files = {f"net/hsn{index}/speed": "200000" for index in range(4)} | {
        "net/eth0/speed": "25000",
        "net/hsn4/speed": "-1",
    }
    found = read_network(written(tmp_path, files))
    assert found is not None
    assert (found.gbit_per_s, found.source) == (800, "hsn0, hsn1, hsn2, hsn3")


@pytest.mark.parametrize(
    "files",
    [{}, {"net/eth0/speed": "100000"}, {"net/hsn0/speed": "fast"}, infiniband("mlx5_0", "much")],
)
def test_a_host_without_such_adapters_has_no_network(files: dict[str, str], tmp_path: Path) -> None:
    assert read_network(written(tmp_path, files)) is None
