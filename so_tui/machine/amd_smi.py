"""Names of AMD's GPUs by AMD's own tool, where it is installed; sysfs has none.

``amd-smi static --json`` prints a list with an object for each GPU, newer versions within ``gpu_data``. ``N/A`` stands for any value or
object that there is not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from so_tui.machine.software import output_of
from so_tui.trust.decoding import decode_json


def names_by_amd_smi() -> dict[str, str]:
    """Return product names by bus id; empty where the tool is not installed or fails."""
    return names_in(output_of("amd-smi", "static", "--asic", "--bus", "--json") or "")


def names_in(output: str) -> dict[str, str]:
    """Return the product names in the tool's output, by bus id as sysfs writes it. What is not of that form is left out."""
    try:
        content: Any = decode_json(output.encode(), object)
    except msgspec.DecodeError:
        return {}
    listed = content.get("gpu_data") if isinstance(content, dict) else content
    found = {}
    for gpu in listed if isinstance(listed, list) else ():
        bus_id, name = _text(gpu, "bus", "bdf"), _text(gpu, "asic", "market_name")
        if bus_id and name:
            found[bus_id.lower()] = name
    return found


def _text(value: Any, *keys: str) -> str | None:
    """Return the text at these keys; None where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) and value not in ("", "N/A") else None
