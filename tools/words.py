"""Write the keys of presets and the machines for completion, ``so_tui/commands/words.json``.

python tools/words.py
"""

from __future__ import annotations

import json
from pathlib import Path

from so_tui.machine.known import MACHINES
from so_tui.spec.keys import field_index

FILE = Path(__file__).parents[1] / "so_tui" / "commands" / "words.json"


def words() -> str:
    """Return ``words.json``."""
    keys = {
        info.path: {
            "description": info.description,
            "values": (("true", "false") if info.type_name == "boolean" else info.choices),
        }
        for info in field_index().values()
        if info.type_name != "table"
    }
    machines = {name: machine.title for name, machine in MACHINES.items()}
    return json.dumps({"keys": keys, "machines": machines}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(words(), encoding="utf-8")
