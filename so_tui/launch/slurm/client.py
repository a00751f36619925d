"""Slurm's commands, called with argument lists and a time limit, and their output parsed. The
formats are those of 22.05 to 25.05.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from itertools import chain
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from so_tui.folders import Environment, cache_home
from so_tui.launch.launch import Job
from so_tui.spec import InputError, RunSpec, SoTuiError
from so_tui.spec.check import write_atomic
from so_tui.spec.errors import nearest, reject
from so_tui.trust.decoding import readable_json
from so_tui.trust.folders import private_folder, umask_of
from so_tui.trust.text import brief_line, brief_message, quoted

_NOTHING = frozenset(("", "N/A", "None", "(null)", "Unknown", "None assigned"))


def _word(text: str) -> str:
    """Return a word of Slurm's; empty if it stands for nothing."""
    return "" if text in _NOTHING else text


_LOG = logging.getLogger(__name__)
TIMEOUT_S = 20.0
_SUBMITTED = re.compile(r"([0-9]{1,12})(;.*)?")
"""The number of the job, and the cluster if there are several."""
_PREFIX = re.compile(r"^s[a-z]+: (error|fatal): ")
"""What Slurm's commands write before each line of an error."""
_QUEUE = "%i|%T|%r|%S|%N|%Z"
_ACCOUNTING = "JobIDRaw,State,Reason,Start,NodeList,WorkDir"
_CONNECTION = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables that say how Slurm is reached."""
_OPTIONS = ("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SLURM_", "SLURMD_", "SRUN_")
"""What other variables begin with that Slurm's commands read as options, or that Slurm set for the
job which submits a successor.
"""


class SlurmError(SoTuiError):
    """A command of Slurm is missing, failed, or did not answer in time."""


class _RefusedError(SlurmError):
    """Slurm refused what a command asked for.

    Attributes:
        lines: Why, in Slurm's words and those of the site's own rules.
    """

    def __init__(self, command: str, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        super().__init__(f"{command} refused: {brief_message('. '.join(lines))}")


def submit(script: str, folder: str, environment: Environment) -> str:
    """Submit a batch script and return the job's id.

    Args:
        script: Its text. Slurm reads it from a pipe: a file could be exchanged before.
        folder: The folder in which the job works. Who may read that may read what the job writes.
        environment: The variables of this command and of the job.

    Raises:
        SlurmError: Slurm refused it, in Slurm's own words, or did not say which job it made.
    """
    printed = _call(
        ("sbatch", "--parsable", f"--chdir={folder}"), environment, script, umask_of(Path(folder))
    )
    last = printed.strip().rpartition("\n")[2]  # sites print greetings before it
    if (found := _SUBMITTED.fullmatch(last)) is None:
        raise SlurmError(f"sbatch did not say which job it made: {brief_line(last)}")
    return found[1]


def own_jobs() -> tuple[Job, ...]:
    """Return this user's jobs that wait, run, or have ended a moment ago. Raises SlurmError."""
    user, form = f"--user={os.geteuid()}", f"--format={_QUEUE}"
    return _parse_queue(_call(("squeue", user, "--states=all", "--noheader", form)))


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
    except SlurmError:  # most sites have it; elsewhere the queue's memory of some minutes must do
        return None
    return next((job for job in _parse_queue(printed) if job.id == job_id), None)


def cancel(job_id: str) -> None:
    """Cancel a job. Raises SlurmError."""
    _call(("scancel", job_id))


def requeue(job_id: str) -> None:
    """End a job, and put it back into the queue. Raises SlurmError."""
    try:
        _call(("scontrol", "requeue", job_id))
    except _RefusedError:
        # Slurm itself requeues a job whose node failed, and refuses to do it again.
        if not any(job.id == job_id and job.state == "PENDING" for job in own_jobs()):
            raise


_AGAIN_S = 60.0


_silence: list[tuple[float, SlurmError]] = []
"""Until when (monotonic) Slurm is not asked again, and why it did not name the cluster."""


@cache
def cluster_name() -> str:
    """Return the name of the cluster that commands of this host speak to. Once known it is not
    asked for again.

    Raises:
        SlurmError: Slurm does not say; it is asked at most once a minute.
    """
    for until, error in _silence:
        if time.monotonic() < until:
            raise error
    try:
        found = re.search(
            r"^ClusterName\s*=(.*)$", _call(("scontrol", "show", "config")), re.MULTILINE
        )
        if found and (name := found[1].strip()):
            return name
        raise SlurmError("Slurm does not say which cluster this is")
    except SlurmError as error:
        _silence[:] = [(time.monotonic() + _AGAIN_S, error)]
        raise


def cluster_here() -> str:
    """Return the name of this host's cluster; empty where there is none, or Slurm does not
    answer.
    """
    try:
        return cluster_name()
    except SlurmError:
        return ""


def _parse_queue(printed: str) -> tuple[Job, ...]:
    """Parse lines of ``squeue`` or ``sacct``; a line of another form is left out."""
    rows = (line.strip().split("|", 5) for line in printed.splitlines())
    return tuple(
        Job(
            id=row[0],
            state=row[1].partition(" ")[0],
            reason=_word(row[2]),
            start=_seconds(row[3]),
            nodes=_word(row[4]),
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


def _call(
    argv: Sequence[str],
    environment: Environment | None = None,
    text: str = "",
    umask: int = -1,
) -> str:
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
            input=text,
            umask=umask,
            capture_output=True,
            encoding="utf-8",
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
        raise _RefusedError(argv[0], lines or [f"exit code {done.returncode}"])
    return done.stdout


# The partitions of a cluster as ``sinfo`` lists them: limits, nodes, GPUs and features.


_FORMAT = "%P|%a|%l|%F|%G|%f"
"""A line for each group of nodes that are alike: partition (the default one with a star), state,
time limit, nodes that are allocated/idle/other/in all, generic resources, features.
"""
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d{1,4})")
_COUNTS = re.compile(r"(\d{1,9})/(\d{1,9})/(\d{1,9})/(\d{1,9})")


class Partition(Struct, frozen=True, kw_only=True):
    """A partition, over all of its nodes."""

    name: str
    default: bool = False
    open: bool = True
    """Whether it takes jobs."""
    time_limit: str = ""
    """As Slurm writes it: ``1-00:00:00``; empty where there is none."""
    nodes: int = 0
    idle: int = 0
    gpus: int = 0
    """Most that a node has; 0 if none is configured as a resource."""
    features: tuple[str, ...] = ()


def partitions() -> tuple[Partition, ...]:
    """Return the partitions that this user can see, the default one first. Raises SlurmError."""
    return _parse_partitions(_call(("sinfo", "--noheader", f"--format={_FORMAT}")))


def _parse_partitions(printed: str) -> tuple[Partition, ...]:
    """Parse lines of ``sinfo``; a line of another form is left out."""
    found: dict[str, list[Partition]] = {}
    for line in printed.splitlines():
        if (part := _parsed(line.strip().split("|"))) is not None:
            found.setdefault(part.name, []).append(part)
    return tuple(
        sorted(map(_together, found.values()), key=lambda partition: not partition.default)
    )


def _parsed(row: list[str]) -> Partition | None:
    counts = _COUNTS.fullmatch(row[3]) if len(row) == 6 else None
    if counts is None:
        return None
    name, state, limit, _, resources, features = row
    return Partition(
        name=name.rstrip("*"),
        default=name.endswith("*"),
        open=state == "up",
        time_limit="" if limit == "infinite" else _word(limit),
        nodes=int(counts[4]),
        idle=int(counts[2]),
        gpus=sum(map(int, _GPUS.findall(resources))),
        features=tuple(features.split(",")) if _word(features) else (),
    )


def _together(parts: Sequence[Partition]) -> Partition:
    return replace(
        parts[0],
        nodes=sum(part.nodes for part in parts),
        idle=sum(part.idle for part in parts),
        gpus=max(part.gpus for part in parts),
        features=tuple(dict.fromkeys(chain.from_iterable(part.features for part in parts))),
    )


# This user's jobs in a file of the cache folder, which all screens and commands share, so that
# Slurm is asked once in an interval.
#
# A scheduler serves thousands of users, and sites limit how often it may be asked. Whoever finds
# the file older than the interval dates it now, and asks; everybody else reads what is there.


class _Queue(Struct, frozen=True, kw_only=True):
    """What Slurm said."""

    v: int = 1
    asked: float
    """In seconds since the epoch, by the clock of the host that asked."""
    jobs: tuple[Job, ...] = ()
    error: str = ""
    """Why Slurm did not answer; the jobs are those of the answer before."""


def queue(cluster: str, interval_s: float) -> _Queue | None:
    """Return the newest answer of this cluster, after asking again if it is older than
    ``interval_s``. None if there was none yet.
    """
    path = _path(cluster)
    if _is_due(path, interval_s):
        before, asked = _found(path), time.time()
        try:
            answer = _Queue(asked=asked, jobs=own_jobs())
        except SlurmError as error:
            answer = _Queue(asked=asked, jobs=before.jobs if before else (), error=str(error))
        _answers[path] = answer
        with contextlib.suppress(OSError):
            write_atomic(path, msgspec.json.encode(answer))
    return _found(path)


_answers: dict[Path, _Queue] = {}
"""What this process was answered: where no file can be written, Slurm must not be asked more
often.
"""


def _is_due(path: Path, interval_s: float) -> bool:
    """Return whether to ask now. The file gets its date before the answer, so that nobody else asks
    meanwhile.
    """
    try:
        private_folder(path.parent)
        try:
            path.touch(0o600, exist_ok=False)
        except FileExistsError:
            if abs(time.time() - path.stat().st_mtime) < interval_s:  # the clock may be behind
                return False
            os.utime(path)
    except OSError:
        known = _answers.get(path)
        return known is None or abs(time.time() - known.asked) >= interval_s
    return True


def _found(path: Path) -> _Queue | None:
    """Return the newest answer that this process or another one got."""
    return min(
        [
            answer
            for answer in (_answers.get(path), readable_json(path, _Queue, own=True))
            if answer is not None
        ],
        key=lambda answer: abs(time.time() - answer.asked),
        default=None,
    )


def _path(cluster: str) -> Path:
    """Return the file of a cluster: one home may serve several."""
    return (
        cache_home() / "slurm" / f"queue.{hashlib.sha256(cluster.encode()).hexdigest()[:12]}.json"
    )


# Why Slurm refused a job: its own words, which have not changed from 22.05 to 25.05, turned into
# problems of the spec's keys.
#
# Problem codes: slurm-account: The account does not exist, is not this user's, or may not use the
# partition. slurm-constraint: No node has these features. slurm-limit: The job asks for more than
# the account, the quality of service or the partition allows. slurm-nodes: No node of the
# partition has what the job asks for. slurm-not-permitted: This user may not use the partition.
# slurm-partition: There is no such partition, or it takes no jobs. slurm-qos: The quality of
# service does not exist, or is not this user's. slurm-time-limit: The time limit is missing, or
# above the partition's.


_FAILED = "Batch job submission failed: "
_SLURMS = (
    _FAILED,
    "invalid partition specified",
    "Invalid generic resource (gres) specification",
    "Memory specification can not be satisfied",
    "CPU count per node can not be satisfied",
)
"""How lines of sbatch itself begin."""
_ACCOUNTS = "`sacctmgr show associations user=$USER format=account,partition,qos` lists yours."
_REFUSALS = (
    (
        "invalid account or account/partition combination",
        "slurm-account",
        "slurm.account",
        _ACCOUNTS,
    ),
    ("invalid partition", "slurm-partition", "slurm.partition", ""),
    (
        "required partition not available",
        "slurm-partition",
        "slurm.partition",
        "It is closed now; try again later.",
    ),
    (
        "group not permitted to use this partition",
        "slurm-not-permitted",
        "slurm.partition",
        "Choose another, or ask your site.",
    ),
    ("invalid qos", "slurm-qos", "slurm.qos", _ACCOUNTS),
    (
        "invalid feature",
        "slurm-constraint",
        "slurm.constraint",
        "`sinfo --format='%P %f'` lists the features of nodes.",
    ),
    (
        "time limit is invalid",
        "slurm-time-limit",
        "slurm.time_limit",
        "`sinfo --format='%P %l'` lists the limits of partitions.",
    ),
    (
        "violates accounting/qos policy",
        "slurm-limit",
        "slurm.qos",
        "Ask for fewer nodes or less time, or name another account or qos.",
    ),
    (
        "requested node configuration is not available",
        "slurm-nodes",
        "gpus",
        "`sinfo --format='%P %c %m %G'` lists what nodes have.",
    ),
    (
        "invalid generic resource",
        "slurm-nodes",
        "gpus",
        "`sinfo --format='%P %G'` lists the GPUs of nodes.",
    ),
    (
        "more processors requested than permitted",
        "slurm-nodes",
        "nodes",
        "`sinfo --format='%P %D %c'` lists how many there are.",
    ),
    (
        "node count specification invalid",
        "slurm-nodes",
        "nodes",
        "`sinfo --format='%P %D %s'` lists how many a job may have.",
    ),
)
"""A part of what Slurm says, in lower case, its code, the key that it is about, and the remedy; if
that is empty, the partitions are listed.
"""


def explained(error: SlurmError, spec: RunSpec) -> InputError | SlurmError:
    """Return a refused submission as a problem of the key that caused it.

    It stays as it is if Slurm's words are not known, or if a site's own rule has refused it, in
    words of its own.
    """
    if not isinstance(error, _RefusedError) or not all(
        line.startswith(_SLURMS) for line in error.lines
    ):
        return error
    said = error.lines[-1].removeprefix(_FAILED)
    for words, code, field, remedy in _REFUSALS:
        if words in said.lower():
            section, _, key = field.rpartition(".")
            return reject(
                code,
                field,
                str(getattr(spec.slurm if section else spec, key)),
                f"Slurm says: {brief_message(said)}",
                remedy or _partitions_remedy(spec.slurm.partition),
            )
    return error


def _partitions_remedy(given: str) -> str:
    try:
        names = tuple(partition.name for partition in partitions())
    except SlurmError:
        return "`sinfo` lists the partitions."
    return f"{nearest(given, names)}Partitions: {', '.join(names)}."
