"""Site profiles: what a computing centre expects of a job, as TOML.

Built-in profiles are in ``so_tui/sites``, the user's own in ``~/.config/so-tui/sites``; the user's win. A profile holds lines of shell that
jobs execute, so a user's file must belong to that user and must not be writable by others.

Problem codes:
    unknown-site: There is no profile of this name.
    invalid-site: A profile is not TOML, has an unknown key or a wrong value, or is not this user's own.
"""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from so_tui.folders import user_folder
from so_tui.spec import InputError, Problem
from so_tui.trust.decoding import decode_toml
from so_tui.trust.ownership import NotOwnError, read_own

_LOG = logging.getLogger(__name__)

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
    """Names of clusters (``ClusterName`` in ``scontrol show config``) by which the profile is recognised."""
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
    """The network interface over which the ranks of several nodes find each other (``hsn0``, ``ib0``)."""
    network: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_ .-]*\Z", max_length=100)] = ""
    """What NCCL calls the network that it should use between nodes (``IB``, ``AWS Libfabric``). If it uses sockets instead, a run ends."""
    setup: tuple[Line, ...] = ()
    """Lines of shell before the start: modules, an environment to activate."""
    environment: dict[VariableName, str] = {}
    """Variables of the job."""
    python: str = ""
    """The interpreter of the compute nodes, with so-tui and its training packages; if empty, the one that submits."""
    requeue: bool = False
    """Whether Slurm may start a job again, after a node has failed, when it gives way to another job, or at its time limit. Otherwise
    another job continues."""
    internet: bool = True
    """Whether nodes reach the internet. If not, model and data must be in the cache before a job is submitted."""
    step_options: tuple[Option, ...] = ()
    """Options of ``srun``, such as the container to enter."""
    machine: str = ""
    """What the nodes of partitions are that say nothing else; planned for until a job has seen one."""
    network_gbit_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0
    """Line rate of a node's network, all adapters together, each way; 0 if it is not published."""
    poll_s: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    """The least seconds between two questions to the scheduler."""
    warning_s: Annotated[int, Meta(ge=30, le=86_400)] = 300
    """How long before its time limit a job is warned, to save a checkpoint. Slurm may warn up to 60 s earlier."""
    partitions: dict[str, PartitionProfile] = {}


def builtin_sites() -> Path:
    """Return the folder of the built-in profiles."""
    return Path(__file__).parents[3] / "sites"


def user_sites() -> Path:
    """Return the folder of the user's profiles."""
    return user_folder().parent / "sites"


def site_names() -> tuple[str, ...]:
    """Return the names of all profiles."""
    return tuple(
        sorted(
            {
                path.stem
                for folder in (builtin_sites(), user_sites())
                for path in folder.glob("*.toml")
            }
        )
    )


def load_site(name: str) -> Site:
    """Return a profile. Raises InputError with the codes of this module."""
    own, builtin = user_sites() / f"{name}.toml", builtin_sites() / f"{name}.toml"
    path = own if own.is_file() else builtin
    if not path.is_file():
        remedy = f"Choose one of {', '.join(site_names())}, or write {own}."
        raise InputError(
            [
                Problem(
                    code="unknown-site",
                    field="slurm.site",
                    value=name,
                    message="there is no such profile",
                    remedy=remedy,
                )
            ]
        )
    try:
        content = read_own(path) if path == own else path.read_bytes()
        return msgspec.convert(decode_toml(content), Site)
    except NotOwnError as error:
        raise _invalid(
            path,
            f"its lines would be executed: {error}",
            "Make it your own file, which others cannot write.",
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise _invalid(path, str(error), "docs/cluster.md lists its keys.") from error


def wrong_sites() -> tuple[Problem, ...]:
    """Return what is wrong with the user's profiles that cannot be used."""
    problems: list[Problem] = []
    for path in sorted(user_sites().glob("*.toml")):
        try:
            load_site(path.stem)
        except InputError as error:
            problems += error.problems
    return tuple(problems)


def recognised_site(cluster: str) -> str:
    """Return the name of the profile that names a cluster, else ``generic``. A wrong profile concerns only the cluster that it names."""
    return next(
        (name for name in site_names() if cluster and cluster in _clusters_of(name)), GENERIC
    )


def _clusters_of(name: str) -> tuple[str, ...]:
    """Return the clusters that a profile names; of one that is wrong, as far as it can be read, with those of the one that it replaces.

    So nobody's job is submitted without the options that a profile was written for.
    """
    try:
        return load_site(name).clusters
    except InputError as error:
        _LOG.info("site profile %s cannot be used: %s", name, error)
    builtin = builtin_sites() / f"{name}.toml"
    replaced = (
        msgspec.convert(decode_toml(builtin.read_bytes()), Site).clusters
        if builtin.is_file()
        else ()
    )
    try:
        given = decode_toml(read_own(user_sites() / f"{name}.toml")).get("clusters")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError):
        return replaced
    return (
        (*replaced, *(text for text in given if isinstance(text, str)))
        if isinstance(given, list)
        else replaced
    )


def _invalid(path: Path, message: str, remedy: str) -> InputError:
    return InputError(
        [
            Problem(
                code="invalid-site",
                field="slurm.site",
                value=path.stem,
                message=message,
                remedy=remedy,
                file=str(path),
            )
        ]
    )
