"""``calibrate``: measure and store the rates that predictions of this machine's speed use."""

from __future__ import annotations

import argparse

from msgspec import Struct

from so_tui.commands.common import note, print_json, print_rich
from so_tui.plan.calibration import Calibration, calibration_of


class Measured(Struct, frozen=True):
    """What ``calibrate --json`` prints."""

    path: str
    calibration: Calibration | None


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine in helper processes and store the rates, which plans use from then on.

    Raises:
        Refused: A run uses a GPU (code ``gpu-in-use``).
    """
    from so_tui.launch.calibrating import measure_rates
    from so_tui.machine import inspect_machine

    machine = inspect_machine()
    rates, path = measure_rates(
        machine, lambda message: note(arguments, message, stderr=arguments.json)
    )
    if arguments.json:
        print_json(Measured(str(path), calibration_of(machine)))
    else:
        print_rich(
            f"measured in {rates.seconds:.0f} s and stored in {path}; plans of this machine use it"
        )
        if not machine.gpus:
            note(
                arguments,
                "This machine has no GPU, so only Adam's rate was measured. Steps on machines without GPUs are not predicted.",
            )
    return 0
