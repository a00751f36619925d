"""Print the keys of presets and the machines for completion:
``python -m so_tui.commands.words > so_tui/commands/words.json``.
"""

from __future__ import annotations

import json

from so_tui.machine.known import MACHINES
from so_tui.spec.keys import field_index


def _words() -> str:
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
    print(_words(), end="")
