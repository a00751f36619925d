"""Quantities in words."""

from __future__ import annotations


def thousands(value: int) -> str:
    """``131072`` -> ``131 072``."""
    return f"{value:,}".replace(",", " ")


def disk_size(size_bytes: int) -> str:
    """Space in decimal units, as disks are sold: ``206.7 GB``, ``31.4 MB``; never ``0.0`` of a unit for what is not nothing."""
    for unit_bytes, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= unit_bytes // 10:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"
