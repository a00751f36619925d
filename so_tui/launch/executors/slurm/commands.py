"""Slurm's commands, called with argument lists and a time limit, and their output parsed. The formats are those of 22.05 to 25.05."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache

import msgspec

from so_tui.launch.executors.slurm.job import Job, word
from so_tui.launch.executors.slurm.queue_json import FIRST_VERSION, parse_queue_json
from so_tui.machine.types import version_numbers
from so_tui.spec import SoTuiError
from so_tui.trust.printable import brief_line, brief_message, quoted

_LOG = logging.getLogger(__name__)
TIMEOUT_S = 20.0
_AGAIN_S = 60.0
_SUBMITTED = re.compile(r"([0-9]{1,12})(;.*)?")
"""The number of the job, and the cluster if there are several."""
_PREFIX = re.compile(r"^s[a-z]+: (error|fatal): ")
"""What Slurm's commands write before each line of an error."""
_QUEUE = "%i|%T|%r|%S|%N|%Z"
_ACCOUNTING = "JobIDRaw,State,Reason,Start,NodeList,WorkDir"
_CONNECTION = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables that say how Slurm is reached."""
_OPTIONS = ("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SLURM_", "SLURMD_", "SRUN_")
"""What other variables begin with that Slurm's commands read as options, or that Slurm set for the job which submits a successor."""


class SlurmError(SoTuiError):
    """A command of Slurm is missing, failed, or did not answer in time."""


class RefusedError(SlurmError):
    """Slurm refused what a command asked for.

    Attributes:
        lines: Why, in Slurm's words and those of the site's own rules.
    """

    def __init__(self, command: str, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        super().__init__(f"{command} refused: {brief_message('. '.join(lines))}")


def submit(script: str, folder: str, environment: Mapping[str, str]) -> str:
    """Submit a batch script from a folder and return the job's id.

    Raises:
        SlurmError: Slurm refused it, in Slurm's own words, or did not say which job it made.
    """
    printed = _call(("sbatch", "--parsable", f"--chdir={folder}", script), environment)
    last = printed.strip().rpartition("\n")[2]  # sites print greetings before it
    if (found := _SUBMITTED.fullmatch(last)) is None:
        raise SlurmError(f"sbatch did not say which job it made: {brief_line(last)}")
    return found[1]


def own_jobs() -> tuple[Job, ...]:
    """Return this user's jobs that wait, run, or have ended a moment ago. Raises SlurmError."""
    asked = ("squeue", f"--user={os.geteuid()}", "--states=all")
    if version() >= FIRST_VERSION:
        try:
            return parse_queue_json(_call((*asked, "--json")))
        except RefusedError as error:
            if not any(
                "json" in line.lower() for line in error.lines
            ):  # otherwise the site has left that plugin out
                raise
        except msgspec.DecodeError as error:
            _LOG.warning("squeue --json is of another form: %s", error)
    return parse_queue(_call((*asked, "--noheader", f"--format={_QUEUE}")))


@cache
def version() -> tuple[int, ...]:
    """Return the version of Slurm's commands on this host; empty if they do not say it."""
    try:
        return version_numbers(_call(("squeue", "--version")).strip().rpartition(" ")[2])
    except SlurmError:
        return ()


def accounted(job_id: str) -> Job | None:
    """Return a job as the accounting database recorded it; None without one."""
    try:
        printed = _call(
            (
                "sacct",
                f"--jobs={job_id}",
                "--allocations",
                "--noheader",
                "--parsable2",
                f"--format={_ACCOUNTING}",
            )
        )
    except (
        SlurmError
    ):  # most sites have it; without it the queue's own memory of some minutes must do
        return None
    return next((job for job in parse_queue(printed) if job.id == job_id), None)


def cancel(job_id: str) -> None:
    """Cancel a job. Raises SlurmError."""
    _call(("scancel", job_id))


def requeue(job_id: str) -> None:
    """End a job, and put it back into the queue. Raises SlurmError."""
    _call(("scontrol", "requeue", job_id))


class ClusterName:
    """The name of the cluster that commands of this host speak to. Once known it is not asked for again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name = ""
        self._again_at = clock()
        self._error = SlurmError("Slurm does not say which cluster this is")

    def get(self) -> str:
        """Return the name. Raises SlurmError; Slurm is asked again after a minute."""
        if not self._name and self._clock() >= self._again_at:
            try:
                lines = _call(("scontrol", "show", "config")).splitlines()
                self._name = next(
                    (
                        line.partition("=")[2].strip()
                        for line in lines
                        if line.startswith("ClusterName")
                    ),
                    "",
                )
            except SlurmError as error:
                self._error = error
            self._again_at = self._clock() + _AGAIN_S
        if not self._name:
            raise self._error
        return self._name


CLUSTER = ClusterName()


def cluster_name() -> str:
    """Return the name of this host's cluster; see ``ClusterName.get``."""
    return CLUSTER.get()


def sinfo(layout: str) -> str:
    """Return what ``sinfo`` prints of the partitions that this user can see, without a header. Raises SlurmError."""
    return _call(("sinfo", "--noheader", f"--format={layout}"))


def parse_queue(printed: str) -> tuple[Job, ...]:
    """Parse lines of ``squeue`` or ``sacct``; a line of another form is left out."""
    rows = (line.strip().split("|", 5) for line in printed.splitlines())
    return tuple(
        Job(
            id=row[0],
            state=row[1].partition(" ")[0],
            reason=word(row[2]),
            start=_seconds(row[3]),
            nodes=word(row[4]),
            folder=row[5],
        )
        for row in rows
        if len(row) == 6 and row[0].isascii() and row[0].isdigit()
    )


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(
            text
        ).timestamp()  # in the time zone of this host, as Slurm prints it
    except (ValueError, OverflowError):
        return None


def _call(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    given = os.environ if environment is None else environment
    env = {
        name: value
        for name, value in given.items()
        if name in _CONNECTION or not name.startswith(_OPTIONS)
    }
    env |= {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"}
    _LOG.info("calling %s", quoted(*argv))
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{argv[0]} is not installed here. Runs are submitted from a login node of the cluster"
        ) from None
    except OSError as error:
        raise SlurmError(f"{argv[0]} cannot be executed: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{argv[0]} did not answer within {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = [_PREFIX.sub("", line).strip() for line in done.stderr.splitlines() if line.strip()]
        raise RefusedError(argv[0], lines or [f"exit code {done.returncode}"])
    return done.stdout
