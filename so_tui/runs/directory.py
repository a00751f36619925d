"""Paths of all files of a run. A RunDirectory may be created for a folder that does not exist yet.

RUN/ run.json  spec.json  state.json  notes.json  answers.json
     attempts/001/ machine.<host>.json plan.json ds_config.json launch.json command.json output.<host>.log
                   node1.json plan.node1.json command.node1.json ... of the other nodes of a run on several
     metrics/  samples.<host>/  control/  checkpoints/
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from so_tui.trust.sharing import is_shared, make_run_folder

_SAMPLES = "samples."
_OUTPUT = "output."
_LOG = ".log"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run; reads nothing but folder listings."""

    path: Path

    def __init__(self, path: Path | str) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def manifest_path(self) -> Path:
        return self.path / "run.json"

    @property
    def spec_path(self) -> Path:
        return self.path / "spec.json"

    @property
    def state_path(self) -> Path:
        return self.path / "state.json"

    @property
    def notes_path(self) -> Path:
        """The owner's note and tags."""
        return self.path / "notes.json"

    @property
    def answers_path(self) -> Path:
        """What the model answered to the prompts of the spec."""
        return self.path / "answers.json"

    @property
    def supervisor_lock_path(self) -> Path:
        """Locked (flock) by the supervisor, so that there is only one."""
        return self.path / "supervisor.lock"

    @property
    def metrics_dir(self) -> Path:
        return self.path / "metrics"

    @property
    def control_dir(self) -> Path:
        return self.path / "control"

    @property
    def checkpoints_dir(self) -> Path:
        """Default folder of checkpoints; ``spec.checkpoint.folder`` overrides it."""
        return self.path / "checkpoints"

    @property
    def attempts_dir(self) -> Path:
        return self.path / "attempts"

    def samples_dir(self, host: str) -> Path:
        return self.path / f"{_SAMPLES}{_in_name(host)}"

    def attempt_dir(self, attempt: int) -> Path:
        return self.attempts_dir / f"{attempt:03d}"

    def plan_path(self, attempt: int, node: int = 0) -> Path:
        return self.attempt_dir(attempt) / f"plan{_of_node(node)}.json"

    def ds_config_path(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "ds_config.json"

    def launch_path(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "launch.json"

    def starter_path(self, attempt: int) -> Path:
        """What the token that starts the attempt is checked against."""
        return self.attempt_dir(attempt) / "starter.json"

    def submission_path(self, attempt: int) -> Path:
        """What a scheduler was given, if the attempt was submitted to one."""
        return self.attempt_dir(attempt) / "submission.json"

    def restart_path(self, attempt: int, count: int) -> Path:
        """Which attempt the job of this one makes when the scheduler starts it for the ``count``-th time again."""
        return self.attempt_dir(attempt) / f"restart.{count}.json"

    def job_script_path(self, attempt: int) -> Path:
        return self.attempt_dir(attempt) / "job.sh"

    def command_path(self, attempt: int, node: int = 0) -> Path:
        return self.attempt_dir(attempt) / f"command{_of_node(node)}.json"

    def node_path(self, attempt: int, node: int) -> Path:
        """The state of another node than the first, which its supervisor writes."""
        return self.attempt_dir(attempt) / f"node{node}.json"

    def network_path(self, attempt: int) -> Path:
        """How fast the network between the nodes was, as the ranks measured it."""
        return self.attempt_dir(attempt) / "network.json"

    def hostfile_path(self, attempt: int, node: int) -> Path:
        """The list of nodes that DeepSpeed's launcher reads on a node."""
        return self.attempt_dir(attempt) / f"hostfile.node{node}"

    def machine_path(self, attempt: int, host: str) -> Path:
        return self.attempt_dir(attempt) / f"machine.{_in_name(host)}.json"

    def log_path(self, attempt: int, host: str) -> Path:
        return self.attempt_dir(attempt) / f"{_OUTPUT}{_in_name(host)}{_LOG}"

    def attempts(self) -> tuple[int, ...]:
        """Return the numbers of all attempts, ascending."""
        return attempts_in(_names(self.attempts_dir))

    def logs(self, attempt: int) -> dict[str, Path]:
        """Return the logs of an attempt by host."""
        folder = self.attempt_dir(attempt)
        return logs_in(folder, _names(folder))

    def sample_hosts(self) -> tuple[str, ...]:
        """Return the hosts that wrote samples."""
        return tuple(
            name.removeprefix(_SAMPLES) for name in _names(self.path) if name.startswith(_SAMPLES)
        )


def attempts_in(names: Iterable[str]) -> tuple[int, ...]:
    """Return the attempts that ``names`` in the folder of attempts stand for, ascending."""
    return tuple(sorted(int(name) for name in names if name.isascii() and name.isdigit()))


def logs_in(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the logs among the ``names`` in the folder of an attempt, by host."""
    return {
        name.removeprefix(_OUTPUT).removesuffix(_LOG): folder / name
        for name in names
        if name.startswith(_OUTPUT) and name.endswith(_LOG)
    }


def new_attempt(run: RunDirectory) -> int:
    """Create the folder of the next attempt and return its number. No other process gets the same. Raises OSError."""
    attempt = max(run.attempts(), default=0) + 1
    shared = is_shared(run.path)
    with contextlib.suppress(FileExistsError):
        make_run_folder(run.attempts_dir, shared=shared)
    while True:
        try:
            make_run_folder(run.attempt_dir(attempt), shared=shared)
            return attempt
        except FileExistsError:
            attempt += 1


def deleted(run: RunDirectory) -> bool:
    """Return whether the folder contains no run any more. A folder that is only unreachable is not deleted."""
    try:
        run.spec_path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - polled once a second; a Path for each name is too slow
    except (FileNotFoundError, NotADirectoryError):
        return []


def _of_node(node: int) -> str:
    """Return what distinguishes the file of another node than the first."""
    return f".node{node}" if node else ""


def _in_name(host: str) -> str:
    """Return a host's name as part of a file's name. A state that somebody else wrote may contain a path instead."""
    return host.replace("/", "_").replace("\0", "_")
