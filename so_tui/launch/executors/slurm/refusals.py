"""Why Slurm refused a job: its own words, which have not changed from 22.05 to 25.05, turned into problems of the spec's keys.

Problem codes:
    slurm-account: The account does not exist, is not this user's, or may not use the partition.
    slurm-constraint: No node has these features.
    slurm-limit: The job asks for more than the account, the quality of service or the partition allows.
    slurm-nodes: No node of the partition has what the job asks for.
    slurm-not-permitted: This user may not use the partition.
    slurm-partition: There is no such partition, or it takes no jobs.
    slurm-qos: The quality of service does not exist, or is not this user's.
    slurm-time-limit: The time limit is missing, or above the partition's.
"""

from __future__ import annotations

from typing import NamedTuple

from so_tui.launch.executors.slurm.commands import RefusedError, SlurmError
from so_tui.launch.executors.slurm.partitions import partitions
from so_tui.spec import InputError, Problem, RunSpec
from so_tui.spec.wording import nearest
from so_tui.trust.printable import brief_message


class _Refusal(NamedTuple):
    words: str
    """A part of what Slurm says, in lower case."""
    code: str
    field: str
    remedy: str


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
    _Refusal(
        "invalid account or account/partition combination",
        "slurm-account",
        "slurm.account",
        _ACCOUNTS,
    ),
    _Refusal("invalid partition", "slurm-partition", "slurm.partition", ""),
    _Refusal(
        "required partition not available",
        "slurm-partition",
        "slurm.partition",
        "It is closed now; try again later.",
    ),
    _Refusal(
        "group not permitted to use this partition",
        "slurm-not-permitted",
        "slurm.partition",
        "Choose another, or ask your site.",
    ),
    _Refusal("invalid qos", "slurm-qos", "slurm.qos", _ACCOUNTS),
    _Refusal(
        "invalid feature",
        "slurm-constraint",
        "slurm.constraint",
        "`sinfo --format='%P %f'` lists the features of nodes.",
    ),
    _Refusal(
        "time limit is invalid",
        "slurm-time-limit",
        "slurm.time_limit",
        "`sinfo --format='%P %l'` lists the limits of partitions.",
    ),
    _Refusal(
        "violates accounting/qos policy",
        "slurm-limit",
        "slurm.qos",
        "Ask for fewer nodes or less time, or name another account or qos.",
    ),
    _Refusal(
        "requested node configuration is not available",
        "slurm-nodes",
        "gpus",
        "`sinfo --format='%P %c %m %G'` lists what nodes have.",
    ),
    _Refusal(
        "invalid generic resource",
        "slurm-nodes",
        "gpus",
        "`sinfo --format='%P %G'` lists the GPUs of nodes.",
    ),
    _Refusal(
        "more processors requested than permitted",
        "slurm-nodes",
        "nodes",
        "`sinfo --format='%P %D %c'` lists how many there are.",
    ),
    _Refusal(
        "node count specification invalid",
        "slurm-nodes",
        "nodes",
        "`sinfo --format='%P %D %s'` lists how many a job may have.",
    ),
)


def explained(error: SlurmError, spec: RunSpec) -> InputError | SlurmError:
    """Return a refused submission as a problem of the key that caused it.

    It stays as it is if Slurm's words are not known, or if a site's own rule has refused it, in words of its own.
    """
    if not isinstance(error, RefusedError) or not all(
        line.startswith(_SLURMS) for line in error.lines
    ):
        return error
    said = error.lines[-1].removeprefix(_FAILED)
    found = next((refusal for refusal in _REFUSALS if refusal.words in said.lower()), None)
    if found is None:
        return error
    remedy = found.remedy or _partitions_remedy(spec.slurm.partition)
    value = _value(spec, found.field)
    return InputError(
        [
            Problem(
                code=found.code,
                field=found.field,
                value=value,
                message=f"Slurm says: {brief_message(said)}",
                remedy=remedy,
            )
        ]
    )


def _value(spec: RunSpec, field: str) -> str:
    section, _, key = field.rpartition(".")
    return str(getattr(spec.slurm if section else spec, key))


def _partitions_remedy(given: str) -> str:
    try:
        names = tuple(partition.name for partition in partitions())
    except SlurmError:
        return "`sinfo` lists the partitions."
    return f"{nearest(given, names)}Partitions: {', '.join(names)}."
