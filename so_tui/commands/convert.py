"""``convert``: checkpoints from and to DeepSpeed."""

from __future__ import annotations

import argparse
from pathlib import Path

from so_tui.commands.common import chosen_spec, note
from so_tui.runs import find_run
from so_tui.trust.printable import printable_line, so_tui_command


def convert(arguments: argparse.Namespace) -> int:
    """Write a run's last checkpoint for DeepSpeed, or make a run that continues from DeepSpeed's, and say how to go on.

    Raises:
        InputError: There is no such run or checkpoint, or the target holds something else.
    """
    from so_tui.launch import writable
    from so_tui.launch.converting import from_deepspeed, to_deepspeed

    def tell(message: str) -> None:
        note(arguments, message)

    if arguments.to:
        run = find_run(arguments.source, arguments.runs_dir)
        writable(Path(arguments.to), "--to")
        to_deepspeed(run, Path(arguments.to), tell)
        print(printable_line(f"wrote {arguments.to}"))
        return 0
    made = from_deepspeed(Path(arguments.source), chosen_spec(arguments), arguments.runs_dir, tell)
    print(
        printable_line(f"made {made.name}; continue with `{so_tui_command('resume', made.name)}`")
    )
    return 0
