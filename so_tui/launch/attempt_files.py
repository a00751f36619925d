"""The files in an attempt's folder from which its supervisor starts: written once from a launch, and read back as the same launch."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from msgspec import Struct

from so_tui.launch.environment import Variable
from so_tui.launch.preparation import Launch
from so_tui.machine.types import Machine
from so_tui.plan.types import Plan
from so_tui.runs.directory import RunDirectory
from so_tui.runs.files import write_run_file
from so_tui.trust.decoding import decode_json
from so_tui.trust.ownership import read_own

SCHEMA = 1


class _Start(Struct, frozen=True, kw_only=True):
    """``launch.json``: what the other files of the attempt do not hold."""

    v: int = SCHEMA
    argv: tuple[str, ...] = ()
    environment: tuple[Variable, ...] = ()
    forced: bool = False
    changes: dict[str, str] = {}
    start_over: bool = False
    assume_dead: bool = False
    checks_s: float | None = None


def write_launch(run: RunDirectory, attempt: int, launch: Launch) -> None:
    """Write ``machine.<host>.json``, ``plan.json``, ``ds_config.json`` and ``launch.json``.

    Raises:
        OSError: The run directory cannot be written.
    """
    start = _Start(
        argv=launch.argv,
        environment=launch.environment,
        forced=launch.forced,
        changes=launch.changes,
        start_over=launch.start_over,
        assume_dead=launch.assume_dead,
        checks_s=launch.checks_s,
    )
    write_run_file(
        run, run.machine_path(attempt, launch.machine.hostname), indented(launch.machine)
    )
    write_run_file(run, run.plan_path(attempt), indented(launch.plan))
    write_run_file(run, run.ds_config_path(attempt), indented(launch.ds_config))
    write_run_file(run, run.launch_path(attempt), indented(start))


def write_node_launch(run: RunDirectory, attempt: int, node: int, launch: Launch) -> None:
    """Write what another node than the first adds: its ``machine.<host>.json``, and the plan that its ranks read. Raises OSError."""
    write_run_file(
        run, run.machine_path(attempt, launch.machine.hostname), indented(launch.machine)
    )
    write_run_file(run, run.plan_path(attempt, node), indented(launch.plan))


def read_launch(run: RunDirectory, attempt: int, host: str) -> Launch:
    """Read the launch of an attempt. Attempts of older versions have no ``launch.json``: their ``argv`` is empty.

    Raises:
        NotOwnError: A file is not this user's own. What it says would be executed.
        OSError: A file is missing or cannot be read.
        msgspec.DecodeError: A file is damaged.
    """
    start = _Start()
    with contextlib.suppress(FileNotFoundError):
        start = decode_json(read_own(run.launch_path(attempt)), _Start)
    return Launch(
        plan=decode_json(read_own(run.plan_path(attempt)), Plan),
        machine=decode_json(read_own(run.machine_path(attempt, host)), Machine),
        ds_config=_ds_config(run, attempt),
        argv=start.argv,
        environment=start.environment,
        forced=start.forced,
        changes=start.changes,
        start_over=start.start_over,
        assume_dead=start.assume_dead,
        checks_s=start.checks_s,
    )


def indented(value: object) -> bytes:
    """Encode a value as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def _ds_config(run: RunDirectory, attempt: int) -> dict[str, Any]:
    return decode_json(read_own(run.ds_config_path(attempt)), dict[str, Any])
