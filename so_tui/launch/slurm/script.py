"""The batch script of a job: what Slurm reads and what the node's shell executes. Pure.

Problem codes:
    account-missing: The site charges an account, and the spec names none.
    option-refused: The site refuses an option of ``slurm.options``.
    option-reserved: so-tui itself sets an option of ``slurm.options``.
    path-unfit-for-slurm: Slurm would read the run directory's path as a pattern, or it has more
        than one line.
    script-without-run: A script of the user has no line that names the run directory.
    time-limit-too-short: The job would be warned of its end before it has trained for as long as
        the warning is early.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from so_tui.folders import state_home, user_folder
from so_tui.launch.launch import OUTPUT
from so_tui.launch.slurm.client import cluster_here
from so_tui.launch.supervisor.slowness import EXPECTED_VARIABLE
from so_tui.machine.interpreter import architecture_of
from so_tui.plan.plan import Plan
from so_tui.plan.saving import DISK_BYTES_PER_S
from so_tui.runs.directory import LAUNCH_VARIABLE
from so_tui.spec import InputError, Problem, RunSpec, SoTuiError
from so_tui.spec.check import write_atomic
from so_tui.spec.errors import reject
from so_tui.trust.decoding import LARGEST_FILE_BYTES, decode_toml
from so_tui.trust.files import NotOwnError, read_bounded, read_own
from so_tui.trust.folders import private_folder
from so_tui.units import duration

# Batch scripts that the user changes in an editor, as ``git commit`` does with messages. A changed
# one is kept until it is submitted.


def edited(text: str) -> str:
    """Return a text as the user saves it in ``$VISUAL``, ``$EDITOR``, or vi. Only the main thread
    may call this.

    Raises:
        SoTuiError: The editor cannot be started, fails, or leaves nothing.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="so-tui-") as folder:
        path = Path(folder) / "job.sh"
        path.write_text(text, encoding="utf-8")
        # Ctrl-C is for the editor alone, which is in the same process group. A handler, unlike
        # SIG_IGN, is not inherited by it.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
            saved = path.read_text(encoding="utf-8") if path.exists() else ""
        except UnicodeDecodeError as error:
            raise SoTuiError(
                f"the editor `{editor}` saved what is not UTF-8 ({error}). Set its encoding to "
                "UTF-8"
            ) from error
        except (OSError, ValueError) as error:
            raise SoTuiError(
                f"the editor `{editor}` cannot be started ({error}). Set EDITOR to another one"
            ) from error
        finally:
            signal.signal(signal.SIGINT, before)
    if code != 0 or not saved.strip():
        why = f"ended with code {code}" if code else "left an empty file"
        raise SoTuiError(f"the editor `{editor}` {why}, so the script was not changed")
    return saved


class Draft(Struct, frozen=True):
    """A batch script that the user has changed, kept in a file until it is submitted."""

    script: str
    path: Path


def kept(script: str, name: str, before: Draft | None = None) -> Draft:
    """Keep a changed script in the user's own folder.

    Args:
        script: What the user saved.
        name: Name of the spec; the file is named after it.
        before: What the user has changed again, whose file is replaced.

    Raises:
        OSError, SoTuiError: It cannot be written.
    """
    folder = private_folder(state_home() / "scripts")
    path = (
        before.path
        if before
        else folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sh"
    )
    write_atomic(path, script.encode())
    return Draft(script, path)


# Site profiles: what a computing centre expects of a job, as TOML.
#
# Built-in profiles are in ``so_tui/sites``, the user's own in ``~/.config/so-tui/sites``; the
# user's win. A profile holds lines of shell that jobs execute, so a user's file must belong to
# that user and must not be writable by others.
#
# Problem codes: unknown-site: There is no profile of this name. invalid-site: A profile is not
# TOML, has an unknown key or a wrong value, or is not this user's own.


GENERIC = "generic"

Option = Annotated[str, Meta(pattern=r"^-[A-Za-z0-9-]+(=[^\n\0\"\\]*)?\Z", max_length=400)]
OptionOrNone = Annotated[str, Meta(pattern=r"^(-[A-Za-z0-9-]+(=[^\n\0\"\\]*)?)?\Z", max_length=400)]
Line = Annotated[str, Meta(pattern=r"^[^\n\0]*\Z", max_length=2000)]
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", max_length=100)]
TimeLimit = Annotated[str, Meta(pattern=r"^(\d{1,4}:\d\d:\d\d)?\Z")]


class PartitionProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site's documentation says of one partition."""

    time_limit: TimeLimit = ""
    """The longest time that a job may ask for; it is asked for unless the spec gives less."""
    machine: str = ""
    """What its nodes are, by the name that ``--machine`` takes."""


class Site(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site profile."""

    title: Line
    source: str = ""
    """Where this comes from, and when it was read."""
    clusters: tuple[str, ...] = ()
    """Names of clusters (``ClusterName`` in ``scontrol show config``) by which the profile is
    recognised.
    """
    account_required: bool = False
    options: tuple[Option, ...] = ()
    """Options of ``sbatch`` that every job gets."""
    refused_options: tuple[str, ...] = ()
    """Options that the site refuses, without their values."""
    node_option: OptionOrNone = "--exclusive"
    """How a job asks for a whole node; empty where it gets one anyway, or shares."""
    cores_per_gpu: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Cores to ask for with each GPU, where nodes are shared; 0 to leave that to the site."""
    memory_per_gpu_gib: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """The same for host memory, in Slurm's ``G`` (GiB)."""
    gpu_option: OptionOrNone = "--gpus-per-node={gpus}"
    """How a job asks for GPUs; empty where nodes are given with all of theirs."""
    interface: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]*\Z", max_length=64)] = ""
    """The network interface over which the ranks of several nodes find each other (``hsn0``,
    ``ib0``).
    """
    network: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_ .-]*\Z", max_length=100)] = ""
    """What NCCL calls the network that it should use between nodes (``IB``, ``AWS Libfabric``). If
    it uses sockets instead, a run ends.
    """
    setup: tuple[Line, ...] = ()
    """Lines of shell before the start: modules, an environment to activate."""
    environment: dict[VariableName, str] = {}
    """Variables of the job."""
    python: str = ""
    """The interpreter of the compute nodes, with so-tui and its training packages; if empty, the
    one that submits.
    """
    requeue: bool = False
    """Whether Slurm may start a job again, after a node has failed, when it gives way to another
    job, or at its time limit. Otherwise another job continues.
    """
    internet: bool = True
    """Whether nodes reach the internet. If not, model and data must be in the cache before a job is
    submitted.
    """
    step_options: tuple[Option, ...] = ()
    """Options of ``srun``, such as the container to enter."""
    machine: str = ""
    """What the nodes of partitions are that say nothing else; planned for until a job has seen
    one.
    """
    network_gbit_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0
    """Line rate of a node's network, all adapters together, each way; 0 if it is not published."""
    poll_s: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    """The least seconds between two questions to the scheduler."""
    warning_s: Annotated[int, Meta(ge=30, le=86_400)] = 300
    """How long before its time limit a job is warned, to save a checkpoint. Slurm may warn up to 60
    s earlier.
    """
    partitions: dict[str, PartitionProfile] = {}

    def partition(self, name: str) -> PartitionProfile:
        """Return what is said of a partition."""
        return self.partitions.get(name, PartitionProfile())

    @property
    def interpreter(self) -> str:
        """The interpreter that jobs use: the profile's, else this one."""
        return self.python or sys.executable

    @property
    def architecture(self) -> str:
        """The architecture of the interpreter of jobs, as ``uname -m`` names it; empty if unknown,
        such as in a container.
        """
        return "" if self.step_options else architecture_of(self.interpreter)


def _builtin_sites() -> Path:
    """Return the folder of the built-in profiles."""
    return Path(__file__).parents[2] / "sites"


def _user_sites() -> Path:
    """Return the folder of the user's profiles."""
    return user_folder().parent / "sites"


def _site_names() -> tuple[str, ...]:
    """Return the names of all profiles."""
    paths = (*_builtin_sites().glob("*.toml"), *_user_sites().glob("*.toml"))
    return tuple(sorted({path.stem for path in paths}))


_UNREADABLE = OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError


def load_site(name: str) -> Site:
    """Return a profile. Raises InputError with the codes of this module."""
    own, builtin = _user_sites() / f"{name}.toml", _builtin_sites() / f"{name}.toml"
    path = own if own.is_file() else builtin
    if not path.is_file():
        raise reject(
            "unknown-site",
            "slurm.site",
            name,
            "there is no such profile",
            f"Choose one of {', '.join(_site_names())}, or write {own}.",
        )
    try:
        content = read_own(path) if path == own else read_bounded(path, LARGEST_FILE_BYTES)
        return msgspec.convert(decode_toml(content), Site)
    except _UNREADABLE as error:
        message, remedy = str(error), "docs/cluster.md lists its keys."
        if isinstance(error, NotOwnError):
            message = f"its lines would be executed: {error}"
            remedy = "Make it your own file, which others cannot write."
        raise reject("invalid-site", "slurm.site", name, message, remedy, file=str(path)) from error


def wrong_sites() -> tuple[Problem, ...]:
    """Return what is wrong with the user's profiles that cannot be used."""
    problems: list[Problem] = []
    for path in sorted(_user_sites().glob("*.toml")):
        try:
            load_site(path.stem)
        except InputError as error:
            problems += error.problems
    return tuple(problems)


def site_name(given: str) -> str:
    """Return the name of a profile: the given one, or if it is empty the one that names this
    cluster, else ``generic``. A wrong profile concerns only the cluster that it names.
    """
    cluster = "" if given else cluster_here()
    named = (name for name in _site_names() if cluster and cluster in _clusters_of(name))
    return given or next(named, GENERIC)


def _clusters_of(name: str) -> tuple[Any, ...]:
    """Return the clusters that a profile names, also one that is wrong; if it cannot be read, those
    of the one that it replaces.

    So nobody's job is submitted without the options that a profile was written for.
    """
    own, builtin = _user_sites() / f"{name}.toml", _builtin_sites() / f"{name}.toml"
    for path, read in ((own, read_own), (builtin, Path.read_bytes)):
        with contextlib.suppress(*_UNREADABLE):
            return msgspec.convert(decode_toml(read(path)).get("clusters", ()), tuple[Any, ...])
    return ()


CONTINUE_SIGNAL = "USR1"
_EARLY_S = 60
"""Slurm may warn a job this much earlier than asked."""
_MARGIN = 2.0
_STEP_S = 60
"""For the step in progress, which is finished first."""
_RUN = re.compile(rf"^so_tui_run=(.*)$(?:\nexport {LAUNCH_VARIABLE}=.*$)?", re.MULTILINE)
_QUOTES = "'\""
_SET_HERE = """
    --array --chdir --clusters --error --export --export-file --get-user-env --input --job-name
    --nodes --no-requeue --ntasks --ntasks-per-node --open-mode --output --parsable --partition
    --requeue --signal --test-only --time --wait --wrap --account --qos --constraint --uid --gid
"""
_RESERVED = frozenset(_SET_HERE.split())
_REMEDY = (
    "so-tui: name an interpreter of the compute nodes, with so-tui and its training packages, in "
    "the site profile (python = ...)"
)


def _warning_s(plan: Plan, site: Site, checkpoint_s: float | None) -> int:
    """Return how long before its time limit a job is warned: the profile's time, or more if the
    checkpoints that may have to be written by then take longer.
    """
    takes_s = plan.disk_bytes / DISK_BYTES_PER_S if checkpoint_s is None else checkpoint_s
    checkpoint = plan.spec.checkpoint
    # One that is being written behind training, and the last one.
    checkpoints = 2 if checkpoint.repeats and checkpoint.background else 1
    return max(site.warning_s, math.ceil(_MARGIN * checkpoints * takes_s) + _STEP_S)


def batch_script(
    plan: Plan,
    site: Site,
    run: Path,
    attempt: int,
    checkpoint_s: float | None = None,
    digest: str = "",
) -> str:
    """Return the batch script of an attempt.

    Args:
        plan: What is trained, with the partition to run on.
        site: The profile of the site.
        run: The run directory.
        attempt: The attempt's number.
        checkpoint_s: What the run's slowest checkpoint took; None before the first.
        digest: The hash of the attempt's launch; empty before it is written.

    Raises:
        InputError: With the codes of this module.
    """
    spec, warning_s = plan.spec, _warning_s(plan, site, checkpoint_s)
    if problems := tuple(_problems(spec, site, warning_s, run)):
        raise InputError(problems)
    gpus = sum(rank.gpu is not None for rank in plan.binding)
    # One supervisor a node. One that ends with an error must not end the others, which have to say
    # why.
    tasks = (f"--nodes={spec.nodes}", f"--ntasks={spec.nodes}", "--ntasks-per-node=1")
    step = ("srun", *tasks, "--cpu-bind=none", "--kill-on-bad-exit=0", *site.step_options)
    interpreter = (*step, site.interpreter, "-P")
    check = shlex.join((*interpreter, "-m", "so_tui.machine.interpreter", str(gpus)))
    supervise = f'-m so_tui supervise "$so_tui_run" --attempt {attempt} --in-job'
    return "\n".join(
        (
            "#!/bin/bash",
            f"#SBATCH --job-name={_job_name(run.name)}",
            *(f"#SBATCH {option}" for option in _options(spec, site, gpus, warning_s)),
            "",
            f"# Attempt {attempt} of the run {spec.name}, written by so-tui for {site.title}.",
            *(
                f"export {name}={shlex.quote(value)}"
                for name, value in sorted(_environment(spec, site).items())
            ),
            *site.setup,
            *([_architecture_check(site)] if site.architecture else ()),
            f"{check} || {{ echo {shlex.quote(_REMEDY)} >&2; exit 69; }}",
            f"so_tui_run={shlex.quote(str(run))}",
            *([f"export {LAUNCH_VARIABLE}={digest}"] if digest else ()),
            f"exec {shlex.join(interpreter)} {supervise}",
            "",
        )
    )


def _architecture_check(site: Site) -> str:
    """Return the line that ends a job whose node could not execute its interpreter, which the shell
    would only call a wrong format.
    """
    built_for = site.architecture
    message = shlex.quote(f"so-tui: {site.interpreter} is built for {built_for}, and this node is ")
    says = f'echo {message}"$(uname -m)" >&2; echo {shlex.quote(_REMEDY)} >&2'
    return f'[ "$(uname -m)" = {built_for} ] || {{ {says}; exit 69; }}'


def for_run(script: str, generated: str) -> str:
    """Return a user's script for the run that a generated script is for; it may have been made for
    another one.

    The job is named after the new run, too, unless the user has named it.

    Raises:
        InputError: It names no run (code ``script-without-run``).
    """
    named, other = _RUN.search(generated), _RUN.search(script)
    if named is None or other is None:
        raise reject(
            "script-without-run",
            "--script",
            "",
            "has no line `so_tui_run=...`, which names the run directory",
            "Keep it, and what uses it, as --edit shows them.",
        )
    return _RUN.sub(lambda _: named[0], script, count=1).replace(
        _name_option(other), _name_option(named), 1
    )


def _name_option(run_line: re.Match[str]) -> str:
    """Return the line that names the job after the run that a script's line names."""
    return f"#SBATCH --job-name={_job_name(run_line[1].strip(_QUOTES).rpartition('/')[2])}\n"


def _job_name(run_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", run_name)


def _environment(spec: RunSpec, site: Site) -> dict[str, str]:
    """Return a job's variables; those of the profile win. Without internet, every look-up on the
    hub would wait for half a minute.
    """
    several = {
        EXPECTED_VARIABLE: site.network,
        "GLOO_SOCKET_IFNAME": site.interface,
        "NCCL_SOCKET_IFNAME": site.interface,
    }
    found = {name: value for name, value in several.items() if value} if spec.nodes > 1 else {}
    return found | ({} if site.internet else {"HF_HUB_OFFLINE": "1"}) | site.environment


def _time_limit_of(spec: RunSpec, site: Site) -> str:
    """Return the time limit that a job asks for; empty for the partition's own."""
    return spec.slurm.time_limit or site.partition(spec.slurm.partition).time_limit


def _seconds_of(time_limit: str) -> int:
    """Return a time limit in seconds, in any of the forms that Slurm takes: ``90``, ``90:00``,
    ``1:30:00``, ``1-12``, ``1-12:30:00``.
    """
    days, _, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return int(days or 0) * 86_400 + seconds


def _problems(spec: RunSpec, site: Site, warning_s: int, run: Path) -> Iterator[Problem]:
    if site.account_required and not spec.slurm.account:
        yield Problem(
            "account-missing",
            "slurm.account",
            "",
            f"{site.title} charges an account",
            "Give it with --account NAME, or in a preset of yours.",
        )
    time_limit = _time_limit_of(spec, site)
    if time_limit and _seconds_of(time_limit) < 2 * warning_s + _EARLY_S:
        yield Problem(
            "time-limit-too-short",
            "slurm.time_limit",
            time_limit,
            f"the job saves its checkpoint {duration(warning_s + _EARLY_S)} before the end, which "
            "leaves too little time to train",
            f"Ask for at least {duration(2 * warning_s + _EARLY_S)}, or lower warning_s in the "
            "site profile.",
        )
    for option in spec.slurm.options:
        name = option.partition("=")[0]
        if name in site.refused_options:
            yield Problem(
                "option-refused",
                "slurm.options",
                option,
                f"{site.title} refuses {name}",
                "Leave it out.",
            )
        elif any(reserved.startswith(name) for reserved in _RESERVED):  # Slurm takes abbreviations
            yield Problem(
                "option-reserved",
                "slurm.options",
                option,
                "so-tui sets this option",
                "Leave it out; partition, account, qos, time_limit and constraint have keys of "
                "their own.",
            )
    # Slurm replaces %j and the like in the whole path of a job's output, its folder included.
    if any(character in str(run) for character in "%\\\n"):
        yield Problem(
            "path-unfit-for-slurm",
            "--runs-dir",
            str(run.parent),
            "Slurm cannot write into a folder with %, \\ or a line end in its path",
            "Choose another folder with --runs-dir.",
        )


def _options(spec: RunSpec, site: Site, gpus: int, warning_s: int) -> Iterator[str]:
    slurm, share = spec.slurm, max(1, gpus)
    given = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": _time_limit_of(spec, site),
        "constraint": slurm.constraint and f'"{slurm.constraint}"',
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
    }
    shared = {
        "cpus-per-task": share * site.cores_per_gpu,
        "mem": site.memory_per_gpu_gib and f"{share * site.memory_per_gpu_gib}G",
        # To the processes of the step, not to this script: the supervisor and the ranks handle it,
        # and srun does not see it.
        "signal": f"{CONTINUE_SIGNAL}@{warning_s}",
    }
    return filter(
        None,
        (
            *(f"--{name}={value}" for name, value in given.items() if value),
            site.gpu_option.replace("{gpus}", str(gpus)) if gpus else "",
            site.node_option,
            *(f"--{name}={value}" for name, value in shared.items() if value),
            "--requeue" if site.requeue and slurm.continues else "--no-requeue",
            f"--output={OUTPUT}",
            "--open-mode=append",
            *site.options,
            *slurm.options,
        ),
    )
